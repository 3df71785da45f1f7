"""A headless Chromium on the DevTools pipe, with the standard library alone.

The pipe (`--remote-debugging-pipe`) instead of a WebDriver, for two reasons: Chromium ends itself when the
pipe closes, so not even a killed agent leaves a browser behind; and there is no driver to install, to match
with the browser and to start.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PIXELS = 1.5
"""Of a screenshot for one of the page. MiniWoB's pages are 160 wide: people could not read them otherwise."""
FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",  # Chromium refuses its sandbox to root; the pages are the benchmark's own files
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-component-extensions-with-background-pages",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--disable-breakpad",
    "--disable-crash-reporter",
    "--metrics-recording-only",
    "--mute-audio",
    "--password-store=basic",
    "--use-mock-keychain",
    "--disable-features=Translate,MediaRouter,OptimizationHints,AutofillServerCommunication,DialMediaRouteProvider",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # nothing outside the machine can be reached, even by mistake
    f"--force-device-scale-factor={PIXELS}",
    "--window-size=500,400",
)
START = "--app=data:text/html,"  # a window without an address bar, whose pop-ups alone cost a second of CPU
WAIT_S = 20.0  # for one answer of the browser; a starved machine takes seconds to start one
QUIT_S = 3.0


class BrowserError(Exception):
    """The browser did not start, ended, or refused a command."""


class Browser:
    """One browser with one page and an empty profile; leaving the `with` block ends and deletes all of it."""

    def __init__(self, binary: str) -> None:
        self.binary = binary
        self._profile = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._to = self._from = -1
        self._buffer = b""
        self._sent = 0
        self._session = ""

    def __enter__(self) -> Browser:
        try:
            self._start()
            attached = self._call("Target.attachToTarget", {"targetId": self._first_page(), "flatten": True})
            self._session = attached["sessionId"]
            self.call("Page.enable")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def open(self, page: Path) -> None:
        """Load a local page and wait until its scripts and load handlers have run."""
        self.call("Page.navigate", {"url": page.as_uri()})
        deadline = time.monotonic() + WAIT_S
        while not self.evaluate("document.readyState === 'complete' && location.protocol === 'file:'"):
            if time.monotonic() > deadline:
                raise BrowserError(f"{page.name} did not load in {WAIT_S:g} s")
            time.sleep(0.02)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page, as JSON would give it."""
        answer = self.call("Runtime.evaluate", {"expression": expression, "returnByValue": True})
        if "exceptionDetails" in answer:
            raise BrowserError(f"script failed: {answer['exceptionDetails'].get('text')}: {expression[:80]}")
        return answer["result"].get("value")

    def screenshot(self, path: Path, width: int, height: int) -> None:
        """The top left corner of the page as a PNG file."""
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        answer = self.call(
            "Page.captureScreenshot", {"format": "png", "clip": clip, "optimizeForSpeed": False}
        )
        path.write_bytes(base64.b64decode(answer["data"]))

    def click(self, x: float, y: float) -> None:
        """Move the pointer there and click, as a mouse does: the page sees trusted events."""
        where = {"x": x, "y": y}
        button = {**where, "button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", {"type": "mouseMoved", **where})
        self.call("Input.dispatchMouseEvent", {"type": "mousePressed", **button})
        self.call("Input.dispatchMouseEvent", {"type": "mouseReleased", **button})

    def type(self, text: str) -> None:
        """Type into whatever has the focus, a key at a time."""
        for letter in text:
            self.call("Input.dispatchKeyEvent", {"type": "keyDown", "text": letter, "key": letter})
            self.call("Input.dispatchKeyEvent", {"type": "keyUp", "key": letter})

    def select_all(self) -> None:
        """Select the content of the focused field, so that typing replaces it."""
        key = {"key": "a", "modifiers": 2}
        self.call("Input.dispatchKeyEvent", {"type": "keyDown", "commands": ["selectAll"], **key})
        self.call("Input.dispatchKeyEvent", {"type": "keyUp", **key})

    def call(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        """One DevTools command to the page; its result."""
        return self._call(method, params or {}, self._session)

    def _start(self) -> None:
        # in the task's own directory, which goes with it even when the agent is killed
        self._profile = tempfile.mkdtemp(prefix="evalfleet-demo-", dir=Path.cwd())
        their_in, self._to = os.pipe()
        self._from, their_out = os.pipe()
        # the browser wants its pipe as descriptors 3 and 4; a shell puts it there, no Python after a fork
        wrap = ["/bin/sh", "-c", f'exec "$@" 3<&{their_in} 4>&{their_out}', "browser"]
        argv = [*wrap, self.binary, *FLAGS, f"--user-data-dir={self._profile}", START]
        # a home of its own: a browser writes settings and caches there, and a machine's home may be read-only
        homes = dict.fromkeys(("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"), self._profile)
        try:
            with open(Path(self._profile, "browser.log"), "wb") as log:
                self._process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **homes},
                    pass_fds=(their_in, their_out),
                    start_new_session=True,  # one group to end: Chromium is a dozen processes
                )
        finally:
            os.close(their_in)
            os.close(their_out)

    def _first_page(self) -> str:
        """The page that the browser opens by itself: a second one would cost a process."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            for target in self._call("Target.getTargets", {})["targetInfos"]:
                if target["type"] == "page":
                    return str(target["targetId"])
            time.sleep(0.02)
        raise BrowserError(f"no page in {WAIT_S:g} s")

    def _call(self, method: str, params: dict[str, Any], session: str = "") -> dict[str, Any]:
        self._sent += 1
        number = self._sent
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        try:
            os.write(self._to, json.dumps(message).encode() + b"\0")
        except OSError as error:
            raise BrowserError(f"the browser is gone: {self._last_words()}") from error
        deadline = time.monotonic() + WAIT_S
        while True:
            answer = self._read(deadline, method)
            if answer.get("id") == number:
                break
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error'].get('message')}")
        result: dict[str, Any] = answer["result"]
        return result

    def _read(self, deadline: float, what: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise BrowserError(f"no answer to {what} in {WAIT_S:g} s")
            data = os.read(self._from, 1 << 16)
            if not data:
                raise BrowserError(f"the browser ended: {self._last_words()}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _last_words(self) -> str:
        """What the browser said last, for an error message."""
        try:
            said = Path(self._profile, "browser.log").read_text(errors="replace").strip()
        except OSError:
            return "no log"
        return said.splitlines()[-1][:200] if said else "it said nothing"

    def close(self) -> None:
        """End every process of the browser and delete its profile; may be called twice."""
        for end in (self._to, self._from):
            if end >= 0:
                os.close(end)
        self._to = self._from = -1
        if self._process is not None:
            # killed outright: the profile is thrown away, and an orderly end costs as much as a start
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(QUIT_S)
            self._process = None
        if self._profile:
            shutil.rmtree(self._profile, ignore_errors=True)
            self._profile = ""


def raise_on_terminate() -> None:
    """Make SIGTERM and SIGHUP leave through `with` blocks, so that no browser stays behind."""

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    for name in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, leave)
