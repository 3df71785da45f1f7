"""The files of imported results, copied."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from evalfleet.channels.artefacts import LEFT_OUT, Caps, LeftOut, printable
from evalfleet.model import Collected
from evalfleet.views.files import replace, to_json


def copied(source: Path, into: Path, caps: Caps) -> Collected:
    """Plain files only, up to the caps; what stays behind is listed, as for any attempt."""
    files = size = 0
    left_out: list[LeftOut] = []
    for folder, names, entries in os.walk(source):
        names.sort()
        target = into / os.path.relpath(folder, source)
        target.mkdir(parents=True, exist_ok=True)
        for name in sorted(entries, key=lambda name: (name != "result.txt", name)):
            path = Path(folder, name)
            shown = printable(os.path.relpath(path, source))
            bytes_ = path.lstat().st_size
            if reason := _unfit(path, files, size + bytes_, caps):
                left_out.append(LeftOut(shown, reason, bytes_))
                continue
            try:
                shutil.copy2(path, target / name, follow_symlinks=False)
            except PermissionError as err:
                left_out.append(LeftOut(shown, f"unreadable: {err.strerror}", bytes_))
                continue
            files, size = files + 1, size + bytes_
    if left_out:
        replace(into / LEFT_OUT, to_json(left_out))
    return Collected(files, size, len(left_out))


def _unfit(path: Path, files: int, bytes_: int, caps: Caps) -> str:
    if path.is_symlink() or not path.is_file():
        return "not a file"
    if path.name == LEFT_OUT:
        return "the name is evalfleet's own"
    return "too many files" if files >= caps.files else "too many bytes" if bytes_ > caps.bytes else ""
