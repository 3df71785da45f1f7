"""The guest's HTTP server, with the endpoints of the original; and noVNC's page on another port.

POST /execute_windows {"command": "HANG"} makes the guest hang for good: it takes requests and never answers.
"CORRUPT" breaks its disk as well, so that it does not boot again. "DIE" ends it.
"""

import base64
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

DISK = sys.argv[1] if len(sys.argv) > 1 else ""
HANGS = threading.Event()
LOCK = threading.Lock()
PROGRAMS = {
    "LibreOffice": "soffice",
    "Google Chrome": "chrome",
    "VLC": "vlc",
    "VS Code": "code",
    "GIMP": "gimp",
    "Thunderbird": "thunderbird",
}


def picture(width: int = 64, height: int = 40) -> bytes:
    """A PNG that changes with time, as a screen does."""
    shade = int(time.time() * 10) % 256
    row = b"\0" + bytes((shade, 120, 215)) * width

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(row * height)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def note(text: str) -> None:
    """Whatever is done to Windows stays on its disk."""
    with LOCK, open(DISK, "ab") as disk:
        disk.write(text.encode() + b"\n")


def observation() -> dict:
    return {
        "image": base64.b64encode(picture()).decode(),
        "window_title": "Program Manager",
        "rect": [0, 0, 64, 40],
        "window_names_str": "Program Manager",
        "computer_clipboard": "",
        "human_input": None,
        "status": "success",
    }


def power_down(*_: object) -> None:
    """A Windows that hangs does not hear of it."""
    if not HANGS.is_set():
        note("shut down")
        with open(os.path.join(os.path.dirname(DISK), "windows.boot"), "w", encoding="utf-8") as file:
            file.write("windows.boot\n")
        os._exit(0)


def run_python(words: list) -> str:
    """Run a program in Python, which finds all that the original has installed but what the plan `lacks`."""
    with tempfile.TemporaryDirectory(dir=os.path.dirname(DISK)) as installed:
        for name in PROGRAMS.keys() - set(lacking()):
            path = os.path.join(installed, PROGRAMS[name])
            os.close(os.open(path, os.O_CREAT, 0o755))
        python = shutil.which("python3") or shutil.which("python") or "python"
        environ = {**os.environ, "PATH": installed}
        ran = subprocess.run(
            [python, "-c", *words], env=environ, stdout=subprocess.PIPE, text=True, check=False
        )
        return ran.stdout


def lacking() -> list:
    for folder in (os.path.dirname(DISK), "/"):
        try:
            with open(os.path.join(folder, "plan.json"), encoding="utf-8") as file:
                return json.load(file).get("lacks", [])
        except OSError:
            continue
    return []


GET = {
    "/probe": lambda: {"status": "Probe successful", "message": "Service is operational"},
    "/screenshot": picture,
    "/accessibility": lambda: {"AT": '<desktop name="desktop"/>'},
    "/obs_winagent": observation,
    "/terminal": lambda: {"output": None, "status": "success"},
    "/platform": lambda: "Windows",
    "/cursor_position": lambda: "[0, 0]",
}


class Guest(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.hang_if_told()
        path = self.path.partition("?")[0]
        if path in GET:
            self.answer(200, GET[path]())
        else:
            self.answer(404, {"error": "not found"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hang_if_told()
        path = self.path.partition("?")[0]
        if path in ("/execute", "/execute_windows"):
            self.execute(body)
        elif path.startswith("/setup/") or path == "/update_computer":
            note(f"{path} {body.decode('utf-8', 'replace')[:200]}")
            self.answer(200, {"status": "success"})
        elif path == "/file":
            self.answer(404, {"error": "File not found"})
        elif path == "/shutdown":
            self.shut_down()
        else:
            self.answer(404, {"error": "not found"})

    def execute(self, body: bytes) -> None:
        try:
            command = json.loads(body)["command"]
        except (ValueError, KeyError, TypeError):
            return self.answer(400, {"status": "error", "message": "command is required"})
        note(f"ran {str(command)[:200]}")
        if command == "CORRUPT":
            with LOCK, open(DISK, "wb") as disk:
                disk.write(b"\0" * 64)
        if command in ("HANG", "CORRUPT"):
            HANGS.set()
        if command == "DIE":
            os._exit(1)
        self.hang_if_told()
        output = (
            run_python(command[2:]) if isinstance(command, list) and command[:2] == ["python", "-c"] else ""
        )
        return self.answer(200, {"status": "success", "output": output, "error": "", "returncode": 0})

    def shut_down(self) -> None:
        self.answer(
            200, {"status": "Shutdown started successfully", "message": "Shutdown started successfully"}
        )
        threading.Timer(0.1, power_down).start()

    def hang_if_told(self) -> None:
        while HANGS.is_set():
            time.sleep(3600)

    def answer(self, status: int, what: object) -> None:
        picture = isinstance(what, bytes)
        data = what if picture else (what if isinstance(what, str) else json.dumps(what)).encode()
        self.send_response(status)
        self.send_header("Content-Type", "image/png" if picture else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...


class Viewer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        page = b"<!DOCTYPE html><title>noVNC</title>"
        self.send_response(200)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, *_: object) -> None: ...


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, power_down)
    print("❯ Windows started succesfully, visit http://localhost:8006/ to view the screen...", flush=True)
    Server(("0.0.0.0", 5000), Guest).serve_forever()
