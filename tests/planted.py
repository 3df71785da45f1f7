"""Secrets that tests plant, and where these are found: nowhere, it is hoped."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable
from contextlib import suppress
from io import FileIO
from pathlib import Path

from tests.folders import plain_files

PART = 4 << 20
UNIQUE = os.urandom(8).hex()
"""Part of every planted value: other tests run beside these, and theirs must not be taken for ours."""


def holding(folder: Path, *values: str) -> list[str]:
    """Files below `folder` that contain one of the values. Files may come and go meanwhile."""
    raw = [value.encode() for value in values]
    return [
        str(path.relative_to(folder))
        for path, content in plain_files(folder)
        if any(value in content for value in raw)
    ]


def processes_holding(value: str, among: Iterable[int] | None = None) -> dict[int, str]:
    """Processes of this computer, or among some, whose memory, environment or command line has the value, by
    their command lines. It needs root."""
    found: dict[int, str] = {}
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()] if among is None else among
    for process in (Path("/proc", str(pid)) for pid in pids):
        if _holds(process, value.encode()):
            with suppress(OSError):  # it has just ended
                found[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ")
    return found


def younger(pid: int) -> list[int]:
    """Processes of this computer that were started after this one: who else can have its secret?"""
    births = {int(name): _birth(name) for name in os.listdir("/proc") if name.isdigit()}
    return [each for each, birth in births.items() if birth is not None and birth > (births[pid] or 0)]


def _birth(pid: str) -> int | None:
    """In clock ticks since this computer was started; None once the process is gone."""
    with suppress(OSError):
        return int(Path("/proc", pid, "stat").read_text().rpartition(") ")[2].split()[19])
    return None


def _holds(process: Path, raw: bytes) -> bool:
    """Memory that a process can write, its stack with environment and arguments included."""
    try:
        with (process / "mem").open("rb", buffering=0) as memory:
            for line in (process / "maps").read_text().splitlines():
                addresses, rights, *_ = line.split()
                begin, end = (int(address, 16) for address in addresses.split("-"))
                if rights.startswith("rw") and _in_range(memory, begin, end, raw):
                    return True
    except OSError:
        return False  # it has ended
    return False


def _in_range(memory: FileIO, begin: int, end: int, raw: bytes) -> bool:
    tail = b""
    while begin < end:
        try:
            memory.seek(begin)
            data = memory.read(min(PART, end - begin))
        except (OSError, ValueError, OverflowError):
            return False  # a part that nobody may read, such as a device's
        if raw in tail + data:
            return True
        if not data:
            return False
        begin, tail = begin + len(data), data[-len(raw) :]
    return False


def private_lines(*files: Path) -> list[str]:
    """The lines of private keys, as they are in these files or in values of their JSON."""
    texts = [file.read_text().replace("\\n", "\n") for file in files]
    return [line for text in texts for line in text.splitlines() if len(line) > 40 and " " not in line]


def forms(value: str) -> list[str]:
    """A value as itself, and as base64 and hexadecimal digits write it."""
    raw = value.encode()
    return [value, base64.b64encode(raw).decode().rstrip("="), raw.hex()]
