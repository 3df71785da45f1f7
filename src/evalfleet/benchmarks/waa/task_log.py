"""Whether a zero is the agent's, by what WAA's client wrote into `logs/task-*.log`.

Most failures of the infrastructure raise nothing in the client: they are logged, and the task ends with 0.
These rules say which of the errors in a task's log make a zero the infrastructure's:

* Set-up, up to the line that ends it: a step that failed and was not repeated with success. Steps that only
  tidy up (windows brought to the front or closed, downloads cleared) count only if no call of the set-up
  succeeded: an agent can do without them, and Windows refuses them now and then.
* The agent's steps: no observation could be had, after which the client waits out the remaining steps; or
  the guest never took what the agent's actions stand on; or it never gave an accessibility tree to an agent
  whose marks come from the tree alone. What the agent's code came to there is its own.
* The evaluator: the guest's server did not answer, or answered that it failed (5xx). An answer that something
  is not there (4xx) is the state in which the agent left it, as is what the evaluator cannot make sense of;
  and programs in the guest, such as a browser, may have been closed by the agent.

Nothing that the agent can write gets into the first part of the log, and what it forges elsewhere costs it an
attempt. Stdlib only, Python 3.8: also runs on machines.
"""

from __future__ import annotations

import os
import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

LOGS = "logs"
_NAME = re.compile(r"task-.*\.log")
_LINE_CAP = 1 << 20  # a debug line holds the pictures that went to the model
_SHOWN = 500
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_LINE = re.compile(r"\[[\d-]+ [\d:,.]+ ([A-Z]+) (\w+)/\d+[^\]]*\] (.*)")

_STEP = re.compile(r"SETUP: _(\w+)_setup\(")
_TIDY = frozenset({"activate_window", "close_window", "tidy"})
_REPEATED = frozenset({"execute", "command"})
"""Steps that the client itself repeats until they succeed: the last word counts."""
_RETRIED = re.compile(r"Retrying\.\.\.|, retrying\.|Failed to get a successful response from the VM")

_NO_DOWNLOAD = "Failed to download "
_NO_TREE = ("Failed to get accessibility tree", "Request timed out while trying to get accessibility tree")
_NO_OBSERVATION = (*_NO_TREE, "Failed to get the observations", "Failed to get screenshot")
_STATUS = re.compile(r"Status code: (\d{3})\b")
_STATUS_TEXT = re.compile(r"Status text: (.*)")
_GUEST_SAYS_NO = re.compile(
    r"does not exist|is not (?:read-only|tagged)|are not sorted|not in Details view|is required|"
    r"Find Control Timeout"  # of a window that is not open
)
_UNANSWERED = re.compile(
    r"HTTPS?ConnectionPool\(|Max retries exceeded|Connection aborted|Connection reset|Connection refused|"
    r"Remote end closed connection|[Tt]imed out|Name or service not known|name resolution"
)
_PROGRAMS = re.compile(r"(?:port=|:)(?:9222|8080|1337)\b")
"""Ports of programs in the guest: a browser, VLC."""
_MACHINE = re.compile(r"No space left on device|Cannot allocate memory|Too many open files|No module named")


class TaskLog:
    """What one task's log tells of failures. Each is the line that tells it, or empty."""

    __slots__ = (
        "absent",
        "acted",
        "download",
        "evaluator",
        "observation",
        "setup",
        "stepped",
        "treeless",
        "unseen",
    )

    def __init__(self) -> None:
        self.setup = ""
        self.observation = ""
        self.evaluator = ""
        self.unseen = ""
        """What was missing in the last observation that the agent was given."""
        self.treeless = ""
        """The failure of the accessibility tree, if it failed in all that the agent was given."""
        self.absent = ""
        """What the guest told an evaluator was not there."""
        self.download = ""
        """Why the last download of the set-up failed. WAA's own exception does not say it: it stumbles over a
        variable of its own."""
        self.stepped = False
        """The agent came to an action."""
        self.acted = False
        """The agent had its turn before the observation failed."""


class _Steps:
    """Calls of the client's set-up, also of the one before an evaluation."""

    def __init__(self) -> None:
        self.failed = ""
        self.tidying_failed = ""
        self.succeeded = False
        self._errors: list[str] = []
        self._last_failed = False

    def take(self, level: str, message: str) -> None:
        if level == "ERROR" and not _RETRIED.search(message):
            self._errors.append(message)
            self._last_failed = True
        elif message.startswith("Command executed successfully"):
            self.succeeded = True
            self._last_failed = False

    def end(self, name: str) -> None:
        """What was taken since the last end belongs to this step."""
        failed = self._last_failed if name in _REPEATED else bool(self._errors)
        if failed and name in _TIDY:
            self.tidying_failed = self.tidying_failed or self._errors[-1]
        elif failed:
            self.failed = self.failed or self._errors[-1]
        self._errors, self._last_failed = [], False

    @property
    def fault(self) -> str:
        return self.failed or ("" if self.succeeded else self.tidying_failed)


def read_log(directory: str) -> TaskLog:
    """What the newest log in a task's directory tells; nothing if there is none. Raises nothing."""
    log = TaskLog()
    part = "set-up"
    steps = _Steps()
    updates = [0, 0]  # of the guest's, failed and taken
    update_error = ""
    for level, module, message in _lines(_newest(directory)):
        if part == "set-up":
            _take_setup(log, steps, level, module, message)
            part = "steps" if message == "Environment setup complete." else part
        elif message == "Running evaluator(s)...":
            part, steps, log.evaluator = "evaluator", _Steps(), ""  # the last such line is the client's own
        elif part == "steps":
            _take_step(log, level, message)
            if message.startswith("Failed to update computer"):
                updates[0] += 1
                update_error = message
            updates[1] += message == "Updated computer successfully"
        else:
            _take_evaluation(log, steps, level, module, message)
    if part == "set-up":
        steps.end("unfinished")
        log.setup = log.setup or steps.fault
    if updates[0] and not updates[1]:
        log.observation, log.acted = log.observation or update_error, True
    return log


def _take_setup(log: TaskLog, steps: _Steps, level: str, module: str, message: str) -> None:
    if message.startswith(_NO_DOWNLOAD):
        log.download = message.partition(". Retrying")[0]
    if message.startswith("VM did not become ready"):
        log.setup = log.setup or message
    elif module in ("setup", "python"):
        steps.take(level, message)
    if message == "Setting up environment...":
        steps.end("tidy")
    elif module == "setup" and (step := _STEP.match(message)):
        steps.end(step.group(1))
    elif message == "Environment setup complete.":
        log.setup = log.setup or steps.fault


def _take_step(log: TaskLog, level: str, message: str) -> None:
    if message.startswith("Step "):
        log.stepped = True
        log.unseen = ""  # it is followed by a new observation
    elif message.startswith("Agent: Thinking"):
        without_tree = log.unseen if log.unseen.startswith(_NO_TREE) else ""
        log.treeless = without_tree if log.treeless or not log.acted else ""
        log.acted = True
    elif level == "ERROR" and message.startswith(_NO_OBSERVATION):
        log.unseen = message
    elif level == "ERROR" and message.startswith("Observation is None"):
        log.observation = log.observation or log.unseen or message


def _take_evaluation(log: TaskLog, steps: _Steps, level: str, module: str, message: str) -> None:
    fault = ""
    if module == "setup":
        if "not found" not in message:
            steps.take(level, message)
        if step := _STEP.match(message):
            steps.end(step.group(1))
        fault = steps.failed
    elif level == "ERROR" and _is_guests_failure(message):
        fault = message
    elif level == "ERROR" and _STATUS.search(message):
        log.absent = log.absent or message
    log.evaluator = log.evaluator or fault


def _is_guests_failure(message: str) -> bool:
    status = _STATUS.search(message)
    if status:
        return int(status.group(1)) >= 500
    text = _STATUS_TEXT.search(message)
    if text:
        return not _GUEST_SAYS_NO.search(text.group(1))
    if _MACHINE.search(message):
        return True
    return bool(_UNANSWERED.search(message)) and not _PROGRAMS.search(message)


def _newest(directory: str) -> str:
    folder = os.path.join(directory, LOGS)
    try:
        names = sorted(name for name in os.listdir(folder) if _NAME.fullmatch(name))
        paths = [os.path.join(folder, name) for name in names]
        return max((path for path in paths if not os.path.islink(path)), key=os.path.getmtime, default="")
    except OSError:
        return ""


def _lines(path: str) -> Iterator[tuple[str, str, str]]:
    """Level, module and the message's first line."""
    if not os.path.isfile(path):
        return
    try:
        with open(path, "rb") as file:
            while raw := file.readline(_LINE_CAP):
                line = _COLOURS.sub("", raw[:4096].decode("utf-8", "replace")).rstrip()
                match = _LINE.match(line)
                if match:
                    yield match.group(1), match.group(2), match.group(3)[:_SHOWN]
    except OSError:
        return
