"""The container engine: Docker's command line, as ourselves or through sudo."""

from __future__ import annotations

import os

from .shell import Done, Failed, as_root, run

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

CALL_S = 120.0


class Docker:
    """`docker`, found at first use. A member of its group may use it; others need sudo.

    `note` is a file that remembers which: an attempt need not find out again.
    """

    def __init__(self, note: str = "") -> None:
        self._note = note
        self._prefix = _read(note).split()

    def find(self) -> bool:
        """Is there an engine that answers?"""
        for prefix in (["docker"], as_root(["docker"])):
            if run([*prefix, "version", "--format", "{{.Server.Version}}"], CALL_S).ok:
                self._prefix = prefix
                return True
        return False

    def remember(self) -> None:
        with open(self._note, "w") as file:
            file.write(" ".join(self._prefix))

    def argv(self, *words: str) -> list[str]:
        if not self._prefix and not self.find():
            raise Failed("Docker does not answer; `sudo systemctl status docker` may tell why")
        return [*self._prefix, *words]

    def try_(self, *words: str, timeout_s: float = CALL_S, stdin: bytes | None = None) -> Done:
        return run(self.argv(*words), timeout_s, stdin)

    def do(self, *words: str, timeout_s: float = CALL_S, stdin: bytes | None = None) -> Done:
        """Raises Failed, with what it said."""
        done = self.try_(*words, timeout_s=timeout_s, stdin=stdin)
        if not done.ok:
            raise Failed(f"docker {words[0]}: exit code {done.code}: {done.words()}")
        return done

    # -- containers --------------------------------------------------------------------------------

    def is_running(self, name: str) -> bool:
        done = self.try_("inspect", "-f", "{{.State.Running}}", name)
        return done.ok and done.out.strip() == "true"

    def exists(self, name: str) -> bool:
        return self.try_("inspect", "-f", "{{.State.Running}}", name).ok

    def remove(self, name: str) -> None:
        if self.exists(name):
            self.do("rm", "-f", name, timeout_s=300.0)

    def logs(self, name: str, lines: int = 40) -> str:
        done = self.try_("logs", "--tail", str(lines), name)
        return done.out + done.err if done.ok else ""

    def run_detached(self, words: Sequence[str], restart: bool = True) -> None:
        # back by itself when the machine was stopped and is started again
        policy = ["--restart", "unless-stopped"] if restart else []
        self.do("run", "-d", *policy, *words, timeout_s=600.0)


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def memory_folder() -> str:
    """Where a file touches no disk."""
    return "/dev/shm" if os.path.isdir("/dev/shm") else "/tmp"
