"""What `--set` may say to HAL, and what of it is checked before HAL is asked."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from evalfleet.benchmarks.containers import check_image
from evalfleet.errors import RequestError
from evalfleet.names import hint
from evalfleet.toml_tables import expand

TIMEOUT_S = 2700.0
"""HAL's own default."""
RUNS_CODE = ("usaco", "swebench_", "scicode", "scienceagentbench", "colbench_")
"""Benchmarks whose graders execute what agents have written."""
HERE = "here"
"""What `grade_on` calls this computer."""
_SECRET = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


class HalSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of `[benchmarks.hal]` and of `--set`."""

    hal_repo: Annotated[str, Meta(description="a checkout of hal-harness")] = "hal-harness"
    hal_python: Annotated[
        str, Meta(description="the Python that HAL is installed in; default: .venv/bin/python in hal_repo")
    ] = ""
    benchmark: Annotated[str, Meta(description="as HAL calls it, such as corebench_easy")] = ""
    tasks_file: Annotated[
        str,
        Meta(
            description='tasks from a JSON file instead of a checkout: {ID: {..., "answer": ...}}; the '
            "answer stays here"
        ),
    ] = ""
    agent_dir: Annotated[str, Meta(description="the agent's folder, in hal_repo or anywhere else")] = ""
    agent_function: Annotated[str, Meta(description="FILE.FUNCTION in that folder")] = "main.run"
    agent_python: Annotated[
        str,
        Meta(
            description="the Python on the machine that runs the agent as it is; or a version, such as "
            "3.12, for an environment with the agent's requirements.txt that is made once a machine; "
            "default: one of the machine's own version"
        ),
    ] = ""
    image: Annotated[
        str, Meta(description="run agents in containers of this image, which has all that they need")
    ] = ""
    image_token: Annotated[
        str,
        Meta(description="the variable with a token for the image's registry; agents never see it"),
    ] = ""
    image_user: Annotated[str, Meta(description="whose token that is; default: Google's word for it")] = (
        "oauth2accesstoken"
    )
    secrets: Annotated[tuple[str, ...], Meta(description="variables that the agent needs, by name")] = ()
    setup_script: Annotated[
        bool, Meta(description="run the benchmark's own set-up script on each machine, once")
    ] = False
    grade_on: Annotated[
        str,
        Meta(
            description="a place: grade on a fresh machine of it; here: let also a grader that executes the "
            "agents' code do so on this computer"
        ),
    ] = ""
    grade_python: Annotated[
        str,
        Meta(description="the Python with HAL on the machine of grade_on; default: one is made there"),
    ] = ""
    grade_budget_usd: Annotated[
        float, Meta(ge=0, description="what one call of the grader on grade_on may cost; 0: no limit")
    ] = 0.0
    grader_secrets: Annotated[
        tuple[str, ...], Meta(description="variables that the grader needs, by name (a judge's key)")
    ] = ()
    grade_timeout_s: Annotated[float, Meta(gt=0, description="of one call of HAL's grader")] = 7200.0
    wandb: Annotated[
        str,
        Meta(
            description="let W&B trace agents in this project, with WANDB_API_KEY; default: nothing is sent"
        ),
    ] = ""
    gpu_tasks: Annotated[
        Literal["match", "refuse", "run"],
        Meta(
            description="tasks that ask for a GPU: run them on machines that say they have one (match), not "
            "at all (refuse), or anywhere (run)"
        ),
    ] = "match"
    agent_name: Annotated[str, Meta(description="what HAL's own files call the agent")] = ""
    agent_version: Annotated[str, Meta(description="the agent's version, for HAL's own files")] = ""


WANDB_KEY = "WANDB_API_KEY"
WANDB_LIBRARY = "weave<0.54"
"""The newest that HAL can use."""


def python_version(settings: HalSettings) -> str:
    """The version of the Python that the agent's environment is made of; empty for the machine's own."""
    return settings.agent_python if re.fullmatch(r"3\.\d+", settings.agent_python) else ""


def own_python(settings: HalSettings) -> str:
    """The Python on machines that is used as it is; empty if an environment is made."""
    return "" if python_version(settings) else settings.agent_python


def runs_code(benchmark: str) -> bool:
    return benchmark.startswith(RUNS_CODE)


def resolved(settings: HalSettings, base: Path, where: str) -> HalSettings:
    """With absolute paths. Raises RequestError for what can be seen without asking HAL."""
    names = (*settings.secrets, *settings.grader_secrets, *filter(None, [settings.image_token]))
    if any(not _SECRET.fullmatch(name) for name in names):
        # The value itself may have been written here by mistake: it is not shown.
        told = "secrets, grader_secrets and image_token are names of variables, never values"
        raise RequestError(f"{where}: {told}")
    _check_image(settings, where)
    if settings.wandb:
        settings = _with_wandb(settings, where)
    if settings.tasks_file:
        return _without_checkout(settings, base, where)
    if not settings.benchmark:
        raise RequestError(f"{where}: say which of HAL's benchmarks: --set benchmark=NAME")
    repo = (base / expand(settings.hal_repo)).resolve()
    if not (repo / "hal" / "benchmark_manager.py").is_file():
        raise RequestError(
            f"{where}: {repo} is no checkout of HAL: git clone --recursive "
            "https://github.com/princeton-pli/hal-harness, and name it with --set hal_repo=PATH"
        )
    python = _python(settings, base, repo, where)
    agent = _agent_dir(settings, base, repo, where)
    _check_function(settings.agent_function, agent, where)
    if runs_code(settings.benchmark) and not settings.grade_on:
        raise RequestError(
            f"{where}: HAL's grader for {settings.benchmark} executes what agents have written; add "
            "--set grade_on=PLACE for a fresh machine of a place, or --set grade_on=here for this computer"
        )
    return replace(settings, hal_repo=str(repo), hal_python=str(python), agent_dir=str(agent))


def _with_wandb(settings: HalSettings, where: str) -> HalSettings:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}", settings.wandb):
        raise RequestError(f"{where}: wandb is {settings.wandb[:80]!r}; write the name of a project")

    def with_key(names: tuple[str, ...]) -> tuple[str, ...]:
        return names if WANDB_KEY in names else (*names, WANDB_KEY)

    return replace(
        settings, secrets=with_key(settings.secrets), grader_secrets=with_key(settings.grader_secrets)
    )


def _check_image(settings: HalSettings, where: str) -> None:
    check_image(settings.image, where)
    if settings.image and settings.agent_python:
        raise RequestError(f"{where}: image and agent_python exclude each other: an image has its own Python")
    if settings.image_token and "/" not in settings.image:
        raise RequestError(f"{where}: image_token needs an image of a registry: HOST/PATH/NAME")
    if settings.image_token in settings.secrets:
        raise RequestError(f"{where}: image_token {settings.image_token} is not for agents: not in secrets")


def _without_checkout(settings: HalSettings, base: Path, where: str) -> HalSettings:
    """With the file's folder where a checkout would be: what its tasks need is beside it."""
    path = (base / expand(settings.tasks_file)).resolve()
    agent = _agent_dir(settings, base, path.parent, where)
    _check_function(settings.agent_function, agent, where)
    name = settings.benchmark or re.sub(r"[^A-Za-z0-9_]+", "_", path.stem)
    return replace(
        settings, tasks_file=str(path), hal_repo=str(path.parent), benchmark=name, agent_dir=str(agent)
    )


def _python(settings: HalSettings, base: Path, repo: Path, where: str) -> Path:
    """Not resolved: a virtual environment's Python is a link."""
    python = base / expand(settings.hal_python) if settings.hal_python else repo / ".venv/bin/python"
    if not python.is_file():
        raise RequestError(
            f"{where}: there is no Python at {python}: name the one that HAL is installed in with "
            "--set hal_python=PATH"
        )
    return python.absolute()


def _agent_dir(settings: HalSettings, base: Path, repo: Path, where: str) -> Path:
    if not settings.agent_dir:
        raise RequestError(f"{where}: say which agent: --set agent_dir=FOLDER")
    named = expand(settings.agent_dir)
    for folder in (base / named, repo / named):
        if folder.is_dir():
            return folder.resolve()
    raise RequestError(f"{where}: agent_dir: there is no folder {base / named}, nor {repo / named}")


def _check_function(function: str, agent: Path, where: str) -> None:
    module, _, name = function.rpartition(".")
    if not module or not name:
        raise RequestError(f"{where}: agent_function is {function[:80]!r}; write FILE.FUNCTION, as main.run")
    path = agent.joinpath(*module.split(".")).with_suffix(".py")
    try:
        tree = ast.parse(path.read_bytes())
    except OSError:
        raise RequestError(f"{where}: agent_function: the agent has no file {path}") from None
    except (SyntaxError, ValueError) as err:
        raise RequestError(f"{where}: {path} is no Python ({err})") from None
    if any(isinstance(node, ast.ImportFrom) and any(n.name == "*" for n in node.names) for node in tree.body):
        return  # it may come from there
    there = sorted(_names(tree))
    if name not in there:
        raise RequestError(f"{where}: agent_function: {path} has no {name!r}; {hint(name, there)}")


def _names(tree: ast.Module) -> set[str]:
    """All that is bound anywhere in the file: what it binds under an `if` counts, too."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(each.asname or each.name).partition(".")[0] for each in node.names}
    return found
