"""Windows: does its server answer, and what is on its screen?"""

from __future__ import annotations

import json
import os
import socket
import time

from . import vm
from .config import CONTAINER, INSTALLER, PORTS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .docker import Docker

LOOK_S = 3.0
FIRST_LOOK_S, LAST_LOOK_S = 0.1, 3.0
PICTURE_S = 10.0
ASK_S = 60.0
# Runs in Windows. It looks where installers put programs, on the path, and at what Windows lists.
ASK_PROGRAMS = r"""
import json, os, shutil, sys
FILES = {
    "LibreOffice": ("soffice", r"LibreOffice\program\soffice.exe"),
    "Google Chrome": ("chrome", r"Google\Chrome\Application\chrome.exe"),
    "VLC": ("vlc", r"VideoLAN\VLC\vlc.exe"),
    "VS Code": ("code", r"Microsoft VS Code\Code.exe"),
    "GIMP": ("gimp", r"GIMP 2\bin\gimp-2.10.exe"),
    "Thunderbird": ("thunderbird", r"Mozilla Thunderbird\thunderbird.exe"),
}
LISTED = {"VS Code": "visual studio code"}
def listed():
    try:
        import winreg
    except ImportError:
        return
    key = r"SOFTWARE\Microsoft\Windows\CurrentVersion\Uninstall"
    old = r"SOFTWARE\WOW6432Node\Microsoft\Windows\CurrentVersion\Uninstall"
    for root in (winreg.HKEY_LOCAL_MACHINE, winreg.HKEY_CURRENT_USER):
        for path in (key, old):
            try:
                with winreg.OpenKey(root, path) as folder:
                    for n in range(winreg.QueryInfoKey(folder)[0]):
                        try:
                            with winreg.OpenKey(folder, winreg.EnumKey(folder, n)) as entry:
                                yield str(winreg.QueryValueEx(entry, "DisplayName")[0]).lower()
                        except OSError:
                            pass
            except OSError:
                pass
names = list(listed())
places = [os.environ.get(name, "") for name in ("ProgramFiles", "ProgramFiles(x86)", "LOCALAPPDATA")]
places.append(os.path.join(os.environ.get("LOCALAPPDATA", ""), "Programs"))
missing = []
for program in sys.argv[1:]:
    command, path = FILES.get(program, (program, program))
    there = shutil.which(command) or any(os.path.exists(os.path.join(p, path)) for p in places if p)
    if not there and not any(LISTED.get(program, program.lower()) in name for name in names):
        missing.append(program)
print(json.dumps({"missing": missing}))
"""
PNG = b"\x89PNG\r\n\x1a\n"


def answers(port: int = PORTS["guest"], timeout_s: float = LOOK_S) -> bool:
    """One question, no patience."""
    try:
        return _get(port, "/probe", timeout_s, 4096).split(b" ", 2)[1:2] == [b"200"]
    except OSError:
        return False


def _get(port: int, path: str, timeout_s: float, most: int) -> bytes:
    """The raw answer of the guest's server, up to `most` bytes. Raises OSError."""
    return _exchange(port, f"GET {path} HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n", timeout_s, most)


def _exchange(port: int, request: str, timeout_s: float, most: int) -> bytes:
    """Speak HTTP by hand: Python's client takes longer to load than all the rest. Raises OSError."""
    deadline = time.monotonic() + timeout_s
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout_s) as line:
        line.sendall(request.encode())
        while len(answer) < most:
            line.settimeout(max(0.01, deadline - time.monotonic()))
            block = line.recv(1 << 16)
            if not block:
                break
            answer += block
    return answer


def await_answer(deadline: float, is_hopeless: Callable[[], object], look_s: float = FIRST_LOOK_S) -> bool:
    """False at the deadline (of the monotonic clock), or as soon as there is no hope left."""
    while not answers():
        if time.monotonic() >= deadline or is_hopeless():
            return False
        time.sleep(look_s)
        look_s = min(look_s * 1.3, LAST_LOOK_S)
    return True


def missing_programs(names: list[str], port: int = PORTS["guest"]) -> list[str]:
    """Which of these Windows says it does not have. One that cannot tell is believed to have them all."""
    if not names:
        return []
    body = json.dumps({"command": ["python", "-c", ASK_PROGRAMS, *names], "shell": False})
    try:
        answer = _exchange(
            port,
            f"POST /execute HTTP/1.0\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body.encode())}\r\n\r\n{body}",
            ASK_S,
            1 << 20,
        )
        told = json.loads(json.loads(answer.partition(b"\r\n\r\n")[2])["output"])
        return [name for name in names if name in told["missing"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def picture(engine: Docker) -> bytes | None:
    """The screen as PNG: from the guest's server, or from the virtual machine if that is silent."""
    shot = _screenshot() if answers() else None
    for container in (CONTAINER, INSTALLER):
        shot = shot or _screendump(engine, container)
    return shot


def _screenshot() -> bytes | None:
    try:
        data = _get(PORTS["guest"], "/screenshot", PICTURE_S, 32 << 20).partition(b"\r\n\r\n")[2]
    except OSError:
        return None
    return data if data.startswith(PNG) else None


def _screendump(engine: Docker, container: str) -> bytes | None:
    """QEMU writes it inside the container. It shows also a Windows that hangs, or is being installed."""
    path = "/tmp/evalfleet-screen.ppm"
    if not vm.order(engine, container, "screendump", filename=path):
        return None
    done = engine.try_("exec", container, "cat", path)
    try:
        return png_of(done.raw) if done.ok else None
    except (ValueError, IndexError):
        return None


def png_of(ppm: bytes) -> bytes:
    """A P6 picture as PNG. Raises ValueError, IndexError."""
    import struct
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    magic, width, height, _, pixels = ppm.split(maxsplit=4)
    if magic != b"P6":
        raise ValueError("no PPM picture")
    wide, high = int(width), int(height)
    rows = (b"\0" + pixels[at : at + 3 * wide] for at in range(0, 3 * wide * high, 3 * wide))
    head = struct.pack(">IIBBBBB", wide, high, 8, 2, 0, 0, 0)
    return PNG + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"".join(rows))) + chunk(b"IEND", b"")


def save_evidence(engine: Docker, container: str = CONTAINER) -> str:
    """Screen and container log go into the job's artefacts; the log's end is returned."""
    lines = vm.log(engine, container)
    out = os.environ.get("EVALFLEET_OUT", "")
    if out:
        with open(os.path.join(out, "container.log"), "w") as file:
            file.write("".join(f"{line}\n" for line in lines))
        shot = picture(engine)
        if shot is not None:
            with open(os.path.join(out, "guest.png"), "wb") as raw:
                raw.write(shot)
    return "\n".join(lines[-20:])
