"""Somebody at the terminal: asking, Ctrl-C, whether output is still read, and whether colours are seen."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from . import INTERRUPTED

T = TypeVar("T")


def note(text: str) -> None:
    """Say something that is worth knowing, and no error."""
    print(f"evalfleet: note: {text}", file=sys.stderr)


def agreed(what: str) -> bool:
    """Only `yes` is yes. Where nobody can answer, nothing is deleted."""
    if not sys.stdin.isatty():
        print(f"evalfleet: this would {what}: say --yes", file=sys.stderr)
        return False
    try:
        said = ask(f"This will {what}. Type yes to go on: ") == "yes"
    except EOFError:
        said = False
    if not said:
        print("evalfleet: nothing was deleted", file=sys.stderr)
    return said


def confirmed(question: str) -> bool:
    """Does somebody at the terminal say `yes`? Where nobody can answer, the answer is no."""
    if not sys.stdin.isatty():
        print(f"evalfleet: {question} Say --yes", file=sys.stderr)
        return False
    try:
        return ask(f"{question} Type yes to agree: ") == "yes"
    except EOFError:
        return False


def ask(question: str) -> str:
    """What somebody answers. Ctrl-C ends the command at once, although an event loop may be running."""
    with _python_interrupts():
        return input(question).strip()


@contextmanager
def _python_interrupts() -> Generator[None]:
    """Ctrl-C does what Python does by itself, unless it is ignored."""
    handler = signal.getsignal(signal.SIGINT)
    if handler in (signal.default_int_handler, signal.SIG_IGN):
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def end_on_interrupts_while_loading() -> None:
    """Let Ctrl-C end this process at once while a module is imported.

    KeyboardInterrupt in the middle of an import is not always raised further: it was seen to be forgotten, to
    become another error, and to crash an extension module. What is imported has no work to clean up after.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    outer = frame
    while outer is not None:
        if outer.f_code.co_filename == "<frozen importlib._bootstrap>":
            os._exit(INTERRUPTED)
        outer = outer.f_back
    signal.default_int_handler(signum, frame)


def result_of(work: Coroutine[Any, Any, T]) -> T:
    """What some work returns, in an event loop of its own.

    Ctrl-C counts while the work is done, and waits while the loop is made or closed: of one that is only half
    made, or half closed, Python would complain.
    """
    import asyncio

    async def interruptible() -> T:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        try:
            return await work
        finally:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with _python_interrupts():  # of which asyncio makes a cancellation
            return asyncio.run(interruptible())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def reader_left(seconds: float) -> bool:
    """Waits so long. True, at once, if whoever read our output has gone (`| head`): nothing needs be said."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # errors are told in any case
    return bool(poll.poll(seconds * 1000))


def has_colours() -> bool:
    """Does somebody read our output on a terminal with colours, who did not say NO_COLOR?"""
    terminal = os.environ.get("TERM", "")
    return not os.environ.get("NO_COLOR") and sys.stdout.isatty() and terminal not in ("", "dumb", "unknown")
