"""Other tools in Python environments of their own, made when first needed and kept for the next time."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# one table: what is measured, and in which version
PACKAGES = {
    "ray": "ray==2.60.0",
    "dask": "distributed==2026.8.0",
    "parsl": "parsl==2026.10.26",
    "openadapt": "openadapt-evals==0.94.0",
    # what the place and its stand-in need
    "azure": (
        "azure-mgmt-resource==26.0.0 azure-identity>=1.19 aiohttp>=3.10 asyncssh>=2.14 cryptography>=42 "
        "msgspec>=0.19 pyyaml>=6 rich>=13"
    ),
}
LIMIT_S = 600.0
COMPLETE = "complete"


class NoEnvironment(Exception):
    """It cannot be made here. Says why, in one line."""


def cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "evalfleet-bench"


def python_of(name: str) -> Path:
    """The Python of a tool's environment. Raises NoEnvironment."""
    version = f"py{sys.version_info.major}.{sys.version_info.minor}"
    first, *_ = PACKAGES[name].split()
    folder = cache() / f"{first.replace('==', '-')}-{version}"
    try:
        with _locked(folder):
            if not (folder / COMPLETE).exists():
                _make(folder, PACKAGES[name])
    except OSError as err:
        raise NoEnvironment(f"{folder} cannot be made: {err}") from err
    return folder / "bin/python"


def _make(folder: Path, package: str) -> None:
    """What is half made, because somebody ended us, is made anew."""
    shutil.rmtree(folder, ignore_errors=True)
    python = folder / "bin/python"
    argv = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *package.split()]
    try:
        venv.create(folder, with_pip=True)
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.SubprocessError as err:
        raise NoEnvironment(f"{package} cannot be installed: {err}") from err
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise NoEnvironment(f"{package} cannot be installed: {said[-1] if said else done.returncode}")
    (folder / COMPLETE).touch()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Two benchmarks at once must not make one environment."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(folder.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
