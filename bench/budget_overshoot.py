"""How far spending passes a budget of machines and models when controllers, meters and machines fail.

Simulated, seed after seed (`sim.models`); and on this computer, with real meters before a stand-in
for the models' APIs, where the controller is killed again and again.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from urllib.request import urlopen

from sim.checks import violations
from sim.models import Overshoot, overshoot, simulate_metered

from .recovery import kill
from .result import Figures, Result, at_most, rounded
from .workspace import EVALFLEET, ROOT, Workspace, wait_until

SEEDS, QUICK_SEEDS = 1_000, 5
KILLS, WORKERS, TASKS = 8, 4, 40
BUDGET_USD = 0.08
PRICES = {"in": 2, "cached": 1, "cache_write": 3, "out": 8}
KEY = "sk-real-key-of-the-stand-in"
LIMIT_S = 300.0
AGENT = """
import json, os, urllib.request
body = json.dumps({"model": "any", "messages": [{"role": "user", "content": "say words"}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
for _ in range(6):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request).read()
"""


def run(quick: bool) -> Result:
    simulated = _simulated(QUICK_SEEDS if quick else SEEDS)
    real = _real(2 if quick else KILLS)
    aims = {
        "seeds_over_by_more_than_calls_in_flight": at_most(simulated["violations"], 0),
        "real_over_by_more_than_calls_in_flight_usd": at_most(real["beyond_calls_in_flight_usd"], 0),
        "real_unaccounted_usd": at_most(real["unaccounted_usd"], 0),
        "left_behind": at_most(real["left_behind"], 0),
    }
    return Result("budget-overshoot", {"simulated": simulated, "real": real}, aims)


def _simulated(seeds: int) -> Figures:
    passed: list[Overshoot] = []
    crashes = calls = refused = wrong = others = 0
    spent = 0.0
    for seed in range(seeds):
        sim = simulate_metered(seed)
        found = overshoot(sim)
        wrong += any(found.violations())
        others += bool(violations(sim))
        crashes += sim.crashes
        refused += any(
            attempt.metered.refused for attempt in sim.state.attempts.values() if attempt.metered is not None
        )
        calls += sim.state.spend.calls
        spent += sim.state.spend.models.spent
        passed += [found] if found.over_usd else []
    return {
        "seeds": seeds,
        "violations": wrong,
        "seeds_with_other_violations": others,
        "crashes": crashes,
        "calls": calls,
        "model_usd": rounded(spent),
        "seeds_refused": refused,
        "seeds_over": len(passed),
        "most_over_usd": rounded(max((each.over_usd for each in passed), default=0.0)),
        "calls_in_flight_then_usd": rounded(
            max(passed, key=lambda each: each.over_usd).in_flight_usd if passed else 0.0
        ),
    }


def _real(kills: int) -> Figures:
    rng = random.Random("budget")
    with Workspace() as space:
        url = _models(space)
        (space.folder / ".env").write_text(f"OPENAI_API_KEY={KEY}\n")
        (space.folder / ".env").chmod(0o600)
        prices = ", ".join(f"{kind} = {usd}" for kind, usd in PRICES.items())
        (space.folder / "evalfleet.toml").write_text(
            f'[model]\nkey = "OPENAI_API_KEY"\nupstream = "{url}"\n[model.prices]\nany = {{{prices}}}\n'
        )
        tasks = [{"id": f"t_{n}"} for n in range(TASKS)]
        path = space.benchmark([sys.executable, "-c", AGENT], tasks)
        with path.open("a") as file:
            file.write('secrets = ["OPENAI_API_KEY"]\n')
        words = ("--workers", str(WORKERS), "--name", "run", "--budget", str(BUDGET_USD))
        process = space.start(*EVALFLEET, "run", str(path), *words)
        wait_until(lambda: (space.home / "run").exists(), 60.0)
        done = 0
        while done < kills and process.poll() is None:
            time.sleep(rng.uniform(0.5, 3.0))
            if process.poll() is None:
                kill(process)
                done += 1
                process = space.start(*EVALFLEET, "resume", "run")
        process.wait(LIMIT_S)
        results = json.loads((space.home / "run/results.json").read_text())
        return {"kills": done, "exit_code": process.returncode, **_passed(url, results), **_left(space)}


def _left(space: Workspace) -> Figures:
    return {"left_behind": len(space.left_behind())}


def _models(space: Workspace) -> str:
    process = subprocess.Popen(
        (sys.executable, "-m", "standins.models"), cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True
    )
    space.adopt(process)
    assert process.stdout is not None
    address = next(line for line in process.stdout if b"OPENAI_BASE_URL=" in line)
    return address.decode().strip().partition("=")[2].removesuffix("/v1")


def _passed(url: str, results: Figures) -> Figures:
    """What the stand-in served beside the budget and beside what the run accounts for."""
    with urlopen(f"{url}/served") as answer:
        served: Figures = json.load(answer)
    tokens = served["tokens"]
    plain = tokens["in"] - tokens.get("cached", 0) - tokens.get("cache_write", 0)
    usd = (
        plain * PRICES["in"] + sum(tokens.get(kind, 0) * PRICES[kind] for kind in PRICES if kind != "in")
    ) / 1e6
    a_call = usd / served["calls"]
    models = results["models"]
    known = models["usd"] + models["unknown_usd"] + models["lost_usd"]
    over = max(0.0, usd - BUDGET_USD)
    return {
        "calls": served["calls"],
        "served_usd": rounded(usd),
        "budget_usd": BUDGET_USD,
        "over_usd": rounded(over),
        "calls_in_flight_usd": rounded(WORKERS * a_call),
        "beyond_calls_in_flight_usd": rounded(max(0.0, over - WORKERS * a_call)),
        "unaccounted_usd": rounded(max(0.0, usd - known - 1e-6)),
        "scored": results["scored"],
        "unrun": results["unrun"],
    }
