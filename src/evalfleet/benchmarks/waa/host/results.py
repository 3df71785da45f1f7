"""Brings what WAA's client writes out of its container: its steps while it runs, everything at its end.

Files come as a stream, through the engine's command line, so that all of them are ours, also where the engine
is another user's.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import tarfile
import threading

from ..task_folder import TRAJECTORY  # noqa: TID252 there is no evalfleet on a machine
from .config import CONTAINER
from .shell import Failed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from .docker import Docker

MOST_BYTES = 64 << 20
"""So much of a trajectory is shown while it grows."""
LONGEST_LINE = 1 << 20
COPY_S = 20.0
END_S = 10.0
_PICTURE = re.compile(r"[\w@.-]{1,200}\.(?:png|jpe?g)")

# What is added to the trajectory, once a second, for as long as the client lives: to kill `docker exec` would
# leave this running. Plain sh, since nobody knows what else an image has.
GROWING = """\
d=$1 file=$2 left=$3 shown=0
until [ -s "$d/pid" ] || [ "$left" -le 0 ]; do sleep 1; left=$((left - 1)); done
client=$(cat "$d/pid") || exit 0
while [ "$left" -gt 0 ] && kill -0 "$client" 2>/dev/null; do
  size=$( { wc -c <"$file"; } 2>/dev/null) || size=0
  if [ "$size" -gt "$shown" ]; then
    tail -c "+$((shown + 1))" "$file" | head -c "$((size - shown))"
    shown=$((size))
  fi
  sleep 1
  left=$((left - 1))
done
"""


class LiveTrajectory:
    """A copy of the client's trajectory that grows beside the attempt's other files while the client runs,
    with the screenshot of its newest step.

    It is for those who watch: whatever goes wrong with it, the attempt goes on, and `bring_out` has the last
    word.
    """

    def __init__(
        self, engine: Docker, client_folder: str, task_folder: str, out: str, limit_s: float
    ) -> None:
        """`client_folder` and `task_folder` are in the container: the client's pid, and the task's files."""
        self._engine = engine
        self._task_folder = task_folder
        self._out = out
        file = f"{task_folder}/{TRAJECTORY}"
        words = ("sh", "-c", GROWING, "evalfleet", client_folder, file, str(int(limit_s)))
        self._argv = engine.argv("exec", CONTAINER, *words)
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._copy, daemon=True)

    def __enter__(self) -> None:
        with contextlib.suppress(OSError):
            null, pipe = subprocess.DEVNULL, subprocess.PIPE
            self._process = subprocess.Popen(self._argv, stdin=null, stdout=pipe, stderr=null)
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._thread.join(COPY_S + END_S)

    def _copy(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        rest, copied = b"", 0
        with self._process.stdout as grown:
            while (block := os.read(grown.fileno(), 1 << 16)) and copied < MOST_BYTES:
                copied += len(block)
                lines, newline, rest = (rest + block).rpartition(b"\n")
                rest = rest[-LONGEST_LINE:]
                with contextlib.suppress(OSError, Failed):
                    if newline:
                        self._copy_picture(lines.rpartition(b"\n")[2])
                with contextlib.suppress(OSError), open(os.path.join(self._out, TRAJECTORY), "ab") as file:
                    file.write(block)

    def _copy_picture(self, line: bytes) -> None:
        """Before its step is shown, so that nobody looks for it in vain."""
        name = picture_of(line)
        if name and not os.path.exists(os.path.join(self._out, name)):
            for _, data in files_of(self._engine, f"{self._task_folder}/{name}", COPY_S):
                write(self._out, name, data)


def picture_of(line: bytes) -> str:
    """The name of the screenshot of a step; empty if it has none, or an odd one."""
    try:
        step: Any = json.loads(line)
        name: Any = step["screenshot"]
    except (ValueError, KeyError, TypeError):
        return ""
    return name if isinstance(name, str) and _PICTURE.fullmatch(name) else ""


def bring_out(engine: Docker, results: str, inside: str, out: str) -> None:
    """The task's files, `inside` the client's results, to the top; the client's logs beside them.

    Raises Failed.
    """
    for member, data in files_of(engine, results):
        name = member.name.lstrip("./").partition("/")[2]  # below `results`
        for folder, target in ((inside, ""), ("logs", "client_logs")):
            own = name[len(folder) + 1 :] if name.startswith(folder + "/") else ""
            if own and ".." not in own.split("/"):
                path = write(out, os.path.join(target, own), data)
                os.utime(path, (member.mtime, member.mtime))


def files_of(
    engine: Docker, path: str, limit_s: float | None = None
) -> Iterator[tuple[tarfile.TarInfo, Iterator[bytes]]]:
    """The regular files of the container at this path or below, one after another. Raises Failed."""
    argv = engine.argv("cp", f"{CONTAINER}:{path}", "-")
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    late = threading.Timer(limit_s, process.kill) if limit_s is not None else None
    if late is not None:
        late.start()
    try:
        with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
            for member in archive:
                source = archive.extractfile(member) if member.isfile() else None
                if source is not None:
                    yield member, iter(lambda source=source: source.read(1 << 20), b"")  # type: ignore[misc]
    except (tarfile.TarError, OSError) as err:
        process.kill()
        told = process.stderr.read(2000).decode("utf-8", "replace").strip()
        raise Failed(told or str(err)) from None
    finally:
        if late is not None:
            late.cancel()
        process.stdout.close()
        process.stderr.close()
        process.wait()


def write(out: str, name: str, data: Iterator[bytes]) -> str:
    """Write the file whole: who reads it meanwhile sees the old one or the new one."""
    path = os.path.join(out, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(f"{path}.part", "wb") as file:
        for block in data:
            file.write(block)
    os.replace(f"{path}.part", path)
    return path
