"""The lists of tasks that machines told, kept in the home by the digest of their image."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
from msgspec import Struct

from evalfleet.errors import RequestError
from evalfleet.files import replace

from .files import LIST, Told

FOLDER = Path(".waa") / "told"
EARLIER = Path(".waa") / "tasks"
"""Earlier versions read images themselves and kept here what they found. It is still good."""
NAMES = "names.json"
"""Image -> the digest that it had when its tasks were told last."""
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def find(home: Path, image: str) -> Told | None:
    """The list of this image. One that cannot be read counts as missing."""
    for folder in (home / FOLDER, home / EARLIER):
        digest = _names(folder).get(image, "")
        try:
            told = _read(_path(folder, digest).read_bytes(), image)
        except (OSError, RequestError):
            continue
        if told.digest == digest:
            return told
    return None


def keep(home: Path, image: str, listed: bytes) -> None:
    """Keep what a machine told of this image. Raises RequestError if that is no list, OSError."""
    told, folder = _read(listed, image), home / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    _write(_path(folder, told.digest), told)
    _write(folder / NAMES, {**_names(folder), image: told.digest})


def _read(listed: bytes, image: str) -> Told:
    """Agents have worked on the machine that wrote it: what becomes a path or a message is checked."""
    try:
        told = msgspec.json.decode(listed, type=Told)
    except msgspec.MsgspecError as err:
        raise RequestError(f"what it tells is no list of tasks ({err})") from None
    if not _DIGEST.fullmatch(told.digest) or not all(name.isprintable() for name in told.texts):
        raise RequestError("what it tells is no list of tasks: its digest or a name in it is malformed")
    if LIST not in told.texts:
        raise RequestError(f"{image} has no {LIST}: it is no image of WAA")
    return msgspec.structs.replace(told, name=image)


def _path(folder: Path, digest: str) -> Path:
    return folder / f"{digest.replace(':', '-')}.json"


def _names(folder: Path) -> dict[str, str]:
    try:
        return msgspec.json.decode((folder / NAMES).read_bytes(), type=dict[str, str])
    except (OSError, msgspec.MsgspecError):
        return {}


def _write(path: Path, content: Struct | dict[str, str]) -> None:
    """Replace the file as a whole: another process may read or write it at the same time."""
    replace(path, msgspec.json.encode(content, order="deterministic"))
