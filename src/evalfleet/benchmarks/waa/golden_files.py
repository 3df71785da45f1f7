"""Golden storage that is a folder of this computer (`golden = "here:PATH"`), to be sent to a place's own
storage. Its contents name it: their checksums are computed once, and kept until a file changes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from evalfleet.errors import RequestError
from evalfleet.files import replace
from evalfleet.model import KeptFiles, decodable

from .host.config import SENT_FROM
from .settings import HERE, WaaSettings

LABEL = "golden storage"
SUMS = Path(".waa") / "golden.json"
_BLOCK = 4 << 20


class _Sum(Struct, frozen=True):
    """The checksum of a file as it was then."""

    stamp: tuple[int, int, int]
    """Size, time of its last change, and number on its disk."""
    sha256: str


def golden_files(settings: WaaSettings, base: Path, home: Path, where: str) -> KeptFiles | None:
    """The files, if golden storage is here. Raises RequestError for a folder that is none."""
    if not settings.golden.startswith(HERE):
        return None
    from .host.golden import FILES, lacking  # the program of machines: seldom needed here

    folder = (base / Path(settings.golden.removeprefix(HERE)).expanduser()).resolve()
    paths = {name: folder / name for name in FILES if (folder / name).is_file()}
    if missing := lacking(paths):
        raise RequestError(
            f"{where}: golden: {folder} has no {', '.join(missing)}; name the folder `storage` that WAA's "
            "guide makes"
        )
    if settings.golden_token:
        raise RequestError(f"{where}: golden_token is for a URL; with golden={HERE}PATH the token is made")
    sums = _sums(home, paths)
    told = [f"{name} {sums[name].stamp[0]} {sums[name].sha256}" for name in sorted(sums)]
    digest = hashlib.sha256("\n".join(told).encode()).hexdigest()[:32]
    return KeptFiles(
        LABEL,
        f"golden-{digest}",
        {name: str(path) for name, path in paths.items()},
        {name: known.sha256 for name, known in sums.items()},
        SENT_FROM,
    )


def _sums(home: Path, paths: Mapping[str, Path]) -> dict[str, _Sum]:
    """The checksums by name. They are not computed again for files that have not changed since."""
    kept = home / SUMS
    try:
        known = msgspec.json.decode(kept.read_bytes(), type=decodable(dict[str, _Sum]))
    except (OSError, msgspec.MsgspecError):
        known = {}
    found: dict[str, _Sum] = {}
    for name, path in paths.items():
        try:
            seen = os.stat(path)
            stamp = (seen.st_size, seen.st_mtime_ns, seen.st_ino)
            earlier = known.get(str(path))
            found[name] = earlier if earlier and earlier.stamp == stamp else _Sum(stamp, _sha256(path))
        except OSError as err:
            raise RequestError(f"{path}: {err.strerror or err}") from err
    new = {str(paths[name]): each for name, each in found.items()}
    if home.is_dir() and any(known.get(path) != each for path, each in new.items()):
        with suppress(OSError):  # then they are computed again the next time
            kept.parent.mkdir(exist_ok=True)
            replace(kept, msgspec.json.encode({**known, **new}))
    return found


def _sha256(path: Path) -> str:
    total = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            total.update(block)
    return total.hexdigest()
