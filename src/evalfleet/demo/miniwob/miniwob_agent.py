"""One MiniWoB++ task: start a browser, play one episode by the rules of `miniwob_policy`, write the result.

Run by evalfleet as `PYTHON miniwob_agent.py BROWSER` in a task's own directory. The pages, their seeds and
their rewards are the benchmark's (PyPI `miniwob`, pinned by the demo); nothing of them is changed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from miniwob_browser import PIXELS, Browser, raise_on_terminate
from miniwob_policy import Action, Type, View, decide, elements_of

WIDTH, HEIGHT = 330, 210  # a MiniWoB page and the reward it displays beside itself
MAX_STEPS = 15
SETTLE_S = 0.2  # after an action
ANIMATED = "Boolean(window.jQuery && jQuery(':animated').length)"
ANIMATION_S = 2.0
LOOKS = 4  # without an idea, before giving up: some pages come late


def pages() -> Path:
    """Where the installed benchmark keeps its pages; not imported: its Python half needs a WebDriver."""
    spec = find_spec("miniwob")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            "miniwob is not installed for this interpreter: run `evalfleet demo` again to prepare it"
        )
    return Path(spec.submodule_search_locations[0], "html", "miniwob")


def begin(browser: Browser, env: str, seed: int) -> str:
    """Load the page and start the episode as the benchmark's own Python does; the instruction."""
    browser.open(pages() / f"{env}.html")
    browser.evaluate(f"Math.seedrandom({seed}); core.setDataMode('train'); core.startEpisodeReal();")
    settle(browser)
    said = browser.evaluate("core.getUtterance()")
    return str(said["utterance"] if isinstance(said, dict) else said)


def settle(browser: Browser) -> None:
    """Wait until the page has stopped moving: a click before that depends on the machine's speed."""
    time.sleep(SETTLE_S)
    deadline = time.monotonic() + ANIMATION_S
    while browser.evaluate(ANIMATED) and time.monotonic() < deadline:
        time.sleep(0.05)


def perform(browser: Browser, action: Action) -> None:
    """Do it with mouse and keyboard."""
    browser.click(action.target.x, action.target.y)
    if isinstance(action, Type):
        browser.select_all()
        browser.type(action.text)


def note(out: Path, n: int, action: str, **more: Any) -> None:
    """Append a step to the trajectory: what is done after `n` steps, and the page before it."""
    line = {"n": n + 1, "at": time.time(), "action": action, "screenshot": f"step_{n}.png", **more}
    with open(out / "traj.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def play(browser: Browser, instruction: str, out: Path) -> int:
    """Act until the page ends the episode or the agent has no idea left; the number of actions."""
    steps, ideas = 0, LOOKS
    done: set[str] = set()
    while steps < MAX_STEPS and ideas and not browser.evaluate("WOB_DONE_GLOBAL"):
        view = View(instruction, elements_of(browser.evaluate("core.getDOMInfo()")), frozenset(done))
        action = decide(view)
        if action is None:
            ideas -= 1
        else:
            what = f"type {action.text!r} into" if isinstance(action, Type) else f"click {action.why!r}:"
            target = action.target
            where = f"{target.x:.0f},{target.y:.0f}"
            print(f"step {steps + 1}: {what} <{target.tag}> at {where}", flush=True)
            if steps:
                browser.screenshot(out / f"step_{steps}.png", WIDTH, HEIGHT)
            in_picture = {"x": PIXELS * target.x, "y": PIXELS * target.y}
            note(out, steps, f"{what} <{target.tag}>", **in_picture)
            perform(browser, action)
            done.add(action.target.key)
            steps, ideas = steps + 1, LOOKS
        settle(browser)
    return steps


def run(binary: str, env: str, seed: int, out: Path) -> dict[str, Any]:
    """The whole task; its result. Leaves a screenshot of the beginning and one of the end in `out`."""
    with Browser(binary) as browser:
        instruction = begin(browser, env, seed)
        print(f"{env}, seed {seed}: {instruction}", flush=True)
        browser.screenshot(out / "step_0.png", WIDTH, HEIGHT)
        steps = play(browser, instruction, out)
        ended = browser.evaluate(
            "({done: WOB_DONE_GLOBAL, reward: WOB_RAW_REWARD_GLOBAL, reason: WOB_REWARD_REASON})"
        )
        browser.evaluate(
            "core.cover_div.style.display = 'none'"
        )  # the curtain for the next episode hides how it ended
        last = f"step_{max(steps, 1)}.png"
        browser.screenshot(out / last, WIDTH, HEIGHT)
    score = min(1.0, max(0.0, float(ended["reward"]))) if ended["done"] else 0.0
    if not ended["done"]:
        note(out, steps, "give up", ok=False)  # also where there was no idea at all: a trajectory of one line
    print(f"reward {ended['reward']}" if ended["done"] else "gave up", flush=True)
    return {
        "score": score,
        "success": score == 1.0,
        "num_steps": steps,
        "screenshots": ["step_0.png", last],
        "instruction": instruction,
        "gave_up": not ended["done"],
        "reason": ended.get("reason"),
    }


def main() -> None:
    """Read the task from the environment, play it, write `result.json` in one step."""
    raise_on_terminate()
    params = json.loads(os.environ["EVALFLEET_PARAMS"])
    out = Path(os.environ["EVALFLEET_OUT"])
    result = run(sys.argv[1], params["env"], int(params["seed"]), out)
    part = out / "result.json.part"
    part.write_text(json.dumps(result), encoding="utf-8")
    part.replace(out / "result.json")


if __name__ == "__main__":
    main()
