"""Names and ids: made from one another, made safe for file systems, checked, and suggested. Pure."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from zlib import crc32

from .errors import RequestError
from .model import SECOND, AttemptId, MachineId, Micros, TaskId

MAX_FILE_NAME = 180
"""Bytes; file systems allow 255, and others append suffixes such as `.partial` to our names."""

INCOMING = ".incoming"
PARTIAL = ".partial"
NOTE = ".left_out"
"""Added to the name of an attempt's artefacts: as they arrive, not masked yet; until they are whole; the file
that lists what stays behind, until they are home."""

SCORE = ".score"
"""Added to the name of an attempt's artefacts: the folder with what its score command left."""

STEPS = ".steps"
"""The folder of a run with the newest step of each attempt that runs."""

NO_HOME = "xxxxxx"
"""Stands for the id that a home gets once something is written there."""

_KEPT = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.~-")
_PLAIN = re.compile(rf"[A-Za-z0-9_~-][A-Za-z0-9_.~-]{{0,{MAX_FILE_NAME - 1}}}")
_MACHINE_ID = re.compile(r"[a-z0-9]-([a-z0-9]{6})-[0-9]+(?![a-z0-9])")
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,59}")
_TAKEN_BY_RUN = (
    *("results.json", "aggregated_results.json", "parallel_live.json", "vm_pool_registry.json"),
    *("report.md", "controller.log"),
)
_TAKEN_ENDING = "_results.json"  # of each machine's file
_TAKEN_BY_HOME = ("latest", "fleet.db", "vm_pool_registry.json", "parallel_live.json")


def folder_of(home: Path, run: str) -> Path:
    """The folder of a run's files in its home."""
    return home / safe_name(run)


def safe_name(id: str) -> str:
    """One file name for any id, the same everywhere; two ids never share one.

    Ids of letters, digits, `_ . ~ -` stay as they are. Every `%` in the result is followed by two hex
    digits, except in the two forms that no plain id can take: `%empty` and `...%~<hash>`.
    """
    if _PLAIN.fullmatch(id):
        return id
    if not id:
        return "%empty"
    raw = id.encode("utf-8", "surrogatepass")
    encoded = "".join(chr(byte) if byte in _KEPT else f"%{byte:02X}" for byte in raw)
    if encoded.startswith("."):  # `.` and `..` are folders, other such names are hidden
        encoded = "%2E" + encoded[1:]
    if len(encoded) <= MAX_FILE_NAME:
        return encoded
    suffix = "%~" + hashlib.sha256(raw).hexdigest()[:32]
    head = encoded[: MAX_FILE_NAME - len(suffix)]
    return re.sub(r"%.?$", "", head) + suffix  # never half of a %XX


def artefacts_folder(task: str, attempt: str) -> str:
    """Where an attempt's artefacts are in its run's folder.

    A task may be called as one of our own files there: then its first character is written as `%XX`, which
    no other id's name begins with.
    """
    name = safe_name(task)
    if name.lower() in _TAKEN_BY_RUN or name.lower().endswith(_TAKEN_ENDING):
        name = f"%{ord(name[0]):02X}{name[1:]}"
    return f"{name}/{safe_name(attempt)}"


def check_run_name(name: str) -> str:
    """The name itself; RequestError if a run cannot be called so."""
    if not _RUN_NAME.fullmatch(name):
        raise RequestError(
            f"run name {name[:80]!r} cannot be used; give --name 1 to 60 letters, digits, '.', '_' or '-', "
            "the first a letter or digit"
        )
    if name.lower().startswith("fleet.db") or name.lower() in _TAKEN_BY_HOME:
        raise RequestError(f"run name {name!r} is a file of evalfleet's own; give another --name")
    return name


def default_run_name(benchmark: str, at: Micros) -> str:
    """`mybench-20261115-021455`, in UTC: sorts by time, and is always a valid run name."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", benchmark).lstrip("._-")[:44].rstrip("._-") or "run"
    stem = "run" if stem.lower().startswith("fleet.db") else stem
    return f"{stem}-{datetime.fromtimestamp(at // SECOND, tz=UTC):%Y%m%d-%H%M%S}"


def attempt_id(task: str, n: int) -> AttemptId:
    return AttemptId(f"{task}.{n}")


def attempt_number(attempt: str) -> int:
    """The n of `<task>.<n>`."""
    return int(attempt.rpartition(".")[2])


def repeat_id(task: str, k: int, model: str = "") -> TaskId:
    """`<task>@<model>~<k>`, or as much of it as tells the tasks of a run apart."""
    return TaskId(f"{task}{f'@{model}' if model else ''}{f'~{k}' if k else ''}")


def machine_id(pool: str, home_id: str, n: int) -> MachineId:
    return MachineId(f"{pool}-{home_id[:6]}-{n}")


def home_in(text: str) -> str:
    """The home, by its first six characters, of the machine whose id is in the name of its disk; empty if
    there is none."""
    found = _MACHINE_ID.search(text)
    return "" if found is None else found[1]


def hint(name: str, known: Iterable[str]) -> str:
    """How an error about an unknown name ends: the nearest ones, or (some of) all there are."""
    options = sorted(set(known))
    folded = {option.casefold(): option for option in options}
    close = difflib.get_close_matches(name.casefold(), folded, n=3, cutoff=0.6)
    if close:
        return f"did you mean {' or '.join(repr(folded[match]) for match in close)}?"
    if not options:
        return "there are none"
    more = f" and {len(options) - 12} more" if len(options) > 12 else ""
    return f"there are {', '.join(options[:12])}{more}" if len(options) > 1 else f"there is only {options[0]}"


def spread(name: str) -> float:
    """A factor between 0.75 and 1.25 that only the name decides: those who wait for one thing under different
    names do not all come back at once."""
    return 0.75 + crc32(name.encode()) % 1000 / 2000
