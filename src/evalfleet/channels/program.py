"""How the supervisor gets to a host: as the folder it is here, or as one file."""

from __future__ import annotations

import io
import sys
import zipfile
from pathlib import Path

FOLDER = Path(__file__).with_name("supervisor")
_START = """\
import sys
if sys.version_info < (3, 8):
    sys.stderr.write(sys.version)
    sys.exit(98)
if sys.argv[1:] == ["connect"]:
    from supervisor.verbs import verb
    sys.exit(verb("connect"))
from supervisor.main import main
sys.exit(main(sys.argv))
"""
_EPOCH = (1980, 1, 1, 0, 0, 0)


def local_argv(directory: str) -> tuple[str, ...]:
    """Starts a supervisor for a directory of this computer; returns once it listens."""
    return (sys.executable, "-I", "-S", str(FOLDER), directory)


def archive() -> bytes:
    """The supervisor as one file: `python -I -S FILE DIR`, Python 3.8 and later. Same source, same bytes."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as file:
        for path in sorted(FOLDER.glob("*.py")):
            if path.name != "__main__.py":
                file.writestr(zipfile.ZipInfo(f"supervisor/{path.name}", _EPOCH), path.read_bytes())
        file.writestr(zipfile.ZipInfo("__main__.py", _EPOCH), _START)
    return data.getvalue()
