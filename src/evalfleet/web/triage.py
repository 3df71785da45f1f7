"""Failed and broken attempts that are one: grouped by cause and by a fingerprint of their last lines."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from evalfleet.channels.artefacts import LOG
from evalfleet.errors import RequestError
from evalfleet.model import AttemptId, Broken, Scored, Task
from evalfleet.names import artefacts_folder
from evalfleet.state import AttemptState, RunState
from evalfleet.views.format import visible

from .files import open_within

LAST_BYTES = 4096
LINES = 3
LONGEST = 300
MOST_WORDS = 50
MOST = 20_000
"""So many attempts are looked at, the newest first."""

_STATUS = (
    r"(?:^|(?i:\b(?:error|status|code|https?(?:/[\d.]+)?))\b[\s:=('\"]*)[1-5]\d\d\b(?![.,:]\d)"
    r"|(?<=: )[45]\d\d(?= [A-Za-z]{3})"
)


def _masked_number(found: re.Match[str]) -> str:
    return found[1] or "<n>"


_MASKS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"\x1b\[[0-9;?]*[A-Za-z]"), ""),
    (re.compile(r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,\d]*(?:Z|[+-]\d\d:?\d\d)?"), "<time>"),
    (re.compile(r"\b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b"), "<id>"),
    (re.compile(r"\bhttps?://[^\s\"'<>)\]]+"), "<url>"),
    (re.compile(r"(?<![\w.])(?:[A-Za-z]:)?(?:[\\/][\w.@%+~-]+)+[\\/]?"), "<path>"),
    (re.compile(r"\b0x[0-9a-fA-F]+\b"), "<id>"),
    (re.compile(r"\b(?=[0-9a-fA-F]*\d)(?=[0-9a-fA-F]*[a-fA-F])[0-9a-fA-F]{8,}\b"), "<id>"),
    (re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b"), "<address>"),
    (re.compile(rf"({_STATUS})|(?<![\w<])[-+]?\d+(?:[.,:]\d+)*(?:[eE][-+]?\d+)?"), _masked_number),
    (re.compile(r"(?<=[A-Za-z_-])\d+\b"), "<n>"),
    (re.compile(r"\s+"), " "),
)
"""The parts of a line in which two failures of one cause differ. A status of HTTP stays, as it is a cause."""
_ERROR = re.compile(r"\b(?:error|exception|traceback|fatal|failed|panic)\b", re.IGNORECASE)


def fingerprint(text: str, own: Iterable[str] = ()) -> str:
    """Return the last lines of a text, without the parts that differ between attempts.

    `own` holds the task's own words. A line with one of them says which task it is, and is left out if it
    reports no error and other lines remain.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    words = "|".join(re.escape(word) for word in own)
    if words:
        named = re.compile(rf"(?<!\w)(?:{words})(?!\w)")
        lines = [line for line in lines if not named.search(line) or _ERROR.search(line)] or lines
        lines = [named.sub("<task>", line[:2000]) for line in lines[-LINES:]]
    masked: list[str] = []
    for line in lines[-LINES:]:
        line = line[:2000]
        for pattern, name in _MASKS:
            line = pattern.sub(name, line)
        if line.strip() and line.strip()[:LONGEST] not in masked[-1:]:
            masked.append(line.strip()[:LONGEST])
    return "\n".join(masked)


class Triage:
    """The groups of one run. An attempt is read once: what it left does not change."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._prints: dict[AttemptId, tuple[str, str, str]] = {}

    def groups(self, state: RunState) -> dict[str, Any]:
        """The groups of errors, the largest first. It reads many files: call it in a thread."""
        bad = [each for each in list(state.attempts.values()) if _is_bad(each)]
        groups: dict[str, dict[str, Any]] = {}
        for attempt in bad[-MOST:]:
            group, cause, text = self._print(attempt, state.tasks[attempt.task].task)
            entry = groups.setdefault(
                group, {"id": group, "cause": cause, "text": text, "count": 0, "attempts": []}
            )
            entry["count"] += 1
            entry["attempts"].append(attempt.id)
        ordered = sorted(groups.values(), key=lambda entry: -entry["count"])
        return {"groups": ordered, "looked_at": min(len(bad), MOST), "of": len(bad)}

    def _print(self, attempt: AttemptState, task: Task) -> tuple[str, str, str]:
        known = self._prints.get(attempt.id)
        if known is None:
            outcome = attempt.outcome
            cause = str(outcome.cause) if isinstance(outcome, Broken) else "failed"
            text = fingerprint(self._last_words(attempt), _own_words(task))
            group = hashlib.sha256(f"{cause}\n{text}".encode(errors="replace")).hexdigest()[:10]
            known = (group, cause, visible(text))
            if attempt.collected is not None:
                self._prints[attempt.id] = known
        return known

    def _last_words(self, attempt: AttemptState) -> str:
        """The error that was recorded, else the end of its log."""
        outcome = attempt.outcome
        told = outcome.detail if isinstance(outcome, Broken) else None
        told = (outcome.error or "") if isinstance(outcome, Scored) else told
        if told:
            return told
        root = self._folder / artefacts_folder(attempt.task, attempt.id)
        try:
            with open_within(root, LOG) as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
                return file.read(LAST_BYTES).decode("utf-8", "replace")
        except RequestError:
            return ""


def _own_words(task: Task) -> list[str]:
    """Return what names the task in a log: its id, and the lines of its parameters."""
    values = [task.id, *(value for value in task.params.values() if isinstance(value, str))]
    lines = [line.strip() for value in values for line in value[:10_000].splitlines()]
    return [line for line in lines if 4 <= len(line) <= LONGEST][:MOST_WORDS]


def _is_bad(attempt: AttemptState) -> bool:
    outcome = attempt.outcome
    return isinstance(outcome, Broken) or (isinstance(outcome, Scored) and not outcome.success)
