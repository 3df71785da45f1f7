"""Windows: does its server answer, and what is on its screen?"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
import urllib.request
import zlib

from .config import CONTAINER, PORTS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .engine import Engine

LOOK_S = 5.0
PICTURE_S = 20.0
PNG = b"\x89PNG\r\n\x1a\n"


def answers(url: str, timeout_s: float = LOOK_S) -> bool:
    """One question, no patience."""
    try:
        with _direct.open(f"{url}/probe", timeout=timeout_s) as answer:
            answer.read(4096)
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False


def await_answer(url: str, deadline: float, alive: Callable[[], bool], look_s: float = 1.0) -> bool:
    """False at the deadline (of the monotonic clock), or as soon as there is nothing left to answer."""
    looks = 0
    while not answers(url):
        looks += 1
        if time.monotonic() >= deadline or (looks % 10 == 0 and not alive()):
            return False
        time.sleep(look_s)
    return True


def picture(url: str, engine: Engine) -> bytes | None:
    """The screen as PNG: from the guest's server, or from the virtual machine if that is silent."""
    try:
        with _direct.open(f"{url}/screenshot", timeout=PICTURE_S) as answer:
            data: bytes = answer.read(32 << 20)
        if data.startswith(PNG):
            return data
    except (OSError, ValueError):
        pass
    try:
        return _screendump(engine)
    except (OSError, ValueError, KeyError, IndexError):
        return None


def _screendump(engine: Engine) -> bytes | None:
    """QEMU writes it inside the container."""
    path = "/tmp/evalfleet-screen.ppm"
    with socket.create_connection(("127.0.0.1", PORTS["qmp"]), PICTURE_S) as line, line.makefile(
        "rwb"
    ) as file:
        file.readline()  # its greeting
        orders: tuple[dict[str, object], ...] = (
            {"execute": "qmp_capabilities"},
            {"execute": "screendump", "arguments": {"filename": path}},
        )
        for order in orders:
            file.write(json.dumps(order).encode() + b"\n")
            file.flush()
            while "return" not in (answer := json.loads(file.readline())):
                if "error" in answer:
                    return None
    done = engine.try_("exec", CONTAINER, "cat", path)
    return png_of(done.raw) if done.ok else None


def png_of(ppm: bytes) -> bytes:
    """A P6 picture as PNG. Raises ValueError, IndexError."""
    magic, width, height, _, pixels = ppm.split(maxsplit=4)
    if magic != b"P6":
        raise ValueError("no PPM picture")
    wide, high = int(width), int(height)
    rows = (b"\0" + pixels[at : at + 3 * wide] for at in range(0, 3 * wide * high, 3 * wide))
    head = struct.pack(">IIBBBBB", wide, high, 8, 2, 0, 0, 0)
    return PNG + _chunk(b"IHDR", head) + _chunk(b"IDAT", zlib.compress(b"".join(rows))) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def save_evidence(url: str, engine: Engine) -> str:
    """Screen and container log go into the job's artefacts; the log's end is returned."""
    log = engine.logs(CONTAINER, 200)
    out = os.environ.get("EVALFLEET_OUT", "")
    if out:
        with open(os.path.join(out, "container.log"), "w") as file:
            file.write(log)
        shot = picture(url, engine)
        if shot is not None:
            with open(os.path.join(out, "guest.png"), "wb") as raw:
                raw.write(shot)
    return "\n".join(log.splitlines()[-20:])


# the guest is on this machine: no proxy of the environment is asked
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
