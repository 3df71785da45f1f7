"""How the supervisor gets to a host: as the folder it is here, or as one file."""

from __future__ import annotations

import io
import sys
import zipfile
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).with_name("supervisor")
METER = Path(__file__).with_name("meter")
_START_METER = "import sys\nfrom meter.main import main\nsys.exit(main(sys.argv))\n"
_START = """\
import sys
if sys.version_info < (3, 8):
    sys.stderr.write(sys.version)
    sys.exit(98)
if "/" not in sys.argv[1]:
    from supervisor.verbs import verb
    sys.exit(verb(sys.argv[1]))
from supervisor.main import main
sys.exit(main(sys.argv))
"""
_EPOCH = (1980, 1, 1, 0, 0, 0)


@cache
def meter_archive() -> bytes:
    """The meter as one file, which a controller sends to machines with the meter's orders."""
    return _packed(METER, _START_METER, zipfile.ZIP_DEFLATED)


def local_argv(directory: str) -> tuple[str, ...]:
    """Starts a supervisor for a directory of this computer; returns once it listens."""
    return (sys.executable, "-I", "-S", str(FOLDER), directory)


def archive() -> bytes:
    """The supervisor as one file: `python -I -S FILE DIR`, Python 3.8 and later. Same source, same bytes."""
    return _packed(FOLDER, _START, zipfile.ZIP_STORED)


def _packed(folder: Path, start: str, compression: int) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", compression) as file:
        for path in sorted(folder.glob("*.py")):
            if path.name != "__main__.py":
                about = zipfile.ZipInfo(f"{folder.name}/{path.name}", _EPOCH)
                file.writestr(about, path.read_bytes(), compression)
        file.writestr(zipfile.ZipInfo("__main__.py", _EPOCH), start)
    return data.getvalue()
