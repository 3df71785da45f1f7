"""A real browser for the dashboard's pages: Debian's Chromium, driven by playwright."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.e2e.dashboard import Dashboard, dashboard
from tests.e2e.harness import Fleet
from tests.web.looking import CHROMIUM, MARKUP, bench, launched


@pytest.fixture(scope="session")
def chromium() -> None:
    if not os.access(CHROMIUM, os.X_OK):
        pytest.skip(f"THE DASHBOARD'S PAGES ARE NOT TESTED: there is no {CHROMIUM} (Debian's chromium)")


@pytest.fixture
def browser(chromium: None) -> Iterator[Browser]:
    """One a test: while Playwright is open its loop runs, and no other test could run one of its own."""
    with sync_playwright() as playwright:
        opened = launched(playwright)
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, chromium: None) -> Iterator[tuple[Fleet, Dashboard]]:
    """Two runs that are over, one of whose tasks is hostile, and a dashboard of them."""
    fleet = Fleet.at(tmp_path_factory.mktemp("pages") / "f")
    bench(fleet)
    for name in ("r", "s"):
        done = fleet.run("--name", name, "--workers", "3", "--attempts", "2", "--model", MARKUP)
        assert done.code == 1, done
        fleet.open_gate("second")
    opened = dashboard(fleet)
    yield fleet, opened
    opened.process.interrupt()
    opened.process.wait()
    fleet.sweep()
