"""run, create, start, stop, restart, kill, rm, wait: a container's life."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import sys
import time

from . import flags, images, monitor
from .environment import environment
from .errors import Failure, daemon
from .store import ROOT, Container, containers, find, locked, now, write_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

VOLUMES = os.path.join(ROOT, "volumes")
SWITCHES = ("detach", "rm", "interactive", "tty", "init", "privileged", "quiet")
VALUES = (
    *(
        "name",
        "device",
        "cap-add",
        "cap-drop",
        "stop-timeout",
        "publish",
        "volume",
        "mount",
        "env",
        "env-file",
    ),
    *("restart", "workdir", "entrypoint", "network", "net", "pull", "platform", "hostname", "label", "user"),
    *(
        "memory",
        "cpus",
        "shm-size",
        "security-opt",
        "log-opt",
        "log-driver",
        "ulimit",
        "add-host",
        "stop-signal",
    ),
)
SHORT = {
    **{"d": "detach", "i": "interactive", "t": "tty", "p": "publish", "v": "volume", "e": "env"},
    **{"w": "workdir", "h": "hostname", "l": "label", "u": "user", "m": "memory", "q": "quiet"},
}
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
KILLED_WITHIN_S = 120.0  # the original's 10 s are too few where the tests' computer is busy


def run(argv: list[str]) -> int:
    """Failures before the container's own command are exit code 125, as for the original."""
    given = flags.parse("run", argv, SWITCHES, VALUES, SHORT, anywhere=False)
    try:
        container = create(given)
        problem = monitor.start(container)
        if problem:
            raise daemon(problem)
    except Failure as failure:
        raise Failure(
            f"docker: {failure.message}\nSee 'docker run --help'.", failure.code_for_run()
        ) from failure
    if given.has("detach"):
        print(container.id)
        return 0
    code = _follow(container)
    if given.has("rm"):
        container.remove()
    return code


def create_command(argv: list[str]) -> int:
    given = flags.parse("create", argv, SWITCHES, VALUES, SHORT, anywhere=False)
    print(create(given).id)
    return 0


def create(given: flags.Flags) -> Container:
    if not given.rest:
        raise Failure('"docker run" requires at least 1 argument.', 125)
    reference, *words = given.rest
    image = images.local(reference)
    if image is None:
        print(f"Unable to find image '{images.full(reference)}' locally", file=sys.stderr)
        images.pull(reference, out=sys.stderr)
        image = images.local(reference)
        assert image is not None
    config = _config(given, image, words)
    with locked():
        _refuse_taken_name(config["name"])
        container = _make(config, image)
    missing = [
        path
        for path in (device.partition(":")[0] for device in config["devices"])
        if not os.path.exists(path)
    ]
    if missing:  # found when it is started: the container stays, as `created`
        raise daemon(
            f'error gathering device information while adding custom device "{missing[0]}": '
            "no such file or directory"
        )
    return container


def _refuse_taken_name(name: str) -> None:
    for other in containers():
        if other.name == name:
            raise daemon(
                f'Conflict. The container name "/{name}" is already in use by container "{other.id}". '
                "You have to remove (or rename) that container to be able to reuse that name."
            )


def _make(config: dict[str, Any], image: dict[str, Any]) -> Container:
    identity = hashlib.sha256(f"{config['name']} {time.time_ns()} {os.getpid()}".encode()).hexdigest()
    path = os.path.join(ROOT, "containers", identity)
    os.makedirs(path)
    shutil.copytree(os.path.join(image["path"], "rootfs"), os.path.join(path, "rootfs"), symlinks=True)
    for mount in config["mounts"]:
        if not os.path.exists(mount["source"]):
            _make_source(mount, os.path.join(path, "rootfs"))
    write_json(os.path.join(path, "config.json"), config)
    return Container(path)


def _make_source(mount: dict[str, str], rootfs: str) -> None:
    """As the original does for -v: a new volume gets what the image has there, a host's folder nothing."""
    inside = rootfs + mount["target"]
    if mount["source"].startswith(VOLUMES) and os.path.isdir(inside):
        shutil.copytree(inside, mount["source"], symlinks=True)
    else:
        os.makedirs(mount["source"])


def remove_volume(argv: list[str]) -> int:
    given = flags.parse("volume rm", argv, ("force",), (), {"f": "force"})
    for name in given.rest:
        source = os.path.join(VOLUMES, name)
        users = [
            each.id for each in containers() for mount in each.config["mounts"] if mount["source"] == source
        ]
        if users:
            raise daemon(f"remove {name}: volume is in use - [{', '.join(users)}]")
        if not os.path.isdir(source) and not given.has("force"):
            raise daemon(f"get {name}: no such volume")
        shutil.rmtree(source, ignore_errors=True)
        print(name)
    return 0


def _config(given: flags.Flags, image: dict[str, Any], words: list[str]) -> dict[str, Any]:
    entrypoint = given.all("entrypoint")[-1:] if given.all("entrypoint") else image.get("entrypoint") or []
    stamp = time.time_ns()
    return {
        "name": given.of("name") or f"nervous_{hashlib.sha256(str(stamp).encode()).hexdigest()[:8]}",
        "image": images.full(given.rest[0]),
        "created": now(),
        "command": [*entrypoint, *(words or image.get("cmd") or [])],
        "env": environment(given, [f"PATH={PATH}", "HOME=/root", *image.get("env", [])]),
        "workdir": given.of("workdir") or image.get("workdir") or "/",
        "devices": given.all("device"),
        "cap_add": given.all("cap-add"),
        "network": given.of("network") or given.of("net") or "bridge",
        "ports": [_port(text) for text in given.all("publish")],
        "mounts": [_volume(text) for text in given.all("volume")],
        "restart": _restart(given),
        "stop_timeout": int(given.of("stop-timeout") or 10),
        "labels": {label.partition("=")[0]: label.partition("=")[2] for label in given.all("label")},
    }


def _restart(given: flags.Flags) -> str:
    policy = given.of("restart", "no")
    if policy.partition(":")[0] not in ("no", "always", "unless-stopped", "on-failure"):
        raise daemon(f"invalid restart policy: unknown policy '{policy}'; use one of 'no', 'always', ...")
    return policy


def _port(text: str) -> dict[str, Any]:
    parts = text.split("/")[0].split(":")
    if len(parts) not in (2, 3) or not all(part.isdigit() for part in parts[-2:]):
        raise Failure(f"invalid publish: {text}: this engine knows [IP:]HOST:CONTAINER", 125)
    ip = parts[0] if len(parts) == 3 else "0.0.0.0"
    return {"ip": ip, "host": int(parts[-2]), "container": int(parts[-1])}


def _volume(text: str) -> dict[str, str]:
    parts = text.split(":")
    if len(parts) not in (2, 3) or not parts[1].startswith("/"):
        raise daemon(f"invalid volume specification: '{text}': invalid mount config")
    source = parts[0] if parts[0].startswith("/") else os.path.join(VOLUMES, parts[0])
    return {
        "source": source,
        "target": os.path.normpath(parts[1]),
        "mode": parts[2] if len(parts) == 3 else "rw",
    }


def _follow(container: Container) -> int:
    with open(container.log, "rb") as log:
        while True:
            over = not container.running
            data = log.read()
            if data:
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()
            elif over:
                return int(container.state.get("code", 0))
            else:
                time.sleep(0.05)


def start(argv: list[str]) -> int:
    for name in flags.parse(
        "start", argv, ("attach", "interactive"), (), {"a": "attach", "i": "interactive"}
    ).rest:
        container = find(name)
        if not container.running:
            _start(container)
        print(name)
    return 0


def _start(container: Container) -> None:
    problem = monitor.start(container)
    if problem:
        raise daemon(problem)


def stop(argv: list[str]) -> int:
    given = flags.parse("stop", argv, (), ("time", "timeout", "signal"), {"t": "time", "s": "signal"})
    for name in given.rest:
        _stop(find(name), given.of("time") or given.of("timeout"))
        print(name)
    return 0


def restart(argv: list[str]) -> int:
    given = flags.parse("restart", argv, (), ("time", "timeout", "signal"), {"t": "time", "s": "signal"})
    for name in given.rest:
        container = find(name)
        _stop(container, given.of("time") or given.of("timeout"))
        _start(container)
        print(name)
    return 0


def _stop(container: Container, seconds: str = "") -> None:
    """Ask process 1, wait, kill. Without a handler it ignores the request: that takes all of the time."""
    state = container.state
    if state["status"] not in ("running", "restarting"):
        return
    container.change(stopped=True)
    _signal(container, signal.SIGTERM)
    if not _gone(container, float(seconds or container.config["stop_timeout"])):
        _kill(container)


def _kill(container: Container) -> None:
    _signal(container, signal.SIGKILL)
    if not _gone(container, KILLED_WITHIN_S):
        raise daemon(
            f"cannot stop container: {container.id}: tried to kill container, "
            "but did not receive an exit event"
        )


def _gone(container: Container, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while container.state["status"] in ("running", "restarting"):
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def _signal(container: Container, number: int) -> None:
    pid = container.state.get("pid")
    if pid:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return


def kill(argv: list[str]) -> int:
    given = flags.parse("kill", argv, (), ("signal",), {"s": "signal"})
    for name in given.rest:
        container = find(name)
        if not container.running:
            raise daemon(f"Cannot kill container: {name}: Container {container.id} is not running")
        word = given.of("signal", "KILL").upper()
        number = int(word) if word.isdigit() else int(getattr(signal, "SIG" + word.replace("SIG", "", 1)))
        container.change(stopped=True)
        if number == signal.SIGKILL:
            _kill(container)
        else:
            _signal(container, number)
        print(name)
    return 0


def remove(argv: list[str]) -> int:
    given = flags.parse("rm", argv, ("force", "volumes", "link"), (), {"f": "force", "v": "volumes"})
    failed = 0
    for name in given.rest:
        try:
            container = find(name)
        except Failure as failure:
            print(failure.message, file=sys.stderr)
            failed = 0 if given.has("force") else 1
            continue
        if container.state["status"] in ("running", "restarting"):
            if not given.has("force"):
                raise daemon(
                    f'cannot remove container "/{container.name}": container is running: '
                    "stop the container before removing or force remove"
                )
            container.change(stopped=True)
            _kill(container)
        container.remove()
        print(name)
    return failed


def wait(argv: list[str]) -> int:
    for name in argv:
        container = find(name)
        while container.running:
            time.sleep(0.05)
        print(container.state.get("code", 0))
    return 0
