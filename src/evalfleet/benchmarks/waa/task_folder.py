"""What the files of one task say, as WAA's client leaves them in `<domain>/<id>/`.

Pure reading: nothing is written, any bytes may come, and none of them raise. Stdlib only, Python 3.8: it also
runs on machines, where an attempt's directory is read as soon as the client has ended.

* result.txt with a number from 0 to 1: scored, whatever else happened; but a 0 is broken if the task's log
  says that it is the infrastructure's (see `task_log`).
* an `Error` line in traj.jsonl: the traceback says whose fault it was. The agent's own code: scored 0, the
  reason kept. The model's client: broken (model). Everything else: broken.
* neither: broken (result); who saw the client end knows better why (time limit, hung guest, lost machine).
"""

from __future__ import annotations

import json
import math
import os
import re
from datetime import datetime, timezone

from .task_log import read_log
from .tracebacks import part_of, summary_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .task_log import TaskLog
    from .tracebacks import Part

RESULT = "result.txt"
TRAJECTORY = "traj.jsonl"
PAGE = "traj.html"

CAUSES: dict[Part, str] = {
    "controller": "readiness",
    "set-up": "readiness",
    "evaluator": "internal",
    "client": "internal",
    "machine": "setup",
    "model": "model",
    "unknown": "internal",
}
"""The cause of a broken attempt, by the part that failed. `agent` is absent: that is a score of 0."""

_WORDS: dict[Part, str] = {
    "controller": "the guest failed",
    "set-up": "the task could not be set up in the guest",
    "evaluator": "the evaluator failed",
    "client": "WAA's client failed",
    "machine": "the machine failed the client",
    "model": "the model's API failed",
    "agent": "the agent failed",
    "unknown": "the client noted an error",
}
LEAST = -1.0
"""How alike pictures are may come out below 0: that counts as 0."""
_TEXT_CAP = 2000
_READ_CAP = 64 << 20  # trajectories are some kB a step
_SCREENSHOT = re.compile(r"^screenshot-step_(reset|\d+)_(\d{8}@\d{6})\.png$")
_KEY = re.compile(r"\bsk-[\w*-]{8,}")  # as OpenAI's and others' keys look: messages may repeat them
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_YEARS = range(2000, 2100)  # what other clocks say is no time
_LONGEST_S = 30 * 86400.0
_MOST_STEPS = 1_000_000
_ANY_ZONE_S = 15 * 3600.0  # between a local time that is taken for UTC, and UTC
_ELAPSED = re.compile(rb"Elapsed Time: (?:(\d+) days?, )?(\d+):(\d\d):(\d\d(?:\.\d+)?)")


class Reading:
    """What a task's directory means. `score` is None when it is broken, and then `cause` says by what.

    `part` is what failed, if something did. `seconds` is None when nothing tells; `started` and `ended` are
    seconds since 1970, from the client's own clock where it wrote one down (it keeps no zone: UTC), else
    from the files. `screenshots` are names in the directory, in the order they were taken.
    """

    __slots__ = ("cause", "ended", "error", "part", "score", "screenshots", "seconds", "started", "steps")

    def __init__(self) -> None:
        self.score: float | None = None
        self.cause = ""
        self.part: Part | None = None
        self.error = ""
        self.steps: int | None = None
        self.seconds: float | None = None
        self.started: float | None = None
        self.ended: float | None = None
        self.screenshots: tuple[str, ...] = ()

    @property
    def is_scored(self) -> bool:
        return self.score is not None

    @property
    def names_fault(self) -> bool:
        """An Error line or the log says what failed."""
        return self.part is not None


def read_task(directory: str, marks_from_tree: bool = False) -> Reading:
    """`directory` is one task's: `.../<domain>/<id>`. Raises nothing; what is not there says so.

    `marks_from_tree`: the agent's marks came from the accessibility tree alone (som_origin=a11y).
    """
    found = Reading()
    lines = _trajectory(os.path.join(directory, TRAJECTORY))
    found.steps = _steps(lines)
    found.screenshots = screenshots_in(directory)
    _time(found, directory, lines)
    error = _last_error(lines)
    if error is not None:
        _blame(found, error, directory)
    _judge(found, directory, marks_from_tree)
    return found


def screenshots_in(directory: str) -> tuple[str, ...]:
    names = [match for match in map(_SCREENSHOT.match, _names(directory)) if match]
    names.sort(key=lambda m: (m.group(2), -1 if m.group(1) == "reset" else int(m.group(1))))
    return tuple(match.group(0) for match in names)


def read_score(text: str) -> float | str:
    """The number in a result.txt, or what is wrong with it."""
    word = text.strip()
    if not word:
        return f"{RESULT} is empty"
    if word in ("True", "False"):  # some of WAA's metrics return booleans, and are written as they are
        return float(word == "True")
    if not _NUMBER.fullmatch(word) and word.lower().lstrip("+-") not in ("nan", "inf", "infinity"):
        return f"{RESULT} holds no number ({_shown(word)})"
    score = float(word)
    if not math.isfinite(score) or not LEAST <= score <= 1:
        return f"{RESULT} holds {_shown(word)}, not a number from 0 to 1"
    return max(0.0, score) + 0.0  # no minus zero in reports


def _judge(found: Reading, directory: str, marks_from_tree: bool) -> None:
    """result.txt wins over an Error line: the client may fail after it has scored."""
    text = _read(os.path.join(directory, RESULT), 1 << 16)
    score = "" if text is None else read_score(text.decode("utf-8", "replace"))
    if not isinstance(score, str):
        found.score = score
    elif found.part == "agent":
        found.score = 0.0
    elif found.part is not None:
        found.cause = CAUSES[found.part]
    else:
        found.cause = "result"
        found.error = score or f"no {RESULT} and no Error line in {TRAJECTORY}"
    if not found.score and found.part in (None, "agent", "client", "evaluator"):
        log = read_log(directory)
        if marks_from_tree:
            log.observation = log.observation or log.treeless
        _doubt(found, log)


def _doubt(found: Reading, log: TaskLog) -> None:
    """A zero, or no result at all: the log may tell that the agent had no chance, or was not judged.

    The other way round, an evaluator may stumble over what the agent left undone: some of WAA's cannot bear
    that a file is not there.
    """
    if found.part == "evaluator" and "NoneType" in found.error and log.absent and not log.evaluator:
        found.score, found.cause = 0.0, ""
    unjudged = log.evaluator if found.score == 0 and found.part is None else ""
    unseen = log.observation or (log.unseen if found.part in ("agent", "client") else "")
    faults: tuple[tuple[Part, str], ...] = (
        ("set-up", log.setup),
        ("controller", unseen),
        ("evaluator", unjudged),
    )
    for part, line in faults:
        if line:
            found.score, found.part, found.cause = None, part, CAUSES[part]
            found.error = _told(part, line)
            return


def _blame(found: Reading, error: dict[str, Any], directory: str) -> None:
    traceback, exception = _text(error.get("Traceback")), _text(error.get("Exception"))
    found.part = part_of(traceback or exception)
    line = summary_of(traceback, exception) or _text(error.get("Error"))
    if found.part == "set-up" and line.startswith("UnboundLocalError"):
        line = read_log(directory).download or line
    found.error = _told(found.part, line)


def _told(part: Part, line: str) -> str:
    return ": ".join(filter(None, (_WORDS[part], _KEY.sub("sk-***", line))))[:_TEXT_CAP]


def _trajectory(path: str) -> list[dict[str, Any]]:
    """The lines of the last try: a client that runs a task again adds to the file."""
    lines: list[dict[str, Any]] = []
    for raw in (_read(path, _READ_CAP, end=True) or b"").splitlines():
        try:
            line: dict[str, Any] = json.loads(raw)
        except (ValueError, RecursionError):
            continue  # cut off where the client was killed
        if type(line) is not dict:
            continue
        if "Error" not in line and line.get("step_num") == 0:
            lines = []
        lines.append(line)
    return lines


def _steps(lines: list[dict[str, Any]]) -> int | None:
    """A step may have several actions, and a line each."""
    numbers = [line["step_num"] for line in lines if type(line.get("step_num")) is int]
    return max((number for number in numbers if 0 <= number <= _MOST_STEPS), default=None)


def _last_error(lines: list[dict[str, Any]]) -> dict[str, Any] | None:
    return lines[-1] if lines and "Error" in lines[-1] else None


def _time(found: Reading, directory: str, lines: list[dict[str, Any]]) -> None:
    stamps = [stamp for stamp in (_stamp(line.get("action_timestamp")) for line in lines) if stamp]
    written = _written(directory)
    if stamps:
        found.started, found.ended = min(stamps), max(stamps)
    elif written:
        found.started, found.ended = min(written), max(written)
    else:
        return
    found.seconds = _elapsed(os.path.join(directory, PAGE))
    if found.seconds is None:
        found.seconds = _span(found.started, found.ended, written)
    if found.seconds is not None and found.seconds > _LONGEST_S:
        found.seconds = None
    if found.seconds is not None:
        found.ended = found.started + found.seconds


def _span(started: float, ended: float, written: list[float]) -> float | None:
    """The client's stamps end with the last action, so the files' times are better, if they are its own."""
    by_stamps = ended - started
    kept = bool(written) and abs(min(written) - started) < _ANY_ZONE_S  # else: times of a copy
    by_files = max(written) - min(written) if kept else 0.0
    return max(by_stamps, by_files) or None


def _elapsed(path: str) -> float | None:
    """What the client itself measured, written when it has scored."""
    told = _ELAPSED.findall(_read(path, _READ_CAP, end=True) or b"")
    if not told:
        return None
    days, hours, minutes, seconds = told[-1]
    return int(days or 0) * 86400 + int(hours) * 3600 + int(minutes) * 60 + float(seconds)


def _stamp(value: object) -> float | None:
    try:
        when = datetime.strptime(_text(value), "%Y%m%d@%H%M%S").replace(tzinfo=timezone.utc)
    except ValueError:
        return None
    return when.timestamp() if when.year in _YEARS else None


def _written(directory: str) -> list[float]:
    """When its files were written last, or the directory itself if there are none."""
    times: list[float] = []
    for name in _names(directory) or ["."]:
        try:
            times.append(os.lstat(os.path.join(directory, name)).st_mtime)
        except OSError:
            continue
    return times


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def _read(path: str, cap: int, end: bool = False) -> bytes | None:
    """Of a regular file only: what somebody gave us may hold links and pipes. The last try is at the end."""
    if os.path.islink(path) or not os.path.isfile(path):
        return None
    try:
        with open(path, "rb") as file:
            if end:
                file.seek(max(0, os.fstat(file.fileno()).st_size - cap))
            return file.read(cap)
    except OSError:
        return None


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
