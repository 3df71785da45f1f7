"""Running programs, with a limit always; and what there is to say about a failure."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TAIL = 1500


class Failed(Exception):
    """The message says what is wrong and what to do."""

    code = 1
    """The exit code that it leads to."""


class Done:
    """A program that has ended; code 124 if it had to be ended at its limit, 127 if there is none."""

    def __init__(self, code: int, out: bytes, err: bytes) -> None:
        self.code = code
        self.raw = out
        self.out = out.decode("utf-8", "replace")
        self.err = err.decode("utf-8", "replace")

    @property
    def ok(self) -> bool:
        return self.code == 0

    def words(self) -> str:
        """The end of what it said."""
        return (self.err.strip() or self.out.strip())[-TAIL:]


def say(text: str) -> None:
    """Write to the log of the job, at once."""
    print(f"waa: {text}", flush=True)


def replace_file(path: str, text: str) -> None:
    """Make the text the file's, durably. Whoever reads it sees the old one or the new one, whole."""
    with open(f"{path}.new", "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.new", path)


def run(
    argv: Sequence[str],
    timeout_s: float,
    stdin: bytes | None = None,
    environ: Mapping[str, str] | None = None,
) -> Done:
    """Never raises for what the program does."""
    try:
        done = subprocess.run(
            argv,
            input=stdin if stdin is not None else b"",
            capture_output=True,
            timeout=timeout_s,
            env={**os.environ, **environ} if environ else None,
        )
    except subprocess.TimeoutExpired as err:
        told = f"{argv[0]} was not done after {timeout_s:g} s".encode()
        return Done(124, err.stdout or b"", (err.stderr or b"") + told)
    except OSError as err:
        return Done(127, b"", f"{argv[0]}: {err.strerror}".encode())
    return Done(done.returncode, done.stdout, done.stderr)


def as_root(argv: Sequence[str]) -> list[str]:
    """With sudo, if we are not root and may. Without, the program itself says what it may not."""
    if os.geteuid() == 0 or shutil.which("sudo") is None or not _may_sudo():
        return list(argv)
    return ["sudo", "-n", *argv]


_sudo: list[bool] = []


def _may_sudo() -> bool:
    if not _sudo:
        _sudo.append(run(["sudo", "-n", "true"], 30.0).ok)
    return _sudo[0]


def fail(text: str, code: int = 1) -> int:
    print(f"waa: {text}", file=sys.stderr, flush=True)
    return code
