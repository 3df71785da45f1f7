"""Undoing a set-up: container, image, Windows and our folders go. Docker and others' golden storage stay."""

from __future__ import annotations

import os

from .config import CONTAINER, FILE, POINTER
from .container import PROGRAM
from .golden import INSTALLER
from .shell import Failed, as_root, run, say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .config import HostConfig
    from .docker import Docker

REMOVE_S = 1800.0


def clean_up(config: HostConfig, engine: Docker) -> None:
    """Cut short, it can be repeated: what is needed for that goes last. Raises Failed."""
    for name in (CONTAINER, INSTALLER):
        engine.remove(name)
    _remove_image(config, engine)
    folders = ["storage", "storage.new"]
    if config.golden_folder != config.golden:
        folders += ["golden", "golden.new", "golden-download"]
    _remove(config, *folders)
    _remove(config, "state", FILE, PROGRAM)
    if os.path.isdir(config.data) and not os.listdir(config.data):
        _delete(config.data)
    _delete(os.path.expanduser(POINTER))
    say("nothing of Windows Agent Arena is left")


def _remove_image(config: HostConfig, engine: Docker) -> None:
    """One that somebody else's container needs stays, and so does the rest of the machine's images."""
    if engine.try_("image", "inspect", config.image).ok:
        done = engine.try_("rmi", config.image, timeout_s=REMOVE_S)
        if not done.ok:
            say(f"the image {config.image} stays: {done.words()}")


def _remove(config: HostConfig, *names: str) -> None:
    _delete(*(os.path.join(config.data, name) for name in names))


def _delete(*paths: str) -> None:
    """As root: what the container wrote is root's."""
    done = run(as_root(["rm", "-rf", "--", *paths]), REMOVE_S)
    if not done.ok:
        raise Failed(f"cannot remove {', '.join(paths)}: {done.words()}")
