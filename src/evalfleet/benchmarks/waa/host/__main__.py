"""`python3 -m waa.host VERB`: the set-up steps, an attempt, and what people may want to do by hand."""

from __future__ import annotations

import os
import sys
import time
from contextlib import contextmanager

from . import container
from .config import HostConfig
from .docker import Docker
from .shell import Failed, fail, say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator


def steps(config: HostConfig, engine: Docker) -> dict[str, Callable[[], None]]:
    """In the order in which set-up takes them."""
    from . import golden, image, iso, machine

    def has_all() -> bool:
        return engine.find() and image.is_there(config, engine) and golden.is_there(config)

    return {
        "kvm": lambda: machine.step_kvm() if config.kvm else say("software emulation, as asked for"),
        "disk": lambda: machine.step_disk(config),
        "room": lambda: machine.step_room(config, has_all),
        "iso": lambda: iso.step_iso(config, golden.is_whole(config)),
        "docker": lambda: machine.step_docker(engine),
        "image": lambda: image.step_image(config, engine),
        "golden": lambda: golden.step_golden(config, engine),
        "container": lambda: container.step_container(config, engine),
        "windows": lambda: container.step_windows(config, engine),
    }


def screenshot(engine: Docker) -> int:
    """Write a picture of the screen to standard output."""
    from . import guest

    shot = guest.picture(engine)
    if shot is None:
        return fail("neither Windows nor its virtual machine gives a picture")
    sys.stdout.buffer.write(shot)
    return 0


def attempt(config: HostConfig, engine: Docker) -> int:
    from .attempt import attempt

    return attempt(config, engine)


def probe(config: HostConfig, engine: Docker) -> int:
    return 0 if container.is_ready(config, engine) else fail("Windows does not answer /probe")


def answers(config: HostConfig, engine: Docker) -> int:
    """Does what `probe` does, for those who only look: nothing is started."""
    from . import guest

    return 0 if guest.answers() else fail("Windows does not answer /probe")


def tasks(config: HostConfig, engine: Docker) -> int:
    from .image import tell_tasks

    return tell_tasks(config, engine)


def reset(config: HostConfig, engine: Docker) -> int:
    with alone(config):
        container.reset(config, engine)
    return 0


def rest(config: HostConfig, engine: Docker) -> int:
    container.rest(config, engine)
    return 0


def clean(config: HostConfig, engine: Docker) -> int:
    with alone(config):
        container.clean_up(config, engine)
    return 0


@contextmanager
def alone(config: HostConfig) -> Generator[None]:
    """One that was begun by somebody who has left goes on: a second one must not be in its way."""
    import fcntl

    folder = os.open(config.data, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise Failed("a reset is under way there already; try again when it is over") from None
    finally:
        os.close(folder)


def step(verb: str, config: HostConfig, engine: Docker) -> int:
    known = steps(config, engine)
    if verb not in known:
        return fail(f"{verb!r} is none of {', '.join([*known, *VERBS, 'screenshot'])}")
    begun = time.monotonic()
    known[verb]()
    say(f"step {verb} is done after {time.monotonic() - begun:.1f} s")
    return 0


VERBS = {
    "attempt": attempt,
    "probe": probe,
    "answers": answers,
    "tasks": tasks,
    "reset": reset,
    "rest": rest,
    "clean": clean,
}


def main(verb: str) -> int:
    try:
        config = HostConfig.load()
        engine = Docker(config.state("engine"))
        if verb == "screenshot":
            return screenshot(engine)
        return VERBS[verb](config, engine) if verb in VERBS else step(verb, config, engine)
    except Failed as err:
        return fail(str(err), err.code)


if __name__ == "__main__":
    os.umask(0o077)
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
