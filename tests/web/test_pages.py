"""The dashboard's pages in a real browser: of runs that are over, and of one that goes on."""

from __future__ import annotations

import base64
import re
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Locator, Page, Route, expect

import evalfleet.web
from evalfleet.events import AttemptCollected, RunSteered
from evalfleet.web.files import image_size, image_type
from tests.e2e.dashboard import Dashboard, dashboard
from tests.e2e.harness import Fleet, task
from tests.large_run import damage, make_large_run, make_wide_run
from tests.waiting import until
from tests.web.looking import (
    DESKTOP,
    MARKUP,
    NASTY,
    PHONE,
    WIDE,
    Scheme,
    Wire,
    looker,
    png,
)

CLIENT = Path(evalfleet.web.__file__).parent / "client"
TASK = f"/runs/r/tasks/{quote(NASTY, safe='')}"
CUT = "(tables) => tables.map((table) => table.scrollWidth - table.clientWidth)"
PAGES = (
    "/",
    "/runs/r",
    f"{TASK}?step=1",
    "/runs/r/tasks/flaky",
    "/runs/r/triage",
    "/runs/r/wall",
    "/runs/r/machines/worker-1",
    "/compare?a=r&b=s",
    "/pools",
    "/machines",
    "/money",
)


@pytest.fixture
def live(tmp_path: Path, browser: Browser) -> Iterator[Fleet]:
    fleet = Fleet.at(tmp_path / "f")
    first = f"echo begun; {shown(fleet, 1, 640)}; gate 1; {shown(fleet, 2, 320)}; gate 2; score 1"
    fleet.bench(
        [task("a", first), task("b", "gate 3; score 0"), task("c", "gate 4; score 1")], steps="t.jsonl"
    )
    yield fleet
    fleet.sweep()


def shown(fleet: Fleet, n: int, width: int) -> str:
    """Makes a step with a screenshot of that width."""
    (fleet.folder / f"{n}.png").write_bytes(png(width, 200))
    step = f'{{"n": {n}, "action": "look", "screenshot": "{n}.png"}}'
    return f"cp {fleet.folder}/{n}.png $EVALFLEET_OUT; echo '{step}' >> $EVALFLEET_OUT/t.jsonl"


def test_no_module_of_ours_makes_markup_of_text() -> None:
    makers = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc"
    )
    own = [path for path in CLIENT.rglob("*.js") if "vendor" not in path.parts]
    assert len(own) > 10
    assert not [path.name for path in own if makers.search(path.read_text("utf-8"))]


def test_what_is_vendored_is_named_with_its_version_and_licence() -> None:
    told = (CLIENT / "vendor" / "README.md").read_text("utf-8")
    for file in (CLIENT / "vendor").iterdir():
        assert file.name == "README.md" or f"`{file.name}`" in told, file
    assert re.search(r"preact.*\d+\.\d+\.\d+.*MIT", told)


# -- runs that are over ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "scheme", "axed"),
    [(DESKTOP, "light", True), (PHONE, "dark", True), (WIDE, "light", False)],
    ids=["desktop", "phone in the dark", "wide"],
)
def test_every_page_is_drawn_whole_and_for_everybody(
    finished: tuple[Fleet, Dashboard], browser: Browser, size: tuple[int, int], scheme: Scheme, axed: bool
) -> None:
    with looker(browser, finished[1], size, scheme) as looks:
        for path in PAGES:
            page = looks.go(path)
            over = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert over <= 0, f"{path} is {over} pixels too wide"
            if path == "/money":
                tables = page.locator(".scroll-x").evaluate_all(CUT)
                assert max(tables) <= 0, tables
            looks.has_no_markup_of_others()
            if axed:
                found = Axe().run(page)
                assert not found.violations_count, f"{path}: {found.generate_report()}"
            assert not [each for each in looks.complaints if "404" not in each], (path, looks.complaints)


def test_nothing_that_an_agent_wrote_is_markup(finished: tuple[Fleet, Dashboard], browser: Browser) -> None:
    with looker(browser, finished[1]) as looks:
        page = looks.go("/runs/r")
        assert MARKUP in looks.text()
        page.goto(f"{page.url.split('/runs')[0]}{TASK}?step=1")
        looks.shows()
        expect(page.locator(".log-panel pre")).to_contain_text("<script>alert(1)</script>")
        log = page.locator(".log-panel pre").inner_text()
        assert "\\u202e" in log, "what turns text around is seen"
        assert "\x1b" not in log
        assert len(log) < 20_000, "a line of a megabyte is cut"
        assert "<b>click</b> \\u202e" in looks.text()
        expect(page.locator(".shot img")).to_be_visible()
        expect(page.locator(".shot svg.action")).to_have_count(1)
        for step in (2, 3, 4):  # no image, one of 60,000 pixels a side, one that is cut off
            page.get_by_role("button", name=f"step {step}", exact=True).click()
            if step < 4:
                expect(page.locator(".shot .no-picture")).to_contain_text("cannot be shown")
            expect(page.locator(".replay-bar")).to_contain_text(f"step {step} of 4")
            expect(page.locator(".shot svg.action")).to_have_count(0)
        assert '<b>"q".html' in looks.text()
        assert "<script>alert(2)</script>" in looks.text()
        looks.has_no_markup_of_others()
        assert not [each for each in looks.complaints if "Failed to load resource" not in each]


def test_a_panel_that_fails_leaves_the_others_and_an_agent_forges_no_calls(
    finished: tuple[Fleet, Dashboard], browser: Browser
) -> None:
    with looker(browser, finished[1]) as looks:
        page = looks.go(TASK)
        calls, result = (page.locator(f".panel:has(#{name}-head)") for name in ("calls", "result"))
        expect(calls).to_contain_text("No model calls were metered.")
        expect(page.locator(".panel:has(#files-head)")).to_contain_text("calls.jsonl")

        def spoil(route: Route) -> None:
            answer = route.fetch()
            route.fulfill(response=answer, json={**answer.json(), "calls": [{"model": "m", "usd": "1"}]})

        page.route(re.compile(r"/attempts/[^/]+$"), spoil)
        page.reload()
        expect(calls).to_contain_text("This part cannot be shown")
        expect(result).to_contain_text("<b>key</b>")


def test_the_figures_of_a_page_are_those_of_show(finished: tuple[Fleet, Dashboard], browser: Browser) -> None:
    fleet, opened = finished
    results = fleet.results()
    with looker(browser, opened) as looks:
        looks.go("/runs/r")
        text = looks.text()
        assert f"success {100 * results['success_rate']:.1f}%" in text
        assert f"broken {results['broken']} retries {results['retries']} took" in text
        assert "models – began" in text, "what is unknown is not 0"
        for name, n in (("pass", results["succeeded"]), ("fail", results["failed"]), ("broken", 2)):
            expect(looks.page.locator(f".filters .chip:has-text('{name}')")).to_contain_text(str(n))


def test_everything_can_be_done_from_the_keyboard_and_has_an_address(
    finished: tuple[Fleet, Dashboard], browser: Browser
) -> None:
    with looker(browser, finished[1]) as looks:
        page = looks.go("/")
        press(page, "j", "j", "Enter")
        page.wait_for_url("**/runs/r")
        looks.shows()
        press(page, "/")
        page.keyboard.type("flak")
        press(page, "Escape", "j")
        expect(page).to_have_url(re.compile("text=flak&task=flaky$"))
        page.reload()
        looks.shows()
        expect(page.locator(".grid-body .grid-row.selected")).to_contain_text("flaky")
        press(page, "j", "Enter")
        page.wait_for_url("**/runs/r/tasks/flaky")
        expect(page.locator(".verdict")).to_contain_text("attempt 2 of 2")
        press(page, "[")
        page.wait_for_url("**attempt=0")
        expect(page.locator(".verdict")).to_contain_text("attempt 1 of 2")
        looks.go("/runs/r/tasks/zero")
        expect(page.locator(".replay-bar")).to_contain_text("step 1 of 1")
        looks.go("/runs/r/tasks/seen")
        expect(page.locator(".replay-bar")).to_contain_text("step 3 of 3")
        press(page, "ArrowLeft")
        page.wait_for_url("**step=2")
        expect(page.locator(".action-text")).to_contain_text("click (200, 50)")
        press(page, "Home")
        page.wait_for_url("**step=1")
        press(page, " ")
        page.wait_for_url("**step=3")
        press(page, "?")
        expect(page.get_by_role("dialog")).to_be_visible()
        press(page, "Escape")
        expect(page.get_by_role("dialog")).to_have_count(0)
        page.go_back()
        assert not looks.complaints


def test_failures_that_are_one_and_tasks_that_flipped_lead_to_their_replays(
    finished: tuple[Fleet, Dashboard], browser: Browser
) -> None:
    with looker(browser, finished[1]) as looks:
        page = looks.go("/runs/r/triage")
        group = page.locator(".group", has_text="500 from")
        group.first.locator("button").click()
        expect(group.first.locator(".attempts a").first).to_be_visible()
        group.first.locator("p a").click()
        page.wait_for_url("**/runs/r?group=*")
        expect(page.locator(".grid-body .grid-row")).to_have_count(2)
        page.go_back()
        group.first.locator(".attempts a").first.click()
        page.wait_for_url("**attempt=*")
        page.get_by_role("button", name="compare with").click()
        page.get_by_label("beside it").select_option("attempt 2")
        page.wait_for_url("**beside=1")
        expect(page.locator(".side pre")).to_contain_text(["500 from", "500 from"])
        looks.go("/runs/r/tasks/seen?step=2")
        page.get_by_role("button", name="compare with").click()
        page.get_by_label("beside it").select_option("s")
        page.wait_for_url("**with=s")
        expect(page.locator(".side .shot img")).to_have_count(2)
        press(page, "ArrowRight")
        page.wait_for_url("**step=2**")
        expect(page.locator(".side .action-text")).to_have_text(["click (200, 50)", "click (200, 50)"])
        looks.go("/compare?a=r&b=s")
        assert "Tasks that flipped 1" in looks.text()
        press(page, "j")
        page.wait_for_url("**task=flips")
        sides = page.locator(".side-by-side .side")
        expect(sides).to_have_count(2)
        sides.nth(1).locator("h3 a").click()
        page.wait_for_url("**/runs/s/tasks/flips")


@pytest.mark.parametrize("size", [PHONE, DESKTOP, WIDE], ids=["phone", "desktop", "wide"])
def test_an_action_is_drawn_where_it_happened(
    finished: tuple[Fleet, Dashboard], browser: Browser, size: tuple[int, int]
) -> None:
    with looker(browser, finished[1], size) as looks:
        page = looks.go("/runs/r/tasks/seen?step=2")
        expect(page.locator(".shot svg.action")).to_have_count(1)
        box, ring = (page.locator(f".shot {each}").first.bounding_box() for each in ("img", "svg circle"))
        assert box is not None
        assert ring is not None
        scale = min(box["width"] / 640, box["height"] / 400)  # the picture is in the middle of its box
        left, top = (box["width"] - 640 * scale) / 2, (box["height"] - 400 * scale) / 2
        middle = ring["x"] + ring["width"] / 2 - box["x"], ring["y"] + ring["height"] / 2 - box["y"]
        assert middle == pytest.approx((left + 200 * scale, top + 50 * scale), abs=2)


def test_the_timeline_zooms_and_leads_to_attempts(
    finished: tuple[Fleet, Dashboard], browser: Browser
) -> None:
    with looker(browser, finished[1]) as looks:
        page = looks.go("/runs/r")
        canvas = page.locator(".timeline canvas")
        canvas.focus()
        press(page, "+")
        page.wait_for_url("**from=*to=*")
        press(page, "0")
        page.wait_for_url(re.compile(r"/runs/r$"))
        box = canvas.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + 300, box["y"] + 5)
        page.mouse.down()
        page.mouse.move(box["x"] + 600, box["y"] + 5, steps=3)
        page.mouse.up()
        page.wait_for_url("**from=*to=*")
        page.mouse.click(box["x"] + 5, box["y"] + 8)
        page.wait_for_url("**/machines/*")


def test_the_first_load_is_small(finished: tuple[Fleet, Dashboard], browser: Browser) -> None:
    with looker(browser, finished[1]) as looks:
        sizes: list[int] = []
        looks.page.on("response", lambda answer: sizes.append(len(answer.body())) if answer.ok else None)
        looks.go("/")
        assert 50_000 < sum(sizes) < 250_000, "what they are unpacked; compressed a third of it"
        assert not any("uplot" in url for url in looks.requests), (
            "what only charts need comes with the first one"
        )


def test_the_way_back_leads_to_where_the_reader_was_and_everything_opens(
    tmp_path: Path, browser: Browser
) -> None:
    fleet = Fleet.at(tmp_path / "f")
    fleet.bench([task("..", "cd $EVALFLEET_OUT; touch f{001..520}; score 1")])
    fleet.run("--workers", "1")
    make_wide_run(fleet.home, tasks=154, machines=45)
    opened = dashboard(fleet)
    with looker(browser, opened) as looks:
        page = looks.go("/runs/wide")
        table = page.locator(".grid")
        table.evaluate("(table) => (table.scrollTop = 2000)")
        page.locator(".grid-body a", has_text="task_070").scroll_into_view_if_needed()
        before = page.evaluate("[scrollY, document.querySelector('.grid').scrollTop]")
        assert min(before) > 500
        page.locator(".grid-body a", has_text="task_070").click()
        expect(page.locator(".verdict")).to_be_visible()
        page.wait_for_timeout(6000)  # what was loaded of the run is forgotten meanwhile
        page.go_back()
        expect(page.locator(".grid-body a", has_text="task_070")).to_be_in_viewport()
        assert page.evaluate("[scrollY, document.querySelector('.grid').scrollTop]") == before
        go(page, "/runs/r")
        page.locator(".grid-body a", has_text="..").click()
        expect(page.locator(".verdict")).to_contain_text("pass")
        expect(page.locator(".files")).not_to_contain_text("f520")
        page.get_by_role("button", name="all 522").click()
        expect(page.locator(".files")).to_contain_text("f520")
        page.reload()
        expect(page.locator(".verdict")).to_contain_text("pass")
        assert not looks.complaints
    opened.process.interrupt()
    opened.process.wait()
    fleet.sweep()


def test_all_of_a_long_log_is_shown_and_searched(tmp_path: Path, browser: Browser) -> None:
    fleet = Fleet.at(tmp_path / "f")
    fleet.bench([task("a", "seq -f 'line %.0f' 100000; score 1")])
    fleet.run("--workers", "1")
    opened = dashboard(fleet)
    with looker(browser, opened) as looks:
        page = looks.go("/runs/r/tasks/a")
        log = page.locator(".log-panel pre")
        expect(log).to_contain_text("line 100000")
        expect(log).to_contain_text(re.compile(r"^line 97001\n"))
        page.get_by_role("button", name="earlier").click()
        expect(log).to_contain_text(re.compile(r"^line 94001\n[^$]*line 97000\n+$"))
        page.get_by_role("button", name="start").click()
        expect(log).to_contain_text(re.compile(r"^line 1\n[^$]*line 3000\n+$"))
        page.get_by_label("search the log").fill("LINE 5432")
        expect(log).to_contain_text(re.compile(r"^line 5432\nline 54320\n"))
        expect(log).to_contain_text("11 lines")
        log.get_by_role("button", name="line 54321").click()
        expect(log).to_contain_text(re.compile(r"^line 54321\n"))
        page.get_by_role("button", name="end", exact=True).click()
        expect(log).to_contain_text("line 100000")
        assert not looks.complaints
    opened.process.interrupt()
    opened.process.wait()
    fleet.sweep()


@pytest.mark.parametrize("quality", [0.5, 1.0], ids=["lossy", "lossless"])
def test_a_webp_image_of_a_browser_is_measured(browser: Browser, quality: float) -> None:
    with looker(browser) as looks:
        url = looks.page.evaluate(
            """(quality) => {
              const canvas = Object.assign(document.createElement("canvas"), { width: 301, height: 203 });
              canvas.getContext("2d", { alpha: false }).fillRect(0, 0, 9, 9);
              return canvas.toDataURL("image/webp", quality);
            }""",
            quality,
        )
    data = base64.b64decode(url.partition("base64,")[2])
    inner = data[data.index(b"VP8 " if quality < 1 else b"VP8L") :]
    plain = b"RIFF" + struct.pack("<I", 4 + len(inner)) + b"WEBP" + inner
    for image in (data, plain):  # with a profile of colours, and without
        assert image_type(image) == "image/webp"
        assert image_size(image, "image/webp") == (301, 203)


# -- runs that go on ---------------------------------------------------------------------------------


def test_a_page_follows_its_run_through_cuts_a_new_server_and_a_new_controller(
    live: Fleet, browser: Browser
) -> None:
    run = live.start_run("--workers", "3")
    live.started("a.0", "b.0", "c.0")
    opened = dashboard(live)
    wire = Wire(opened.port)
    with looker(browser, opened) as looks:
        page = looks.go("/runs/r", wire.port)
        dot = page.locator(".head .dot-box")
        expect(dot).to_have_text("live")
        expect(chip(page, "running")).to_contain_text("3")
        # somebody looks at the log of an attempt that runs, and at the wall
        go(page, "/runs/r/tasks/a")
        expect(page.locator(".log-panel pre")).to_contain_text("begun")
        go(page, "/runs/r/wall")
        screen = (
            "(width) => [...document.querySelectorAll('.wall img')].some((i) => i.naturalWidth === width)"
        )
        page.wait_for_function(screen, arg=640)
        live.open_gate("1")
        page.wait_for_function(screen, arg=320)
        go(page, "/runs/r")
        # the wire is cut while the server lives: what was missed is asked for by the last event's number
        expect(dot).to_have_text("live")
        wire.asked.clear()
        wire.cut()
        expect(dot).to_contain_text("disconnected")
        live.open_gate("2")
        until(lambda: live.recorded(AttemptCollected), "the end of a task")
        wire.mend()
        expect(chip(page, "pass")).to_contain_text("1")
        expect(dot).to_have_text("live")
        asked = b"".join(wire.asked)
        assert re.search(rb"(?i)last-event-id: [0-9]", asked), asked
        assert b"GET /api/runs/r HTTP" not in asked, "all of it was asked for again"
        # the server goes, and another one comes in its place
        opened.process.kill()
        expect(dot).to_contain_text("disconnected")
        # meanwhile the run loses its controller, and another of its tasks ends
        run.kill()
        live.open_gate("3")
        again = live.start("serve", "--port", str(opened.port))
        expect(dot).to_have_text("nobody works on it")
        # somebody takes it over
        resumed = live.start("resume", "r")
        expect(dot).to_have_text("live")
        expect(chip(page, "fail")).to_contain_text("1")
        live.open_gate("4")
        resumed.wait()
        expect(dot).to_have_text("over")
        expect(page.locator(".figures")).to_contain_text("3 of 3")
        live.say("gc", "r", "--yes")
        expect(page.locator(".problem")).to_contain_text("removed")
        again.interrupt()
        again.wait()
    wire.close()


def test_the_wall_shows_every_machine_as_it_was_less_than_ten_seconds_ago(
    live: Fleet, browser: Browser
) -> None:
    """On a computer that is used by others, too, one of three rounds may count: a wall that looks too seldom
    is late in each. An image that did not come is asked for again."""
    rounds = {1: 101, 2: 202, 3: 303}
    steps = "".join(f"gate {n}; {shown(live, n, width)}; " for n, width in rounds.items())
    live.bench([task(name, f"{steps} gate end; score 1") for name in ("a", "b", "c")], steps="t.jsonl")
    run = live.start_run("--workers", "3")
    live.started("a.0", "b.0", "c.0")
    opened = dashboard(live)
    late: list[float] = []
    with looker(browser, opened, PHONE) as looks:
        page = looks.go("/runs/r/wall")
        expect(page.locator(".wall .no-picture", has_text="cannot be shown")).to_have_count(3)
        lost: list[str] = []

        def lose_the_first(route: Route) -> None:
            if lost:
                return route.fallback()
            lost.append(route.request.url)
            route.abort()

        page.route(re.compile(r"/screen\?at="), lose_the_first)
        shows_all = (
            "(width) => [...document.querySelectorAll('.wall img')]"
            ".filter((image) => image.naturalWidth === width).length === 3"
        )
        for n, width in rounds.items():
            begun = time.monotonic()
            live.open_gate(str(n))
            page.wait_for_function(shows_all, arg=width)
            late.append(time.monotonic() - begun)
            if late[-1] < 10:
                break
        expect(page.locator(".wall li").first).to_contain_text("old")
        live.open_gate(*map(str, rounds), "end")
        run.wait()
        expect(page.locator(".wall li")).to_have_count(0)
    assert lost
    assert min(late) < 10, late
    opened.process.interrupt()
    opened.process.wait()


def test_a_run_is_steered_from_its_page_and_the_journal_tells_it(live: Fleet, browser: Browser) -> None:
    run = live.start_run("--workers", "3")
    live.started("a.0", "b.0", "c.0")
    opened, shared = dashboard(live), dashboard(live, "--read-only")
    with looker(browser, shared) as looks:
        page = looks.go("/runs/r")
        expect(page.locator(".head .dot-box")).to_have_text("live")
        assert page.get_by_role("button", name="pause").count() == 0
    with looker(browser, opened) as looks:
        page = looks.go("/runs/r/machines/worker-1")
        expect(page.get_by_role("button", name="pause", exact=True)).to_be_visible()
        assert page.get_by_role("button", name="screen by VNC").count() == 0, "it has no screen"
        go(page, "/runs/r")
        ask(page, "pause", "<b>to look</b>")
        expect(page.locator(".head .tag")).to_have_text("paused")
        (steered,) = live.recorded(RunSteered)
        assert "<b>to look</b>" in str(steered)
        assert Axe().run(page).violations_count == 0
        ask(page, "unpause")
        expect(page.locator(".head .tag")).to_have_count(0)
        ask(page, "pause")
        expect(page.locator(".head .tag")).to_have_text("paused")
        ask(page, "drain")
        ask(page, "cancel")
        run.wait()
        # what was waiting when the run ended is called so nowhere, and the filter finds what it counts
        unrun = chip(page, "unrun")
        expect(unrun).to_contain_text("3")
        unrun.click()
        expect(page.locator(".grid-body .grid-row")).to_have_count(3)
        expect(chip(page, "waiting")).to_have_count(0)
        expect(page.locator(".bar").first).to_have_attribute("title", "3 unrun")
    for each in (opened, shared):
        each.process.interrupt()
        each.process.wait()


def test_damage_to_a_runs_journal_is_shown(tmp_path: Path, browser: Browser) -> None:
    fleet = Fleet.at(tmp_path / "f")
    make_large_run(fleet.home)
    damage(fleet.home)
    opened = dashboard(fleet)
    with looker(browser, opened) as looks:
        looks.go("/runs/r")
        problem = looks.page.locator(".problem")
        expect(problem).to_contain_text("event 5000 of 'r' is not as it was written")
    opened.process.interrupt()
    opened.process.wait()
    fleet.sweep()


def go(page: Page, path: str) -> None:
    """To another page of the same client, as by a link: nothing is loaded anew."""
    page.evaluate(
        "(path) => { const a = document.createElement('a'); a.href = path; "
        "document.body.append(a); a.click(); a.remove(); }",
        path,
    )


def chip(page: Page, name: str) -> Locator:
    return page.locator(".filters .chip", has_text=name)


def ask(page: Page, verb: str, why: str = "") -> None:
    """Press a button of the run, type a reason if there is one, and confirm."""
    page.get_by_role("button", name=verb, exact=True).click()
    asked = page.get_by_role("dialog")
    expect(asked).to_contain_text(f"{verb} r?")
    if why:
        asked.get_by_role("textbox").fill(why)
    asked.get_by_role("button", name=f"{verb} r").click()
    expect(asked).to_have_count(0)


def press(page: Page, *names: str) -> None:
    """Each key when what the one before did is on the page."""
    for name in names:
        page.keyboard.press(name)
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 30)))")
