"""The container with Windows in it: up, ready, reset, and all of it removed."""

from __future__ import annotations

import json
import os
import time

from . import guest, vm
from .config import CONTAINER, FILE, INSTALLER, MODELS, POINTER, PROGRAM
from .golden import restore
from .shell import Failed, as_root, replace_file, run, say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .config import HostConfig
    from .docker import Docker

START_S = 600.0
GLANCE_S = 20.0
SYNC_S = 600.0
REMOVE_S = 1800.0


def step_container(config: HostConfig, engine: Docker) -> None:
    """Make sure that the container runs, and is the one that was asked for."""
    if config.client and not os.path.isfile(os.path.join(config.client, "run.py")):
        raise Failed(f"client={config.client}: that folder of the machine has no run.py; name WAA's `client`")
    words = config.run_words()
    mark = json.dumps(words)
    if _read(config.state("container")) == mark and engine.exists(CONTAINER):
        if not engine.is_running(CONTAINER):
            engine.do("start", CONTAINER, timeout_s=START_S)
        say(f"{CONTAINER} runs")
        return
    engine.remove(CONTAINER)
    engine.run_detached(words)
    replace_file(config.state("container"), mark)
    say(f"{CONTAINER} was started")


def step_windows(config: HostConfig, engine: Docker) -> None:
    """Its server answers. One that was left broken may never boot again: it goes back to golden."""
    if _read(config.state("dirty")) and not guest.answers():
        say("Windows was left broken, and does not answer")
        reset(config, engine)
    else:
        _await_windows(config, engine)


def _await_windows(config: HostConfig, engine: Docker) -> None:
    """If it does not answer by the deadline, or its virtual machine ends, screen and log say more."""
    begun = time.monotonic()
    watch = vm.VmWatch(engine, CONTAINER)
    if not guest.await_answer(begun + config.boot_s, watch.look):
        tail = guest.save_evidence(engine)
        if watch.problem:
            raise Failed(f"Windows does not run: {watch.problem}")
        waited = time.monotonic() - begun
        raise Failed(
            f"Windows did not answer /probe within {waited:.0f} s; the container's log ends:\n{tail}"
        )
    say(f"Windows answers after {time.monotonic() - begun:.1f} s")


def is_ready(config: HostConfig, engine: Docker) -> bool:
    """Does the container answer the probe? On a machine that was stopped and started, it may be down."""
    if guest.answers():
        return True
    if engine.exists(CONTAINER) and not engine.is_running(CONTAINER):
        engine.try_("start", CONTAINER, timeout_s=25.0)
    return False


def ensure_clean(config: HostConfig, engine: Docker, deep: bool) -> None:
    """Windows answers, and nothing of a broken attempt is left in it. Raises Failed."""
    dirty = _read(config.state("dirty"))
    if deep:
        reset(config, engine, deep=True)
    elif dirty:
        say(f"Windows is reset: {dirty}")
        reset(config, engine, deep=False)
    elif not guest.await_answer(time.monotonic() + GLANCE_S, lambda: False):
        say("Windows is reset: it does not answer")
        reset(config, engine, deep=False)


def mark_dirty(config: HostConfig, why: str) -> None:
    """Whoever comes next resets first, unless `mark_clean` is called."""
    replace_file(config.state("dirty"), why)


def mark_clean(config: HostConfig) -> None:
    if os.path.exists(config.state("dirty")):
        os.unlink(config.state("dirty"))


def reset(config: HostConfig, engine: Docker, deep: bool = True) -> None:
    """Windows goes back to golden. Where that is a long copy, and not `deep`, a restart is tried first.

    Raises Failed.
    """
    begun = time.monotonic()
    if not deep and not config.layered and _restarted(config, engine):
        say(f"Windows was restarted in {time.monotonic() - begun:.1f} s")
    else:
        engine.remove(CONTAINER)
        restore(config)
        step_container(config, engine)
        _await_windows(config, engine)
        say(f"Windows went back to golden in {time.monotonic() - begun:.1f} s")
    mark_clean(config)


def rest(config: HostConfig, engine: Docker) -> None:
    """Nothing runs, and storage is golden's: neither what attempts did nor a half-written disk is kept."""
    engine.remove(CONTAINER)
    restore(config)
    mark_clean(config)
    run(["sync"], SYNC_S)
    say("Windows rests, as it was installed")


def _restarted(config: HostConfig, engine: Docker) -> bool:
    """Process 1 of the container ignores all requests to end: Windows is told to shut down beforehand."""
    if not vm.shut_down(engine, CONTAINER, config.stop_s):
        say(f"Windows did not shut down within {config.stop_s} s, and is cut off")
    if not engine.try_("restart", "-t", "0", CONTAINER, timeout_s=300.0).ok:
        return False
    return guest.await_answer(time.monotonic() + config.restart_s, vm.VmWatch(engine, CONTAINER).look)


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


# -- undoing a set-up --------------------------------------------------------------------------------


def clean_up(config: HostConfig, engine: Docker) -> None:
    """Removes container, image, Windows and our folders; Docker and others' golden storage stay.

    Cut short, it can be repeated: what is needed for that goes last. Raises Failed.
    """
    for name in (CONTAINER, INSTALLER):
        engine.remove(name)
    engine.try_("volume", "rm", "-f", MODELS)
    _remove_image(config, engine)
    folders = ["storage", "storage.new", "layer.new", "iso"]
    if config.owns_golden:
        folders += ["golden", "golden.new", "golden-download"]
    _remove_own(config, *folders)
    _remove_own(config, "state", FILE, PROGRAM)
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


def _remove_own(config: HostConfig, *names: str) -> None:
    _delete(*(os.path.join(config.data, name) for name in names))


def _delete(*paths: str) -> None:
    """Delete as root: what the container wrote is root's."""
    done = run(as_root(["rm", "-rf", "--", *paths]), REMOVE_S)
    if not done.ok:
        raise Failed(f"cannot remove {', '.join(paths)}: {done.words()}")
