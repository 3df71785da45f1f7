"""The subcommands."""

from __future__ import annotations

import os
import sys
from importlib import import_module

from .errors import Failure
from .store import containers, settings

VERSION = "24.0.7"
COMMANDS = {  # module and function; only the one that is asked for is loaded
    "version": "inspecting.version",
    "info": "inspecting.info",
    "login": "images.login",
    "logout": "images.logout",
    "pull": "images.pull_command",
    "images": "images.images_command",
    "image ls": "images.images_command",
    "image inspect": "inspecting.inspect_image",
    "image pull": "images.pull_command",
    "image rm": "images.remove",
    "rmi": "images.remove",
    "container inspect": "inspecting.inspect_container",
    "container rm": "running.remove",
    "container ls": "listing.ps",
    "run": "running.run",
    "create": "running.create_command",
    "start": "running.start",
    "stop": "running.stop",
    "restart": "running.restart",
    "kill": "running.kill",
    "rm": "running.remove",
    "volume rm": "running.remove_volume",
    "wait": "running.wait",
    "exec": "executing.execute",
    "cp": "copying.copy",
    "logs": "listing.logs",
    "inspect": "inspecting.inspect",
    "ps": "listing.ps",
    "system df": "listing.system_df",
}


def main(argv: list[str]) -> int:
    first = argv[0] if argv else ""
    if first == "__monitor":
        from .monitor import daemonized

        return daemonized(argv[1], int(argv[2]))
    if first == "__daemon":
        from .dockerd import serve

        return serve()
    if first == "__exec":
        from .executing import helper

        return helper(argv[1], int(argv[2]), argv[3], argv[4:])
    if first in ("--version", "-v"):
        print(f"Docker version {VERSION}, build afdd53b")
        return 0
    try:
        return _dispatch(argv)
    except Failure as failure:
        print(failure.message, file=sys.stderr)
        return failure.code
    except KeyboardInterrupt:
        return 130


def _dispatch(argv: list[str]) -> int:
    for words in (2, 1):
        place = COMMANDS.get(" ".join(argv[:words]))
        if place is not None:
            _check_daemon()
            _revive()
            module, _, name = place.partition(".")
            code: int = getattr(import_module(f"engine.{module}"), name)(argv[words:])
            return code
    word = argv[0] if argv else ""
    raise Failure(f"docker: '{word}' is not a docker command.\nSee 'docker --help'")


def _check_daemon() -> None:
    if os.geteuid():
        raise Failure(
            "permission denied while trying to connect to the Docker daemon socket at "
            "unix:///var/run/docker.sock: connect: permission denied"
        )
    if settings().get("daemon", True) is False:
        raise Failure(
            "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. "
            "Is the docker daemon running?"
        )


def _revive() -> None:
    """As the daemon does when the host has booted: containers that are to restart do."""
    for container in containers():
        state = container.state
        if state.get("lost"):
            container.change(**{**state, "lost": False})
            policy = container.config["restart"].partition(":")[0]
            if policy in ("always", "unless-stopped") and not state.get("stopped"):
                from .monitor import start

                start(container)
