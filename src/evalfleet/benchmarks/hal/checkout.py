"""HAL itself, asked in its own Python by a child process inside its checkout; nothing of it is imported."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import tempfile
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field

from evalfleet.errors import RequestError
from evalfleet.model import decodable
from evalfleet.names import hint

from .settings import WANDB_KEY, HalSettings

IN_HAL = Path(__file__).parent / "host" / "in_hal.py"
LIST_S = 3600.0
"""HAL may have to download data before it can list tasks."""
PASSED_ON = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "TMPDIR", "TZ", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR")
PASSED_ON_PREFIXES = ("HF_", "HUGGINGFACE_", "DOCKER_", "SSL_", "REQUESTS_", "CURL_", "CONDA_")
PROXIES = ("http_proxy", "https_proxy", "no_proxy", "all_proxy")
_LINE = 400


class HalAnswer(Struct, frozen=True):
    """What HAL answered, or why it did not."""

    stage: str = ""
    problem: str = ""
    kind: str = ""
    module: str = ""
    known: tuple[str, ...] = ()
    tasks: Mapping[str, Any] = field(default_factory=dict[str, Any])
    setup_script: str = ""
    results: Any = None
    metrics: Mapping[str, Any] = field(default_factory=dict[str, Any])
    steps: Mapping[str, int] = field(default_factory=dict[str, int])
    """Task -> how many steps it has."""
    prompts: Mapping[str, str] = field(default_factory=dict[str, str])
    args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    wandb: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What W&B has of the run, if it was asked to trace it."""


def environ(secrets: Mapping[str, str]) -> dict[str, str]:
    """What HAL sees of our environment: no key that it was not given by name."""
    own = {
        name: value
        for name, value in os.environ.items()
        if name in PASSED_ON or name.startswith(PASSED_ON_PREFIXES) or name.lower() in PROXIES
    }
    off = {} if WANDB_KEY in secrets else {"WEAVE_DISABLED": "true"}
    return {**own, **off, "PYTHONUNBUFFERED": "1", **secrets}


def first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")[:_LINE]


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")[:_LINE]


def _words(settings: HalSettings, verb: str, folder: Path) -> list[str]:
    return [settings.hal_python, str(IN_HAL), verb, str(folder / "order.json"), str(folder / "answer.json")]


def read_answer(folder: Path, log: str) -> HalAnswer:
    try:
        return msgspec.json.decode((folder / "answer.json").read_bytes(), type=decodable(HalAnswer))
    except OSError:
        return HalAnswer(problem=last_line(log) or "it ended without a word")
    except msgspec.MsgspecError as err:
        return HalAnswer(problem=f"its answer cannot be read ({err})")


def _ask(settings: HalSettings, verb: str, order: Mapping[str, Any]) -> HalAnswer:
    """Ask HAL and wait for the answer, while nothing else is under way. Raises RequestError."""
    with tempfile.TemporaryDirectory(prefix="evalfleet-hal-") as scratch:
        folder = Path(scratch)
        (folder / "order.json").write_bytes(msgspec.json.encode(order))
        with (folder / "log").open("w+b") as log:
            try:
                child = subprocess.Popen(
                    _words(settings, verb, folder),
                    cwd=settings.hal_repo,
                    env=environ({}),
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            except OSError as err:
                raise RequestError(
                    f"HAL's Python {settings.hal_python} cannot be run ({err.strerror}): "
                    "name another with --set hal_python=PATH"
                ) from None
            try:
                child.wait(LIST_S)
            except subprocess.TimeoutExpired:
                raise RequestError(f"HAL did not list its tasks within {LIST_S:g} s") from None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                assert child.stdin is not None
                child.stdin.close()
        return read_answer(folder, (folder / "log").read_text("utf-8", "replace"))


async def ask_in_background(
    settings: HalSettings, verb: str, order: Mapping[str, Any], folder: Path, secrets: Mapping[str, str]
) -> HalAnswer:
    """Ask HAL for what takes long. The child ends with whoever asked, also if that is killed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "answer.json").unlink(missing_ok=True)
    (folder / "order.json").write_bytes(msgspec.json.encode(order))
    with (folder / "log").open("wb") as log:
        child = await asyncio.create_subprocess_exec(
            *_words(settings, verb, folder),
            cwd=settings.hal_repo,
            env=environ(secrets),
            stdin=asyncio.subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            await asyncio.wait_for(child.wait(), settings.grade_timeout_s)
        except TimeoutError:
            return HalAnswer(stage="grading", problem=f"no grades within {settings.grade_timeout_s:g} s")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            await child.wait()
    told = read_answer(folder, (folder / "log").read_text("utf-8", "replace"))
    return msgspec.structs.replace(told, stage=told.stage or "grading")


@cache
def listing(settings: HalSettings) -> HalAnswer:
    """HAL's own tasks of a benchmark, as it strips them, once a process. Raises RequestError."""
    if settings.tasks_file:
        tasks = tasks_in_file(Path(settings.tasks_file))
        return HalAnswer(
            tasks={id: {k: v for k, v in task.items() if k != "answer"} for id, task in tasks.items()}
        )
    told = _ask(settings, "list", {"benchmark": settings.benchmark, "agent_dir": settings.agent_dir})
    if not told.problem:
        return told
    raise RequestError(_remedy(settings, told))


def parsed_args(settings: HalSettings, args: Mapping[str, str]) -> dict[str, Any]:
    """`-A` as HAL's command line reads it. Raises RequestError."""
    if not args:
        return {}
    if settings.tasks_file:
        return {key.replace("-", "_"): _as_json_or_word(text) for key, text in args.items()}
    told = _ask(settings, "args", {"args": args})
    if told.problem:
        raise RequestError(f"HAL's Python cannot read -A: {first_line(told.problem)}")
    return dict(told.args)


def _as_json_or_word(text: str) -> Any:
    """The value as HAL reads it, where that needs no YAML."""
    try:
        return msgspec.json.decode(text)
    except msgspec.MsgspecError:
        return text.split(",") if "," in text else None if text.lower() in ("none", "nan") else text


@cache
def tasks_in_file(path: Path) -> Mapping[str, dict[str, Any]]:
    """Task -> what the agent gets, and its `answer`, which is right. Raises RequestError."""
    try:
        tasks = msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, Any]])
    except OSError as err:
        raise RequestError(f"tasks_file {path} cannot be read ({err.strerror})") from None
    except (msgspec.MsgspecError, UnicodeError) as err:
        raise RequestError(f"tasks_file {path} is no JSON object of tasks ({err})") from None
    for id, task in tasks.items():
        if "answer" not in task:
            raise RequestError(f"tasks_file {path}: task {id!r} has no 'answer' to grade with")
    return tasks


def _remedy(settings: HalSettings, told: HalAnswer) -> str:
    python, name = settings.hal_python, settings.benchmark
    if told.module.partition(".")[0] == "weave" and told.module != "weave":
        return (
            f"W&B's library in {python} is too new for HAL (it has no {told.module}): "
            f"{python} -m pip install 'weave<0.54'"
        )
    if told.module:
        return _remedy_of_import(settings, told)
    if told.known and name not in told.known:
        return f"HAL has no benchmark {name!r}; {hint(name, told.known)}"
    what = " ".join(told.problem.split())[:_LINE]
    if told.stage in ("", "import"):
        return (
            f"{python} cannot import HAL ({what}): name the Python it is installed in, --set hal_python=PATH"
        )
    return f"HAL cannot list the tasks of {name}: {what}"


def _remedy_of_import(settings: HalSettings, told: HalAnswer) -> str:
    python, repo, extra = settings.hal_python, settings.hal_repo, settings.benchmark.partition("_")[0]
    submodules = f"git -C {repo} submodule update --init --recursive"
    if told.module.startswith("hal."):
        return f"the checkout of HAL lacks {told.module!r}, unless {submodules} brings it"
    has_extra = extra in _extras(Path(repo))
    if told.stage in ("", "import") or has_extra:
        wanted = f"{repo}[{extra}]" if has_extra else repo
        return (
            f"HAL's Python {python} lacks {told.module!r}: install HAL there with "
            f"{python} -m pip install -e '{wanted}', or name another with --set hal_python=PATH"
        )
    return (
        f"HAL's Python {python} lacks {told.module!r}, which {settings.benchmark} needs and no extra of HAL "
        f"brings: install it there, or fetch it with {submodules}"
    )


def _extras(repo: Path) -> set[str]:
    """What HAL can be installed with, by its pyproject.toml."""
    try:
        project = tomllib.loads((repo / "pyproject.toml").read_text("utf-8")).get("project", {})
    except (OSError, ValueError):
        return set()
    return set(project.get("optional-dependencies", {}))
