"""A browser to measure pages with: Debian's Chromium, driven by playwright."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from playwright.sync_api import BrowserContext, CDPSession, Page, sync_playwright

from .result import Figures, rounded

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
LIMIT_MS = 300_000
FIRST_ROW = ".grid-body .grid-row"
"""What a run's page shows last: the first task of its table."""
BLANK = """data:text/html,<p>words</p><canvas></canvas>
<script>document.querySelector("canvas").getContext("2d").fillText("words", 9, 9)</script>"""
"""A page of a little of everything: the browser's own start, and that of what draws, is in no figure."""
DRAWN = "() => new Promise((done) => requestAnimationFrame(() => setTimeout(() => done(performance.now()))))"


class Tab:
    """One tab of a browser that has never seen anything: `warm` loads find what the first one left."""

    def __enter__(self) -> Self:
        self._playwright = sync_playwright().start()
        self._browser = self._playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        self.context: BrowserContext = self._browser.new_context(viewport={"width": 1280, "height": 900})
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(LIMIT_MS)
        self._session: CDPSession = self.context.new_cdp_session(self.page)
        self._session.send("Performance.enable", {"timeDomain": "threadTicks"})
        self._session.send("Network.enable")
        self.bytes = 0
        self.requests: list[str] = []
        self._session.on("Network.loadingFinished", self._loaded)
        self.page.goto(BLANK)
        self.page.evaluate(DRAWN)
        self.page.on("request", lambda request: self.requests.append(request.url))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._browser.close()
        self._playwright.stop()

    def _loaded(self, event: dict[str, Any]) -> None:
        self.bytes += int(event["encodedDataLength"])

    def load(self, url: str, until: str = FIRST_ROW) -> Figures:
        """Seconds until the page can be used, the CPU seconds of its main thread, and the bytes that came."""
        self.bytes, before = 0, self._cpu_s()
        self.page.goto(url, wait_until="commit")
        if self._cpu_s() < before:
            before = 0.0  # a new page has a counter of its own
        self.page.wait_for_selector(until)
        wall_s = float(self.page.evaluate(DRAWN)) / 1000
        return {
            "wall_s": rounded(wall_s),
            "page_cpu_s": rounded(self._cpu_s() - before),
            "kB": rounded(self.bytes / 1000),
        }

    def click(self, on: str, until: str) -> float:
        """Seconds from a click until what it leads to is drawn."""
        self.page.wait_for_selector(on)
        begun = float(self.page.evaluate("performance.now()"))
        self.page.click(on)
        self.page.wait_for_selector(until)
        return rounded((float(self.page.evaluate(DRAWN)) - begun) / 1000)

    def _cpu_s(self) -> float:
        metrics = self._session.send("Performance.getMetrics")["metrics"]
        return float(next(each["value"] for each in metrics if each["name"] == "TaskDuration"))

    def memory_mb(self) -> float:
        """What the tab's process has for itself, after what it no longer needs is gone."""
        self._session.send("HeapProfiler.collectGarbage")
        whole = self._browser.new_browser_cdp_session()
        processes = whole.send("SystemInfo.getProcessInfo")["processInfo"]
        whole.detach()
        tabs = [int(each["id"]) for each in processes if each["type"] == "renderer"]
        return max(map(_private_mb, tabs))


def _private_mb(pid: int) -> float:
    """Pages that no other process shares: the browser's own program is not counted for each tab."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024
