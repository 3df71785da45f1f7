"""Stand-ins as people start them: `python -m standins.NAME`, of which one knows what it prints."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.waiting import PATIENCE_S, until

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class ByHand:
    """A stand-in that somebody has started."""

    process: subprocess.Popen[bytes]
    said: str
    tmp: Path
    """Where all its temporary files are, and nobody else's."""

    @property
    def exports(self) -> dict[str, str]:
        """The variables to set, as a shell reads them."""
        lines = re.findall(r"^export (.*)$", self.said, re.MULTILINE)
        return dict(shlex.split(line)[0].split("=", 1) for line in lines)

    @property
    def config(self) -> str:
        """The table for evalfleet.toml."""
        found = re.search(r"^\[[^]]+\]\n(?:.+\n)*", self.said, re.MULTILINE)
        assert found, self.said
        return found[0]

    @property
    def command(self) -> list[str]:
        """What it says to type then."""
        found = re.search(r"^# Then: (.*)$", self.said, re.MULTILINE)
        assert found, self.said
        return shlex.split(found[1])

    @property
    def prefix(self) -> list[str]:
        """What goes before `evalfleet`."""
        return self.command[: self.command.index("evalfleet")]

    @property
    def processes(self) -> list[str]:
        """Those that have its folder of temporary files in their environment: itself, and its jobs."""
        found: list[str] = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if str(self.tmp).encode() in (process / "environ").read_bytes():
                    found.append((process / "cmdline").read_text())
            except OSError:
                continue  # it has ended meanwhile, or is somebody else's
        return found

    def end(self, signum: int = signal.SIGINT) -> None:
        """As Ctrl-C does: its whole session is told. It ends well, and nothing is left of it."""
        os.killpg(self.process.pid, signum)
        code = self.process.wait(PATIENCE_S)
        said = (self.tmp.parent / "err").read_text()
        assert (code, said) == (0, "")
        assert not list(self.tmp.iterdir()), "files are left"
        assert not self.processes, "processes are left"
        for word in self.prefix:
            if word.startswith("--net="):
                assert not Path(word.removeprefix("--net=")).parent.exists(), "a lab is left"


@contextmanager
def started_by_hand(
    folder: Path, name: str, *flags: str, before: Sequence[str] = ("env", "--ignore-signal=INT")
) -> Iterator[ByHand]:
    """Start one, and read what it says. Without other words `before`, SIGINT is ignored at its start, as in a
    script's background."""
    tmp, out, err = (folder / each for each in ("tmp", "out", "err"))
    tmp.mkdir(parents=True)
    argv = [*before, sys.executable, "-m", f"standins.{name}", *flags]
    with out.open("wb") as out_file, err.open("wb") as err_file:
        process = subprocess.Popen(
            argv,
            cwd=ROOT,
            env={**os.environ, "TMPDIR": str(tmp)},
            stdin=subprocess.DEVNULL,
            stdout=out_file,
            stderr=err_file,
            start_new_session=True,
        )
    try:
        until(lambda: "Ctrl-C" in out.read_text() or process.poll() is not None, err.read_text)
        assert process.poll() is None, err.read_text()
        yield ByHand(process, out.read_text(), tmp)
    finally:
        process.kill()  # nothing, if it has ended
        process.wait()
