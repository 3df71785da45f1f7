"""The container image: pulled once, and the lists of tasks that it has."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import threading
import time

from . import golden
from .docker import memory_folder
from .shell import Failed, run, say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .config import HostConfig
    from .docker import Docker

PULL_S = 5400.0
SLOW_S = 900.0
TELL_S = 30.0
TRIES = 3
RETRY_S = 10.0
REFUSED = ("denied", "unauthorized", "authentication required", "403 Forbidden")
UNKNOWN = ("not found", "manifest unknown", "repository does not exist")

TASKS_FOLDER = "/client/evaluation_examples_windows"
TASK_LIST = re.compile(r"test_[\w.-]*\.json")
TASK_DEFINITION = re.compile(r"examples\w*/[^/]+/[^/]+\.json")
COPY_S = 300.0


def is_there(config: HostConfig, engine: Docker) -> bool:
    return engine.try_("image", "inspect", config.image).ok


def step_image(config: HostConfig, engine: Docker, retry_s: float = RETRY_S) -> None:
    if is_there(config, engine):
        say(f"{config.image} is there")
        return
    # a login is kept in memory, and goes with the pull
    folder = tempfile.mkdtemp(prefix="evalfleet-", dir=memory_folder())
    try:
        words = _log_in(config, engine, folder) if config.registry_user else []
        for last in (False,) * (TRIES - 1) + (True,):
            problem = _pull([*engine.argv(*words), "pull", config.image])
            if not problem:
                return
            _explain(config, problem, last)
            say(f"the pull broke off, and goes on: {problem.strip()[-300:]}")
            time.sleep(retry_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def server_of(image: str) -> str:
    """The registry; empty for Docker's own."""
    head = image.partition("/")[0]
    return head if "/" in image and ("." in head or ":" in head or head == "localhost") else ""


def _log_in(config: HostConfig, engine: Docker, folder: str) -> list[str]:
    password = os.environ.get(config.registry_password, "")
    words = ["--config", folder]
    server = server_of(config.image)
    argv = engine.argv(*words, "login", "-u", config.registry_user, "--password-stdin")
    done = run([*argv, server] if server else argv, 120.0, password.encode())
    if not done.ok:
        raise Failed(f"the registry {server or 'docker.io'} refuses {config.registry_user}: {done.words()}")
    return words


def _pull(argv: list[str]) -> str:
    """What went wrong; nothing, if it is there. Progress is told as layers come in."""
    begun = time.monotonic()
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    lines: list[str] = []
    reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
    reader.start()
    told, warned = begun, False
    while reader.is_alive():
        reader.join(0.2)
        now = time.monotonic()
        if now - told > TELL_S:
            told = now
            say(f"pulling for {now - begun:.0f} s: {progress(lines)}")
        if now - begun > SLOW_S and not warned:
            warned = True
            say(
                "warning: this pull is slow; a registry in the machines' region is faster, or a machine image"
            )
        if now - begun > PULL_S:
            process.kill()
    code = process.wait()
    if code == 0:
        say(f"pulled in {time.monotonic() - begun:.0f} s")
        return ""
    return "\n".join(lines[-10:]) or f"exit code {code}"


def _read(process: subprocess.Popen[bytes], lines: list[str]) -> None:
    assert process.stdout is not None
    with process.stdout as said:
        for raw in said:
            lines.append(raw.decode("utf-8", "replace").rstrip())


def progress(lines: list[str]) -> str:
    layers = {line.partition(":")[0] for line in lines if ": Pulling fs layer" in line}
    done = {
        line.partition(":")[0] for line in lines if line.endswith((": Pull complete", ": Already exists"))
    }
    return f"{len(done)} of {len(layers | done)} layers"


def _explain(config: HostConfig, problem: str, last: bool) -> None:
    """Raises Failed if another try would not help."""
    name, end = config.image, problem.strip()[-500:]
    if any(sign in problem for sign in REFUSED):
        raise Failed(
            f"{name}: the registry refuses the pull; check the name, and give registry_user and "
            f"registry_password, or the machine's role: {end}"
        )
    if any(sign in problem for sign in UNKNOWN):
        raise Failed(f"{name}: there is no such image; check --set image: {end}")
    if last:
        raise Failed(f"{name} cannot be pulled: {end}")


# -- its tasks ---------------------------------------------------------------------------------------


def tell_tasks(config: HostConfig, engine: Docker) -> int:
    """Writes the lists, and which tasks are defined, into result.json."""
    texts: dict[str, str] = {}
    defined: list[str] = []
    with tarfile.open(fileobj=io.BytesIO(_tasks_folder(config.image, engine))) as archive:
        for member in archive:
            name = member.name.lstrip("./").partition("/")[2]
            source = archive.extractfile(member) if member.isfile() else None
            if source is not None and TASK_LIST.fullmatch(name):
                texts[name] = source.read().decode("utf-8", "replace")
            elif source is not None and TASK_DEFINITION.fullmatch(name):
                defined.append(name)
    digest = _digest(config.image, engine)
    told = {
        "name": config.image,
        "digest": digest,
        "texts": texts,
        "defined": sorted(defined),
        "installed": golden.installed_at(config),
    }
    with open(os.path.join(os.environ["EVALFLEET_OUT"], "result.json"), "w") as file:
        json.dump(told, file)
    say(f"{config.image} has {len(texts)} lists of tasks")
    return 0


def _digest(image: str, engine: Docker) -> str:
    """The one that registries know it by. An image that was never in a registry has only its id."""
    about = json.loads(engine.do("image", "inspect", image).out)[0]
    for name in about.get("RepoDigests") or ():
        return str(name).rpartition("@")[2]
    return "sha256:" + str(about["Id"]).rpartition(":")[2]


def _tasks_folder(image: str, engine: Docker) -> bytes:
    """The folder of tasks as a tar archive, not of the container in which agents have worked."""
    made = engine.do("create", "--pull", "never", "--network", "none", image).out.strip()
    try:
        return engine.do("cp", f"{made}:{TASKS_FOLDER}", "-", timeout_s=COPY_S).raw
    finally:
        engine.try_("rm", "-f", made)
