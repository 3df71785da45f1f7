"""The demo's task files are sound, and its agents decide what their rules say."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import struct
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import evalfleet.demo

DEMO = Path(evalfleet.demo.__file__).parent
KITS = ("miniwob", "babyai")


def load(name: str) -> Any:
    """An agent's policy: a script on its machine, not a module of the package."""
    path = DEMO / name / f"{name}_policy.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where its dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


web = load("miniwob")
grid = load("babyai")


def tasks(kit: str) -> list[dict[str, Any]]:
    lines = (DEMO / kit / "tasks.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("kit", KITS)
def test_tasks_are_many_and_have_unique_safe_ids(kit: str) -> None:
    ids = [task["id"] for task in tasks(kit)]
    assert len(ids) >= 100
    assert len({name.lower() for name in ids}) == len(ids)  # some file systems do not tell cases apart
    assert all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name) for name in ids)


@pytest.mark.parametrize("kit", KITS)
def test_tasks_have_domains_seeds_and_time_limits(kit: str) -> None:
    for task in tasks(kit):
        assert set(task) == {"id", "domain", "params", "timeout_s"}
        assert 10 <= task["timeout_s"] <= 120
        assert isinstance(task["params"]["seed"], int)
    assert 4 <= len({task["domain"] for task in tasks(kit)}) <= 10


@pytest.mark.parametrize("kit", KITS)
def test_benchmark_names_files_that_exist_and_packages_that_are_pinned(kit: str) -> None:
    text = (DEMO / kit / "benchmark.toml").read_text(encoding="utf-8")
    benchmark = tomllib.loads(text.replace("@PYTHON@", '"python"').replace("@BROWSER@", '"browser"'))
    assert benchmark["name"] == kit
    assert sorted(benchmark["files"]) == sorted(path.name for path in (DEMO / kit).glob("*.py"))
    assert set(benchmark["command"]) & set(benchmark["files"])
    pins = (DEMO / kit / "requirements.txt").read_text(encoding="utf-8").split()
    assert pins
    assert all(re.fullmatch(r"[\w-]+==[\d.]+", pin) for pin in pins)


def page(*nodes: dict[str, Any]) -> list[Any]:
    """Elements as the benchmark's `core.getDOMInfo()` describes them, one below the other."""
    size = {"left": 0, "width": 40, "height": 10}
    boxes = [{**size, "top": 20 * n, "children": [], "ref": n + 2, **node} for n, node in enumerate(nodes)]
    return list(web.elements_of({**size, "tag": "BODY", "top": 0, "ref": 1, "children": boxes}))


def play(instruction: str, elements: list[Any]) -> list[str]:
    """What the agent does on a page that does not change."""
    done: set[str] = set()
    said = []
    while action := web.decide(web.View(instruction, elements, frozenset(done))):
        done.add(action.target.key)
        name = action.target.ident or action.target.text
        said.append(f"type {action.text}" if isinstance(action, web.Type) else f"click {name}")
    return said


def test_click_the_named_button() -> None:
    elements = page({"tag": "BUTTON", "text": "no"}, {"tag": "BUTTON", "text": "Ok"})
    action = web.decide(web.View('Click on the "Ok" button.', elements))
    assert isinstance(action, web.Click)
    assert (action.target.text, action.target.x, action.target.y) == ("Ok", 20, 25)


def test_fill_fields_in_order_and_submit() -> None:
    elements = page(
        {"tag": "INPUT_text", "id": "username", "value": ""},
        {"tag": "INPUT_password", "id": "password", "value": ""},
        {"tag": "BUTTON", "text": "Login"},
    )
    said = play(
        'Enter the username "ann" and the password "US" into the text fields and press login.', elements
    )
    assert said[:2] == ["type ann", "type US"]
    assert said[-1] == "click Login"


def test_tick_a_box_once_and_leave_its_label_alone() -> None:
    def box(name: str, ref: int) -> dict[str, Any]:
        place = {"left": 0, "top": ref, "width": 9, "height": 9, "children": []}
        tick = {"tag": "INPUT_checkbox", "id": f"box-{name}", "ref": ref, "value": False, **place}
        return {
            "tag": "LABEL",
            "ref": ref + 1,
            "children": [tick, {"tag": "t", "text": name, "ref": -ref, **place}],
        }

    elements = page(box("abc", 10), box("xyz", 20), {"tag": "BUTTON", "text": "Submit"})
    assert play("Select xyz and click Submit.", elements) == ["click box-xyz", "click Submit"]


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("Select a1, b2 and click Submit.", ["a1", "b2"]),
        ("Select nothing and click Submit.", []),
        ("Click button ONE, then click button TWO.", ["ONE", "TWO"]),
        ("Click on Tab #2.", ["Tab #2"]),
        ("Click on the grid coordinate (-2,1).", ["(-2,1)"]),
        ('Click on the link "nam".', ["nam"]),
    ],
)
def test_names_in_an_instruction(instruction: str, expected: list[str]) -> None:
    assert web.names(instruction) == expected


def test_an_agent_without_an_idea_gives_up() -> None:
    assert play("Drag the circle left.", page({"tag": "circle"})) == []


def room(**things: tuple[int, int, int]) -> list[list[tuple[int, int, int]]]:
    """An empty room in view, with things at `x3y1` places."""
    return [[things.get(f"x{x}y{y}", (grid.EMPTY, 0, 0)) for y in range(7)] for x in range(7)]


@pytest.mark.parametrize(
    ("mission", "place", "move"),
    [
        ("go to the red ball", "x3y1", grid.FORWARD),
        ("go to the red ball", "x0y6", grid.LEFT),
        ("pick up the red ball", "x3y5", grid.PICKUP),
        ("go to the red ball, then open a door", "x6y6", grid.RIGHT),
    ],
)
def test_walk_up_to_what_is_named(mission: str, place: str, move: int) -> None:
    ball = (grid.KINDS["ball"], grid.COLOURS["red"], 0)
    assert grid.decide(mission, room(**{place: ball}), random.Random(1)) == move


def test_the_same_seed_wanders_the_same_way() -> None:
    def wander() -> list[int]:
        chance = random.Random(7)
        return [grid.decide("go to the red ball", room(), chance) for _ in range(50)]

    assert wander() == wander()


PAGE = """<!doctype html><body style="margin: 0"><button style="position: absolute; left: 100px; top: 50px;
width: 40px; height: 20px" onclick="WOB_DONE_GLOBAL = true; WOB_RAW_REWARD_GLOBAL = 1">Ok</button><script>
var WOB_DONE_GLOBAL = false, WOB_RAW_REWARD_GLOBAL = 0, WOB_REWARD_REASON = null;
Math.seedrandom = () => {};
const button = { tag: "BUTTON", text: "Ok", ref: 2, left: 100, top: 50, width: 40, height: 20, children: [] };
var core = {
  setDataMode() {}, startEpisodeReal() {}, cover_div: { style: {} },
  getUtterance: () => 'Click on the "Ok" button.',
  getDOMInfo: () => ({ tag: "BODY", ref: 1, left: 0, top: 0, width: 160, height: 210, children: [button] }),
};
</script>"""


def test_a_click_is_told_in_pixels_of_its_screenshot(tmp_path: Path) -> None:
    browser = os.environ.get("CHROMIUM", "/usr/bin/chromium")
    if not os.access(browser, os.X_OK):
        pytest.skip(f"there is no {browser} (Debian's chromium)")
    pages, out = tmp_path / "miniwob/html/miniwob", tmp_path / "out"
    pages.mkdir(parents=True)
    out.mkdir()
    (tmp_path / "miniwob/__init__.py").touch()
    (pages / "click.html").write_text(PAGE)
    agent = [sys.executable, str(DEMO / "miniwob/miniwob_agent.py"), str(browser)]
    told = {"EVALFLEET_PARAMS": '{"env": "click", "seed": 1}', "EVALFLEET_OUT": str(out)}
    environ = {**os.environ, **told, "PYTHONPATH": str(tmp_path)}
    subprocess.run(agent, env=environ, cwd=tmp_path, check=True, timeout=60)
    assert json.loads((out / "result.json").read_text())["num_steps"] == 1
    (step,) = map(json.loads, (out / "traj.jsonl").read_text().splitlines())
    width, height = struct.unpack(">II", (out / step["screenshot"]).read_bytes()[16:24])
    assert step["n"] == 1
    assert (step["x"] / width, step["y"] / height) == pytest.approx((120 / 330, 60 / 210))
