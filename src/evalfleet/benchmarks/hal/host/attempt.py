"""One attempt at a HAL task on a machine, and the agent's environment. Python 3.8, standard library alone.

    python3 attempt.py prepare [--python VERSION] [PACKAGE]    build its environment, once a machine and agent
    python3 attempt.py                                         run the agent, as EVALFLEET_HAL says

The agent gets a work directory with its own files, the task's files, `input.json` and `agent_args.json`.
What it leaves there comes back below `task/`, but for what was only sent; `submission.json` is what HAL's
grader is to see.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time

TYPE_CHECKING = False  # importing typing would cost 3 ms
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    Stamp = tuple[int, int]

HERE = os.path.dirname(os.path.abspath(__file__))
ENVIRONMENT, PYTHONS = "hal_env", "hal_pythons"
UV = "0.13.7"
"""The version of uv that is fetched where there is none."""
INDEX = "https://pypi.org/simple"
FETCH_S = 60.0
LONGEST_OUTPUT = 64 << 20
LONGEST_ERROR = 20000
NO_OUTPUT = "ERROR: No output file generated"


def prepare(words: list[str]) -> int:
    """Install the agent's requirements by uv, or by venv and pip where those are and it is not."""
    version, more = (words[1], words[2:]) if words[:1] == ["--python"] else ("", words)
    requirements = os.path.join(HERE, "agent", "requirements.txt")
    wanted = [*(["-r", requirements] if wants_packages(requirements) else []), *more]
    if not wanted and not version:
        return 0
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    python = os.path.join(ENVIRONMENT, "bin", "python")
    import importlib.util  # these only here: each import costs every attempt
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        uv = shutil.which("uv")
        if not uv and (version or importlib.util.find_spec("ensurepip") is None):
            uv = fetched_uv(scratch)  # plain machines of clouds have no venv either
            if not uv:
                return 1
        if uv:
            make = [uv, "venv", "--python", version or sys.executable, ENVIRONMENT]
            install = [uv, "pip", "install", "--python", python, *wanted]
        else:
            make = [sys.executable, "-m", "venv", ENVIRONMENT]
            install = [python, "-m", "pip", "install", "--disable-pip-version-check", "-q", *wanted]
        # attempts may be users who cannot look into our home
        environ = dict(os.environ, UV_PYTHON_INSTALL_DIR=os.path.abspath(PYTHONS))
        return subprocess.call(make, env=environ) or (subprocess.call(install, env=environ) if wanted else 0)


def fetched_uv(folder: str) -> str:
    """Where uv is now, from the package index; empty if it cannot be had, which is told."""
    import hashlib
    import io
    import platform
    import re
    import urllib.parse
    import urllib.request
    import zipfile

    page = f"{os.environ.get('UV_DEFAULT_INDEX') or os.environ.get('PIP_INDEX_URL') or INDEX}/uv/"
    name = rf"uv-{UV}-[^<]*musllinux[^<]*{platform.machine()}\.whl"
    wheel = rf'href="([^"#]+)#sha256=([0-9a-f]{{64}})"[^>]*>\s*{name}'
    try:
        with urllib.request.urlopen(page, timeout=FETCH_S) as answer:
            found = re.search(wheel, answer.read().decode("utf-8", "replace"))
        if not found:
            raise ValueError(f"{page} has no uv {UV} for this machine")
        with urllib.request.urlopen(urllib.parse.urljoin(page, found[1]), timeout=FETCH_S) as answer:
            data = answer.read()
        if hashlib.sha256(data).hexdigest() != found[2]:
            raise ValueError(f"{found[1]} is not what {page} says")
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".data/scripts/uv"))
            path = archive.extract(name, folder)
        os.chmod(path, 0o755)
    except (OSError, ValueError, StopIteration, zipfile.BadZipFile) as err:
        print(f"uv is not on this machine, and cannot be fetched: {err}", file=sys.stderr)
        return ""
    return path


def wants_packages(requirements: str) -> bool:
    try:
        with open(requirements, encoding="utf-8", errors="replace") as file:
            lines = [line.partition("#")[0].strip() for line in file]
    except OSError:
        return False
    return any(lines)


def attempt() -> int:
    order = json.loads(os.environ.pop("EVALFLEET_HAL"))
    out = os.environ["EVALFLEET_OUT"]
    work = os.path.abspath("hal_work")
    sent = furnish(work, order)
    fault = os.path.abspath("hal_fault")
    began = time.monotonic()
    code = run_agent(work, order, fault)
    seconds = time.monotonic() - began
    answer, error = read_output(work, order, code)
    result: dict[str, Any] = {"seconds": seconds, "timed_out": code is None}
    if error:
        result["error"] = error
        if os.path.exists(fault):
            with open(fault, encoding="utf-8", errors="replace") as file:
                result["broken"] = "model"
                result["error"] = file.read(2000)
        answer = {order["task"]: error}
    told = table(answer[order["task"]])
    metrics = table(told.get("metrics"))
    if metrics:
        result["metrics"] = metrics
    used = usage_left(work, sent) or usage_told(metrics, table(order["args"]).get("model_name"))
    if used:
        result["usage"] = used
    bring_home(work, os.path.join(out, "task"), sent)
    write_json(os.path.join(out, "submission.json"), answer)
    write_json(os.path.join(out, "result.json"), result)
    return 0


def furnish(work: str, order: dict[str, Any]) -> dict[str, Stamp]:
    """Fill the work directory. What of it was only sent: path -> its size and time."""
    shutil.copytree(os.path.join(HERE, "agent"), work)
    make_writable(work)  # what machines share is read-only
    files = os.path.join("hal_task", "files")
    if os.path.isdir(files):
        copy_over(files, work)
        make_writable(work)
    shutil.copyfile(os.path.join("hal_task", "input.json"), os.path.join(work, "input.json"))
    write_json(os.path.join(work, "agent_args.json"), order["args"])
    shutil.copyfile(os.path.join(HERE, "run_agent.py"), os.path.join(work, "run_agent.py"))
    sent = {path: stamp(path) for path in files_in(work)}
    for name in ("input.json", "agent_args.json"):  # HAL keeps these with the results
        del sent[os.path.join(work, name)]
    return sent


def make_writable(top: str) -> None:
    for folder, _, names in os.walk(top):
        os.chmod(folder, 0o755)
        for name in names:
            path = os.path.join(folder, name)
            if not os.path.islink(path):
                os.chmod(path, os.stat(path).st_mode | 0o200)


def copy_over(source: str, target: str) -> None:
    for folder, _, names in os.walk(source):
        into = os.path.join(target, os.path.relpath(folder, source))
        os.makedirs(into, exist_ok=True)
        for name in names:
            shutil.copy2(os.path.join(folder, name), os.path.join(into, name))


def files_in(top: str) -> Iterator[str]:
    for folder, _, names in os.walk(top):
        for name in names:
            path = os.path.join(folder, name)
            if os.path.isfile(path) and not os.path.islink(path):
                yield path


def stamp(path: str) -> Stamp:
    about = os.stat(path)
    return about.st_size, about.st_mtime_ns


def run_agent(work: str, order: dict[str, Any], fault: str) -> int | None:
    """Its exit code; None if it reached its time limit. All that it has started is ended with it."""
    environ = dict(os.environ, EVALFLEET_HAL_FAULT=fault, EVALFLEET_HAL_WANDB=order.get("wandb", ""))
    python = order["python"] or sys.executable
    if not order["python"] and os.path.isdir(ENVIRONMENT):
        folder = os.path.join(os.path.realpath(ENVIRONMENT), "bin")
        python = os.path.join(folder, "python")
        environ["VIRTUAL_ENV"] = os.path.dirname(folder)
        environ["PATH"] = folder + os.pathsep + environ.get("PATH", os.defpath)
    words = [python, "run_agent.py", order["function"]]
    sys.stdout.flush()
    agent = subprocess.Popen(words, cwd=work, env=environ, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        return agent.wait(order["timeout_s"])
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(agent.pid, signal.SIGKILL)
        agent.wait()


def read_output(work: str, order: dict[str, Any], code: int | None) -> tuple[dict[str, Any], str]:
    """What the agent submits, and why that is nothing: one of both."""
    if code is None:
        return {}, "ERROR: Task timed out after {:g} seconds".format(order["timeout_s"])
    if code != 0:
        return {}, crash(work, code)
    path = os.path.join(work, "output.json")
    try:
        if os.path.islink(path) or not os.path.isfile(path):
            return {}, NO_OUTPUT
        if os.path.getsize(path) > LONGEST_OUTPUT:
            return {}, f"ERROR: output.json is longer than {LONGEST_OUTPUT} bytes"
        with open(path, encoding="utf-8") as file:
            output: Any = json.load(file)
    except (OSError, ValueError, RecursionError) as err:
        return {}, f"ERROR: output.json cannot be read: {err}"
    if not isinstance(output, dict) or order["task"] not in output:
        return {}, "ERROR: the agent's output has no answer for {}".format(order["task"])
    return table(output), ""


def table(value: Any) -> dict[str, Any]:
    """Empty if it is none."""
    return value if isinstance(value, dict) else {}  # pyright: ignore[reportUnknownVariableType]


def crash(work: str, code: int) -> str:
    try:
        with open(os.path.join(work, "error.log"), encoding="utf-8", errors="replace") as file:
            text = file.read(LONGEST_ERROR)
    except OSError:
        text = ""
    if text.startswith("ERROR"):
        return text
    what = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"ERROR: the agent ended with {what}"


def usage_left(work: str, sent: dict[str, Stamp]) -> dict[str, dict[str, int]]:
    """Tokens of the models' own answers among what the agent left, each counted once: by model."""
    answers: dict[str, tuple[str, dict[str, int]]] = {}
    room = LONGEST_OUTPUT
    for path in files_in(work):
        with contextlib.suppress(OSError):
            size = os.path.getsize(path)
            if not path.endswith((".json", ".jsonl", ".log")) or size > room or sent.get(path) == stamp(path):
                continue
            room -= size
            with open(path, "rb") as file:
                data = file.read()
            if b'"usage"' in data:
                for value in documents(data):
                    find_usage(value, answers, 0)
    used: dict[str, dict[str, int]] = {}
    for model, tokens in answers.values():
        total = used.setdefault(model, dict.fromkeys(tokens, 0))
        for kind, count in tokens.items():
            total[kind] += count
    return used


def documents(data: bytes) -> Iterator[Any]:
    """A JSON file's value, or that of each line."""
    try:
        yield json.loads(data)
        return
    except (ValueError, RecursionError):
        pass
    for line in data.splitlines():
        if b'"usage"' in line:
            with contextlib.suppress(ValueError, RecursionError):
                yield json.loads(line)


def find_usage(value: Any, answers: dict[str, tuple[str, dict[str, int]]], depth: int) -> None:
    """Answers of models, which have an id, a model and a usage, wherever they are."""
    if depth > 40:
        return
    if isinstance(value, dict):
        fields = table(value)
        name, model, usage = fields.get("id"), fields.get("model"), tokens_in(table(fields.get("usage")))
        if isinstance(name, str) and isinstance(model, str) and usage:
            answers[name] = (model, usage)
            return
    inside: Any = table(value).values() if isinstance(value, dict) else value
    for each in inside if isinstance(value, (dict, list)) else ():
        find_usage(each, answers, depth + 1)


def usage_told(metrics: dict[str, Any], model: Any) -> dict[str, dict[str, int]]:
    tokens = tokens_in(metrics)
    return {model: tokens} if tokens and isinstance(model, str) else {}


def tokens_in(told: dict[str, Any]) -> dict[str, int]:
    """As OpenAI, Anthropic and HAL's own agents tell them; empty if one of both is missing."""
    into = first_count(told, "prompt_tokens", "input_tokens", "total_input_tokens")
    out = first_count(told, "completion_tokens", "output_tokens", "total_output_tokens")
    if into is None or out is None:
        return {}
    details = table(told.get("prompt_tokens_details") or told.get("input_tokens_details"))
    cached = first_count(details, "cached_tokens") or 0
    read = first_count(told, "cache_read_input_tokens") or 0
    made = first_count(told, "cache_creation_input_tokens") or 0
    return {"input": into + read + made, "output": out, "cached": min(into, cached) + read}


def first_count(told: dict[str, Any], *names: str) -> int | None:
    counts = (told.get(name) for name in names)
    return next(
        (n for n in counts if isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 50), None
    )


def bring_home(work: str, target: str, sent: dict[str, Stamp]) -> None:
    """What the agent has made or changed. Links stay: what they point to is not its own."""
    for path in files_in(work):
        try:
            if path in sent and sent[path] == stamp(path):
                continue
            if "__pycache__" in path.split(os.sep):
                continue
            into = os.path.join(target, os.path.relpath(path, work))
            os.makedirs(os.path.dirname(into), exist_ok=True)
            shutil.copy2(path, into)
        except OSError as err:
            print(f"not kept: {path}: {err}", file=sys.stderr)


def write_json(path: str, value: object) -> None:
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump(value, file)
    os.replace(path + ".new", path)


if __name__ == "__main__":
    sys.exit(prepare(sys.argv[2:]) if sys.argv[1:2] == ["prepare"] else attempt())
