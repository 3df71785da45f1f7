"""A minimal root file system from this computer's own programs: enough for the stand-in in a real engine."""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

from tests.waiting import PATIENCE_S

PROGRAMS = (
    "bash",
    "sh",
    "env",
    "sleep",
    "timeout",
    "cat",
    "rm",
    "mkdir",
    "ls",
    "kill",
    "tr",
    "curl",
    "ip",
    "/usr/bin/python3",
)
LEFT_OUT = ("__pycache__", "dist-packages", "test", "idlelib", "tkinter", "ensurepip", "lib2to3", "config-*")
_LIBRARY = re.compile(r"(/\S+) \(0x")


def missing() -> str | None:
    """Which program this computer lacks, if any."""
    return next((name for name in PROGRAMS if shutil.which(name) is None), None)


def write_rootfs(archive: Path, files: Path, programs: Sequence[str] = PROGRAMS) -> None:
    """A tar of the programs, what they load, Python's library if it is one of them, and `files`."""
    with tarfile.open(archive, "w") as tar:
        added: set[str] = set()
        for folder in ("tmp", "proc", "sys", "dev", "root", "etc", "storage", "results"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
            tar.addfile(entry)
        for name, target in (("bin", "usr/bin"), ("lib", "usr/lib"), ("lib64", "usr/lib64")):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            tar.addfile(link)
        for program in programs:
            path = shutil.which(program)
            assert path is not None
            for needed in (path, *_libraries(path)):
                _add(tar, needed, added)
            _add(tar, path, added, at=f"/usr/bin/{Path(program).name}")
        if "/usr/bin/python3" in programs:
            library = Path(_python_library())
            tar.add(library, str(library).lstrip("/"), filter=_wanted)
            for module in library.glob("lib-dynload/*.so"):
                for needed in _libraries(str(module)):
                    _add(tar, needed, added)
        tar.add(files, ".")


def _add(tar: tarfile.TarFile, path: str, added: set[str], at: str = "") -> None:
    """Under the name by which it is looked for; as the file that this leads to."""
    name = (
        (at or path).replace("/lib64/", "/usr/lib64/", 1)
        if (at or path).startswith("/lib64/")
        else at or path
    )
    name = "/usr" + name if name.startswith(("/lib/", "/bin/", "/sbin/")) else name
    if name not in added:
        added.add(name)
        real = Path(path).resolve()
        entry = tar.gettarinfo(str(real), name.lstrip("/"))
        entry.type, entry.linkname = tarfile.REGTYPE, ""
        entry.size = real.stat().st_size
        with real.open("rb") as file:
            tar.addfile(entry, file)


def _libraries(path: str) -> list[str]:
    done = subprocess.run(["ldd", path], capture_output=True, text=True, timeout=PATIENCE_S)
    return _LIBRARY.findall(done.stdout)


def _python_library() -> str:
    ask = "import sysconfig; print(sysconfig.get_path('stdlib'))"
    return subprocess.run(
        ["/usr/bin/python3", "-I", "-c", ask], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    ).stdout.strip()


def _wanted(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if any(Path(entry.name).match(name) for name in LEFT_OUT) else entry
