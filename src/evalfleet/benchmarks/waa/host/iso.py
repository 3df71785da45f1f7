"""The ISO that Windows is installed from: brought to the machine once, and checked.

WAA's own image holds no Windows and downloads none. `iso` of the machine's settings says where the ISO is:
`host:PATH`, a URL with its checksum, or a file that is sent in parts (`sent:NAME:PARTS:BYTES`).
"""

from __future__ import annotations

import hashlib
import os
import shutil

from .shell import Failed, say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .config import HostConfig

LEAST_BYTES = 100 << 20
"""The base image takes nothing smaller."""
MARK_AT, MARK = 16 * 2048 + 1, b"CD001"
SOURCE = "https://info.microsoft.com/ww-landing-windows-11-enterprise.html"
WHERE = (
    f"get the Windows 11 Enterprise Evaluation ISO from {SOURCE} (you accept its terms there, and may use it "
    "for 90 days) and say --set iso=PATH; or take golden storage made before, --set golden=URL|PATH; "
    "or an image that downloads Windows itself, --set preset=waa-auto"
)
NONE = f"there is nothing that Windows could be installed from: {WHERE}"
PART, PART_BYTES = "part", 64 << 20
LICENCE_DAYS = 90
_BLOCK = 4 << 20


class Wanted(Failed):
    """The file must be sent before the step can be done."""

    code = 75  # as evalfleet.model.WANTS_FILE says


def step_iso(config: HostConfig, has_golden: bool) -> None:
    """The ISO is on this machine, if Windows is to be installed from one. Raises Failed, Wanted."""
    if has_golden or config.golden:
        say("no ISO is needed")
        return
    path = bring(config)
    if path:
        gigabytes = os.path.getsize(path) / (1 << 30)
        say(f"the ISO is there, {gigabytes:.1f} GB; the Windows on it may be used for {LICENCE_DAYS} days")


def problem_of(path: str) -> str:
    """What is wrong with it as an ISO; empty if nothing is."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(MARK_AT)
            marked = file.read(len(MARK)) == MARK
    except OSError as err:
        return f"cannot be read ({err.strerror})"
    if not marked:
        return "is no ISO: it lacks the mark of one"
    return "" if size >= LEAST_BYTES else f"has only {size >> 20} MB: no Windows fits on it"


def bring(config: HostConfig) -> str:
    """Where the ISO is on this machine; empty for an image that needs none. Raises Failed."""
    if not config.iso:
        if config.needs_iso:
            raise Failed(NONE)
        return ""
    kind, _, rest = config.iso.partition(":")
    path = config.iso_file
    if kind == "host":
        path = os.path.expanduser(rest)
    elif kind == "sent":
        name, parts, size = rest.split(":")
        path = os.path.join(os.path.dirname(path), f"{name}.iso")
        if not os.path.exists(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            _join(path, name, int(parts), int(size))
    elif kind in ("http", "https"):
        _download(config.iso, path)
    else:
        path = os.path.expanduser(config.iso)  # as earlier versions had it
    problem = problem_of(path)
    if problem:
        raise Failed(f"{path} {problem}; {WHERE}")
    return path


def _join(path: str, name: str, parts: int, size: int) -> None:
    """Each part is emptied when it was taken, and stays as the sign that it need not be sent again."""
    folders = [os.path.join("..", f"{name}-{number}.part") for number in range(parts)]
    whole = f"{path}.part"
    begun = os.path.exists(whole)
    if not all(os.path.exists(os.path.join(folder, PART)) for folder in folders):
        raise Wanted(f"the ISO is to be sent: {size / (1 << 30):.1f} GB")
    with open(whole, "r+b" if begun else "wb") as target:
        for number, folder in enumerate(folders):
            piece = os.path.join(folder, PART)
            if os.path.getsize(piece) == 0 and not begun:
                for spent in folders:  # what was made of them is gone
                    shutil.rmtree(spent, ignore_errors=True)
                raise Wanted("the ISO is to be sent again")
            target.seek(number * PART_BYTES)
            with open(piece, "rb") as source:
                shutil.copyfileobj(source, target, _BLOCK)
            target.flush()
            os.fsync(target.fileno())
            os.truncate(piece, 0)
    if os.path.getsize(whole) != size:
        os.unlink(whole)
        raise Failed(f"the ISO that came is not the one that was sent: it has not {size} bytes")
    os.replace(whole, path)


def _download(url: str, path: str) -> None:
    from .download import Download, Missing

    address, _, checksum = url.partition("#sha256=")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    try:
        Download(address, "", path).bring()
    except Missing:
        raise Failed(f"{address} is not there; {WHERE}") from None
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    if digest.hexdigest() != checksum.lower():
        os.unlink(path)
        raise Failed(f"{address} is not the ISO that was meant: its SHA-256 is {digest.hexdigest()}")
