"""A run as one file: opened from disk in a real browser, without a network."""

from __future__ import annotations

import base64
import getpass
import gzip
import re
import socket
from pathlib import Path
from urllib.parse import quote

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, expect

from evalfleet.web.client_script import linked
from tests.e2e.dashboard import Dashboard
from tests.e2e.harness import Fleet, task
from tests.large_run import make_wide_run
from tests.web.looking import MARKUP, NASTY, PHONE, Scheme, looker
from tests.web.paper import sheets


def test_the_one_file_shows_the_run_and_asks_no_network(
    finished: tuple[Fleet, Dashboard], browser: Browser, tmp_path: Path
) -> None:
    fleet, _ = finished
    told = fleet.say("report", "r", "--format", "html", "-o", "r.html")
    assert "report written to r.html" in told
    file = fleet.folder / "r.html"
    with looker(browser, None) as looks:
        page = looks.page
        page.goto(file.as_uri())
        page.wait_for_url("**#/runs/r")
        looks.shows()
        text = looks.text()
        assert f"success {100 * fleet.results()['success_rate']:.1f}%" in text
        assert MARKUP in text
        for part in ("Timeline", "Domains", "What broke", "Money", "Slowest and flakiest", "Method"):
            assert part in text, part
        assert not Axe().run(page).violations_count
        page.goto(f"{file.as_uri()}#/runs/r/tasks/seen?step=3")
        looks.shows()
        expect(page.locator(".shot img")).to_be_visible()
        expect(page.locator(".log-panel pre")).to_contain_text("step by step")
        page.keyboard.press("ArrowLeft")
        expect(page.locator(".shot .no-picture")).to_contain_text("left out")
        page.goto(f"{file.as_uri()}#/runs/r/tasks/{quote(NASTY, safe='')}?step=1")
        looks.shows()
        expect(page.locator(".log-panel pre")).to_contain_text("<script>alert(1)</script>")
        page.get_by_text("what the task is").click()
        assert "\\u202e<img src=x" in looks.text()
        looks.has_no_markup_of_others()
        page.goto(f"{file.as_uri()}#/runs/r/triage")
        looks.shows()
        assert "500 from" in looks.text()
        asked = [url for url in looks.requests if not url.startswith(("file:", "blob:", "data:"))]
        assert not asked, asked
        assert not looks.complaints


def test_a_site_has_every_screenshot_and_a_file_only_what_has_room(
    finished: tuple[Fleet, Dashboard], browser: Browser
) -> None:
    fleet, _ = finished
    fleet.say("report", "r", "--format", "site", "-o", "site")
    with looker(browser, None, PHONE, "dark") as looks:
        looks.page.goto(f"{(fleet.folder / 'site/index.html').as_uri()}#/runs/r/tasks/seen?step=1")
        looks.shows()
        expect(looks.page.locator(".shot img")).to_be_visible()
        assert not looks.complaints
    assert len(list((fleet.folder / "site/images").iterdir())) == 4 + 3 - 2, "what is no image is none"
    none = fleet.say("report", "r", "--format", "html", "--screens", "none", "-o", "n.html")
    assert "without" not in none
    assert b'id="image-' not in (fleet.folder / "n.html").read_bytes()
    fleet("report", "r", "--format", "html", "--screens", "some").refused("none, last or all")
    fleet("report", "r", "--format", "html", "--most-mb", "0").refused("0.5")
    fleet("report", "r", "--screens", "all").refused("html and site")


def test_a_report_has_no_path_and_no_host_of_this_computer(tmp_path: Path) -> None:
    fleet = Fleet.at(tmp_path / "f")
    fleet.bench([task("a", "gate 1; score 1")], steps="traj.jsonl")
    run = fleet.start_run("--workers", "1")
    fleet.started("a.0")
    fleet.say("set", "r", "--workers", "0", "--reason", "to look")
    fleet.say("set", "r", "--workers", "1")
    fleet.say("drain", "r", "worker-1", "--reason", "a reboot")
    fleet.open_gate("1")
    run.finish()
    fleet.say("report", "r", "--format", "html", "-o", "r.html")
    fleet.say("report", "r", "-o", "r.md")
    block = re.search(rb'id="data">([^<]+)<', (fleet.folder / "r.html").read_bytes())
    assert block is not None
    documents = gzip.decompress(base64.b64decode(block[1])).decode()
    for text in (documents, (fleet.folder / "r.md").read_text()):
        assert f"paused by {getpass.getuser()}: to look" in text
        assert text.count(f"drained by {getpass.getuser()}: a reboot") > 1, "of the run, and of the machine"
        assert f"@{socket.gethostname()}" not in text
        assert str(tmp_path) not in text
    assert "attempt 'a.0' left no traj.jsonl" in documents


SECTIONS = (
    "Timeline",
    "Domains",
    "What broke",
    "Money",
    "Slowest and flakiest",
    "Machines",
    "Method",
    "Tasks",
)
CONTROLS = ("search", "all domains", "newest", "triage", "compare with", "all 45", "zoom", "wheel")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_of_a_report_is_on_paper_and_no_control_is(
    tmp_path: Path, browser: Browser, scheme: Scheme
) -> None:
    """Of 154 tasks on 45 machines: what is left out is said, and heads of tables are on every sheet."""
    fleet = Fleet.at(tmp_path / "f")
    make_wide_run(fleet.home, tasks=154, machines=45)
    fleet.say("report", "wide", "--format", "html", "-o", "wide.html")
    with looker(browser, None, scheme=scheme) as looks:
        page = looks.page
        page.goto(f"{(fleet.folder / 'wide.html').as_uri()}#/runs/wide")
        looks.shows()
        page.set_viewport_size({"width": 1440, "height": 900})
        cut = "(table) => table.scrollWidth - table.clientWidth"
        assert page.locator(".panel:has(#domains-head) .scroll-x").evaluate(cut) <= 0
        printed = sheets(page.pdf(format="A4"))
        words = "".join(printed)
        for section in SECTIONS:
            assert section.replace(" ", "") in words, section
        for control in CONTROLS:
            assert control.replace(" ", "") not in words, control
        tasks = [f"task_{n:03d}" for n in range(154)]
        assert [task for task in tasks if f"{task}domain_" not in words] == []
        assert "5moremachinesarenotprinted" in words
        assert "30of45rowsareprinted" in words
        rows = [sheet for sheet in printed if any(f"{task}domain_" in sheet for task in tasks)]
        assert len(rows) > 2
        assert all("taskdomainoutcomescore" in sheet for sheet in rows)
        first = printed[0]
        assert "evalfleetmade" in first, "when it was made, and by what"
        assert "UTC)" in first, "a time without its day says nothing on paper"
        page.emulate_media(media="print", color_scheme=scheme)
        assert (
            page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
            == "rgb(255, 255, 255)"
        )
        assert page.evaluate("getComputedStyle(document.querySelector('main')).color") == "rgb(0, 0, 0)"
        controls = page.locator("main input, main select, .chip, .panel > button, .buttons, .top button")
        assert controls.filter(visible=True).count() == 0
        assert not looks.complaints


def test_modules_are_linked_in_the_order_in_which_they_need_each_other() -> None:
    script = linked("app.js")
    assert script.index('modules["vendor/preact.js"] =') < script.index('modules["base.js"] =')
    assert script.index('modules["base.js"] =') < script.index('modules["app.js"] =')
    assert "\nimport " not in script
    assert "\nexport " not in script
