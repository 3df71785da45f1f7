"""cp, both ways, also of a container that does not run."""

from __future__ import annotations

import os
import shutil
import sys
import tarfile

from . import flags
from .errors import Failure, daemon
from .store import Container, find


def copy(argv: list[str]) -> int:
    short = {"a": "archive", "L": "follow-link", "q": "quiet"}
    given = flags.parse("cp", argv, ("archive", "follow-link", "quiet"), (), short)
    if len(given.rest) != 2:
        raise Failure("\"docker cp\" requires exactly 2 arguments.\nSee 'docker cp --help'.")
    source, target = given.rest
    there, into = _parse(source), _parse(target)
    if (there is None) == (into is None):
        raise Failure(
            "copying between containers is not supported"
            if there
            else "must specify at least one container source"
        )
    if there is not None:
        container, path = there
        _out(container, path, target)
    elif into is not None:
        container, path = into
        _in(source, container, path)
    return 0


def _parse(text: str) -> tuple[Container, str] | None:
    name, colon, path = text.partition(":")
    if not colon or "/" in name or name == ".":
        return None
    return find(name), path


def _out(container: Container, path: str, target: str) -> None:
    found = container.on_host(path)
    if not os.path.lexists(found):
        raise daemon(f"Could not find the file {path} in container {container.name}")
    if target == "-":
        with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as archive:
            archive.add(found, os.path.basename(os.path.normpath(path)) or ".")
        return
    if not os.path.isdir(os.path.dirname(os.path.abspath(target.rstrip("/")))):
        raise Failure(f'invalid output path: directory "{os.path.dirname(target)}" does not exist')
    _place(found, path, target)


def _in(source: str, container: Container, path: str) -> None:
    inside = container.on_host(path)
    if source == "-":
        with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
            archive.extractall(inside)
        return
    if not os.path.lexists(source):
        raise Failure(f"lstat {os.path.abspath(source)}: no such file or directory")
    if not os.path.isdir(os.path.dirname(inside.rstrip("/"))):
        raise daemon(f"Could not find the file {os.path.dirname(path)} in container {container.name}")
    _place(source, source, inside)


def _place(found: str, asked: str, target: str) -> None:
    """Into a folder that is there, or under the new name; `FOLDER/.` is what it holds."""
    if os.path.isdir(found) and not os.path.islink(found):
        contents = asked.endswith("/.") or not os.path.isdir(target)
        into = target if contents else os.path.join(target, os.path.basename(os.path.normpath(found)))
        shutil.copytree(found, into, symlinks=True, dirs_exist_ok=True)
    else:
        into = os.path.join(target, os.path.basename(asked)) if os.path.isdir(target) else target
        shutil.copy2(found, into, follow_symlinks=False)
