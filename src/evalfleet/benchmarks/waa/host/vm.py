"""The virtual machine in a container: does it live, what does its log say, and QEMU's monitor (QMP).

A container of WAA's outlives its virtual machine and waits for it without end, so that "the container runs"
says nothing. All TCP that enters it goes on to Windows, so that QMP can be had from inside it alone.
"""

from __future__ import annotations

import json
import re
import time

from .config import PORTS
from .shell import say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .docker import Docker

LOOK_S = 3.0
GONE_LOOKS = 3
"""So often in a row no virtual machine is seen before it is given up: it takes a moment to start."""
ERROR_S = 40.0
"""An error after which the log says nothing new for so long is the last word. Some are tried again."""
TELL_S = 60.0
LOG_LINES = 5000
CALL_S = 20.0
WAITING = "Waiting for a response from the windows server"
"""What the container says every five seconds, whatever happens."""
CLOSING = "Preparing Arena image by gracefully shutting down"
"""After it, an installation is done, and the virtual machine is to end."""
FATAL = ("falling back to manual installation", "Forcefully terminating Windows")

_COLOUR = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|c)")
_PROCESSES = 'for f in /proc/[0-9]*/cmdline; do tr "\\0" " " <"$f"; echo; done 2>/dev/null'
_VM = re.compile(r"(?:^|/| )(?:qemu-system-\w+ |/run/entry\.sh)", re.M)
# QEMU talks to one at a time: whoever comes while the client takes its picture waits for a moment.
_QMP = """\
import json, socket, sys
line = socket.create_connection(("127.0.0.1", %d), 10).makefile("rwb")
line.readline()
for order in [{"execute": "qmp_capabilities"}, json.loads(sys.argv[1])]:
    line.write(json.dumps(order).encode() + b"\\n")
    line.flush()
    answer = json.loads(line.readline())
    while "event" in answer:
        answer = json.loads(line.readline())
    if "error" in answer:
        sys.exit(answer["error"]["desc"])
print(json.dumps(answer["return"]))
"""


def lives(engine: Docker, container: str) -> bool | None:
    """Does a virtual machine run in it, or is one being made? None: that cannot be told."""
    done = engine.try_("exec", container, "sh", "-c", _PROCESSES, timeout_s=CALL_S)
    return bool(_VM.search(done.out)) if done.ok else None


def order(engine: Docker, container: str, command: str, **arguments: object) -> bool:
    """An order of QEMU's monitor. False if it cannot be given."""
    words = json.dumps({"execute": command, **({"arguments": arguments} if arguments else {})})
    return engine.try_("exec", container, "python", "-c", _QMP % PORTS["qmp"], words, timeout_s=CALL_S).ok


def shut_down(engine: Docker, container: str, limit_s: float) -> bool:
    """Let Windows shut down, as by its power button. False if it has not within the limit."""
    deadline = time.monotonic() + limit_s
    if limit_s <= 0 or not order(engine, container, "system_powerdown"):
        return False
    while lives(engine, container):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.5)
    return True


# -- its log -------------------------------------------------------------------------------------


def log(engine: Docker, container: str) -> list[str]:
    """What the container said since it was started last, repeated lines folded."""
    started = engine.try_("inspect", "-f", "{{.State.StartedAt}}", container).out.strip()
    since = ["--since", started] if started and not started.startswith("0001") else []
    done = engine.try_("logs", "--tail", str(LOG_LINES), *since, container)
    return folded((done.out + done.err).splitlines()) if done.ok else []


def folded(lines: Iterable[str]) -> list[str]:
    """Without colours and empty lines; one that is said again and again stands once, with how often."""
    found: list[tuple[str, int]] = []
    for raw in lines:
        line = _COLOUR.sub("", raw).strip()
        if found and line == found[-1][0]:
            found[-1] = (line, found[-1][1] + 1)
        elif line:
            found.append((line, 1))
    return [line if count == 1 else f"{line} ({count} times)" for line, count in found]


def last_error(lines: Iterable[str]) -> str:
    """The line that says what went wrong, if one does."""
    errors = [line for line in lines if "ERROR:" in line or any(word in line for word in FATAL)]
    reasons = [line for line in errors if not line.startswith("❯ ERROR: Forcefully terminating")]
    return (reasons or errors or [""])[-1].lstrip("❯ ")


class VmWatch:
    """A watch on the virtual machine of a container that is to become ready. It tells how that gets on."""

    def __init__(self, engine: Docker, container: str, progress: Callable[[], str] = str) -> None:
        self._engine = engine
        self._container = container
        self._progress = progress
        """What else there is to tell, every minute."""
        self._begun = self._told = self._changed = time.monotonic()
        self._looked = 0.0
        self._gone = 0
        self._news: list[str] = []
        self.problem = ""
        """Why nothing will come of it, once that is sure."""

    def look(self) -> str:
        """What is wrong for good; empty if nothing is. Looks again only after a moment."""
        now = time.monotonic()
        if self.problem or now - self._looked < LOOK_S:
            return self.problem
        if not self._engine.is_running(self._container):
            self.problem = f"its container has ended: {self._last_words()}"
            return self.problem
        lines = log(self._engine, self._container)
        news = [line for line in lines if not line.startswith(WAITING)]
        if news != self._news:
            self._changed, self._news = now, news
        if any(CLOSING in line for line in news):
            return ""
        self._judge(lives(self._engine, self._container), last_error(news), now)
        self._tell(now)
        self._looked = time.monotonic()
        return self.problem

    def _judge(self, alive: bool | None, error: str, now: float) -> None:
        self._gone = self._gone + 1 if alive is False else 0
        final = any(word in error for word in FATAL) or now - self._changed > ERROR_S
        if self._gone >= GONE_LOOKS:
            self.problem = f"its virtual machine has ended: {error or self._last_words()}"
        elif error and final:
            self.problem = f"its virtual machine says: {error}"

    def _last_words(self) -> str:
        lines = self._news or log(self._engine, self._container)
        return last_error(lines) or " / ".join(lines[-3:]) or "its log is empty"

    def _tell(self, now: float) -> None:
        if now - self._told >= TELL_S:
            self._told = now
            last = self._news[-1].lstrip("❯ ") if self._news else "nothing said yet"
            words = filter(None, (f"{(now - self._begun) / 60:.0f} min", self._progress(), last))
            say("; ".join(words))
