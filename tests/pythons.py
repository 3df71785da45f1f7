"""Other Pythons that this computer may have, for what must run on old hosts."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path

_IS_3_8 = "import sys; sys.exit(sys.version_info[:2] != (3, 8))"


@functools.cache
def python_3_8() -> str | None:
    """One that works, from the path or from pyenv's versions; None if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found = [shutil.which("python3.8"), *map(str, sorted(pyenv.glob("versions/3.8.*/bin/python")))]
    return next((python for python in found if python is not None and _works(python)), None)


def _works(python: str) -> bool:
    return subprocess.run([python, "-c", _IS_3_8], capture_output=True, timeout=30).returncode == 0
