"""Runs of `waa` on real hosts with the stand-in: ways to end, resets, secrets, set-up that fails."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from evalfleet.events import AttemptEnded, MachineCondemned, MachinePrepared, MachineReady
from evalfleet.model import AttemptId, Broken, Cause, Scored
from evalfleet.views.progress import Progress, read_progress
from lab import NamespaceHost
from tests.lab.clients import needs_lab
from tests.waa.arena import DATA, HANG, KEY, Arena
from tests.waiting import PATIENCE_S, until

pytestmark = [needs_lab, pytest.mark.slow]

QUICK = {"steps": 2, "seconds": 0.05}
STEPS = ("kvm", "disk", "room", "iso", "docker", "image", "golden", "container", "windows")


Make = Callable[..., Arena]
BROKEN = {
    "no-result": (Cause.READINESS, "the client ended by itself (exit code 0)"),
    "controller": (Cause.READINESS, "the guest failed"),
    "set-up": (Cause.READINESS, "could not be set up"),
    "evaluator": (Cause.INTERNAL, "the evaluator failed"),
    "unset": (Cause.READINESS, "could not be set up in the guest: Failed to launch application."),
    "unseen": (Cause.READINESS, "the guest failed: Failed to get the observations"),
    "unjudged": (Cause.INTERNAL, "the evaluator failed: An unexpected error occurred"),
    "gone": (Cause.INTERNAL, "the evaluator failed: An unexpected error occurred"),
    "unauthorized": (Cause.MODEL, "the model's API failed"),
    "killed": (Cause.READINESS, "the client was killed, perhaps for want of memory (exit code 137)"),
    "hang": (Cause.STUCK, "took no step for long"),
    "hang-guest": (Cause.STUCK, "Windows did not answer /probe"),
}
SCORED = {"agent": "the agent failed", "slow": "time limit of 7 s reached", "bad-exit": None}


def arena_of(folder: Path, hosts: int, *wishes: str, lacks: Sequence[str] = (), **more: Any) -> Arena:
    """A task for each wish: the first attempt does it, later ones score. Windows `lacks` these programs."""
    good = {"do": "score", "score": 1.0, **QUICK}
    plan = {wish: [{**good, "do": wish}, good] for wish in wishes}
    everything = {"default": good, "tasks": plan, "boot_s": 0.05, "lacks": lacks}
    return Arena(folder, hosts, plan=everything, **{"tasks": {"notepad": list(wishes)}, **more})


@pytest.fixture(scope="module")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    """For one run after another: what was set up for the first is there for the next."""
    made = arena_of(tmp_path_factory.mktemp("arena"), 3, "score", "corrupt", *BROKEN, *SCORED)
    yield made
    made.destroy()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Arena] = []

    def one(**more: Any) -> Arena:
        made.append(arena_of(tmp_path, 1, "score", **more))
        return made[0]

    yield one
    for each in made:
        each.destroy()


def tasks(*ids: str) -> list[str]:
    return [word for id in ids for word in ("--task", id)]


def ends(arena: Arena, run: str) -> dict[str, AttemptEnded]:
    return {event.attempt: event for event in arena.events(run) if isinstance(event, AttemptEnded)}


def log_of(arena: Arena, run: str, attempt: str) -> str:
    return (folder_of(arena, run, attempt) / "evalfleet.log").read_text()


def folder_of(arena: Arena, run: str, attempt: str) -> Path:
    return arena.home / run / attempt.rpartition(".")[0] / attempt


def test_a_score_comes_with_its_steps_files_and_last_screenshot(arena: Arena) -> None:
    arena.run("one", *tasks("score"), "--set", "max_steps=7", "--set", "a11y_backend=win32")
    (task,) = arena.results("one")["tasks"]
    assert (task["score"], task["num_steps"]) == (1.0, 2)
    assert task["machine"] in {host.address for host in arena.lab.hosts}
    folder = folder_of(arena, "one", "score.0")
    there = {path.name for path in folder.iterdir()}
    assert {"result.txt", "traj.jsonl", "traj.html", "logs", "client_logs", "evalfleet.log"} <= there
    assert len(task["screenshots"]) == 3
    assert set(task["screenshots"]) <= there
    told = (folder / "client_logs").glob("normal-*.log")
    (args,) = [line for path in told for line in path.read_text().splitlines() if "Args:" in line]
    for word in ("max_steps=7", "a11y_backend='win32'", "trial_id='score.0'", "model='gpt-4o'"):
        assert word in args
    ready = next(event for event in arena.events("one") if isinstance(event, MachineReady))
    assert {name for name in ready.timings if "." in name} == {f"setup.{step}" for step in STEPS}
    cost = arena.results("one")["cost"]
    assert (cost["models_usd"], cost["models_usd_range"]) == (None, [0.097403, 0.649351])


def test_steps_and_the_newest_screenshot_are_seen_while_the_client_runs(arena: Arena) -> None:
    run = arena.start_run("live", *tasks("hang"), "--workers", "1", "--task-timeout", "600")

    def newest() -> Progress | None:
        progress = read_progress(arena.home, arena.state("live"), 0).get(AttemptId("hang.0"))
        return progress if progress is not None and progress.count == 2 else None

    step = until(newest, "the client's first step, which is its second line").step
    assert step is not None
    assert (bool(step.action), bool(step.screenshot)) == (True, True)
    shown = json.loads(arena.start("show", "live", "hang", "--steps", "--json").finish())
    assert [row["n"] for row in shown] == [0, 1]
    shot = arena.folder / "newest.png"
    arena.start("show", "live", "hang", "--screenshot", str(shot)).finish()
    assert shot.read_bytes()[1:4] == b"PNG"
    arena.start("end", "live", "hang").finish()
    run.finish()
    assert isinstance(ends(arena, "live")["hang.1"].outcome, Scored)
    lines = (folder_of(arena, "live", "hang.1") / "traj.jsonl").read_text().splitlines()
    assert [json.loads(line)["step_num"] for line in lines] == [0, 1, 2], "no line came twice"
    until(lambda: not any(map(looks_on, arena.lab.hosts)), "nobody to look on any more")


def looks_on(host: NamespaceHost) -> bool:
    return any("file=$2 left=$3" in " ".join(process.argv) for process in host.processes())


def test_every_way_to_end_is_told_apart_and_what_broke_is_tried_again(arena: Arena) -> None:
    arena.run("ways", *tasks(*BROKEN, *SCORED), "--task-timeout", "7")
    ended = ends(arena, "ways")
    for wish, (cause, words) in BROKEN.items():
        outcome = ended[f"{wish}.0"].outcome
        assert isinstance(outcome, Broken), wish
        assert outcome.cause is cause, (wish, outcome)
        assert words in outcome.detail, (wish, outcome)
        assert isinstance(ended[f"{wish}.1"].outcome, Scored), "and then it is scored"
        assert (folder_of(arena, "ways", f"{wish}.0") / "container.log").exists()
    for wish, reason in SCORED.items():
        outcome = ended[f"{wish}.0"].outcome
        assert isinstance(outcome, Scored), (wish, outcome)
        assert f"{wish}.1" not in ended, "a score is never tried again"
        assert reason is None or (outcome.score == 0.0 and reason in (outcome.error or "")), (wish, outcome)
    slow = ended["slow.0"]
    assert isinstance(slow.outcome, Scored)
    assert (slow.outcome.limit_s, slow.seconds >= 7) == (7.0, True)
    _check_resets(arena, ended)


def _check_resets(arena: Arena, ended: Mapping[str, AttemptEnded]) -> None:
    """Each broken attempt made somebody reset Windows, and nobody else did."""
    reset = {attempt for attempt in ended if "Windows is reset: attempt" in log_of(arena, "ways", attempt)}
    broken = [attempt for attempt, event in ended.items() if isinstance(event.outcome, Broken)]
    assert len(broken) - len(arena.lab.hosts) <= len(reset) <= len(broken), (
        "the last on a host has no successor"
    )
    for attempt in reset:
        told = json.loads((folder_of(arena, "ways", attempt) / "result.json").read_text())
        if isinstance(ended[attempt].outcome, Scored):
            assert ended[attempt].seconds == told["seconds"], "what the reset took is not the task's"


def test_an_agent_that_dies_at_its_import_is_named_with_where_and_windows_is_not_reset(make: Make) -> None:
    arena = make()
    (arena.golden / "plan.json").write_text(json.dumps({"imports": ["unknown"]}))
    arena.run("r", *tasks("score"), "--attempts", "2", "--allow-broken", "100%")
    ended = ends(arena, "r")
    for attempt in ("score.0", "score.1"):
        outcome = ended[attempt].outcome
        assert isinstance(outcome, Broken), outcome
        assert outcome.cause is Cause.INTERNAL
        died = "the client died at its start (exit code 1): ModuleNotFoundError: No module named 'unknown'"
        frames = r" \(run\.py:\d+ > mm_agents/navi/agent\.py:\d+\)"
        assert re.match(re.escape(died) + frames, outcome.detail), outcome
        assert "Windows is reset" not in log_of(arena, "r", attempt)


def test_a_client_on_the_machine_takes_the_place_of_the_images(make: Make) -> None:
    arena = make()
    mine = arena.share / "mine"
    shutil.copytree(arena.checkout, mine)
    run = mine / "run.py"
    run.write_text(run.read_text().replace("Waiting for the server to start", "My own client starts"))
    arena.run("r", *tasks("score"), "--set", f"client={mine}")
    assert "My own client starts" in log_of(arena, "r", "score.0")
    said = arena.run("none", *tasks("score"), "--set", "client=/nowhere", code=4)
    assert "client=/nowhere: that folder of the machine has no run.py" in said


def test_a_guest_that_does_not_come_back_gets_golden_storage(arena: Arena) -> None:
    arena.run("golden", *tasks("corrupt"), "--workers", "1", "--task-timeout", "4", "--set", "restart_s=1")
    assert "Windows went back to golden" in log_of(arena, "golden", "corrupt.1")
    assert isinstance(ends(arena, "golden")["corrupt.1"].outcome, Scored)


@pytest.mark.nightly
def test_a_windows_left_broken_is_golden_again_at_the_next_set_up(tmp_path: Path) -> None:
    """The last attempt on a host has no successor that would reset it."""
    alone = arena_of(tmp_path, 1, "score", "corrupt")
    try:
        words = ("--attempts", "1", "--task-timeout", "4", "--allow-broken", "100%")
        alone.run("left", *tasks("corrupt"), *words)
        assert isinstance(ends(alone, "left")["corrupt.0"].outcome, Broken)
        alone.run("next", *tasks("score"))
        assert not [event for event in alone.events("next") if getattr(event, "cause", None)]
    finally:
        alone.destroy()


def test_fresh_each_goes_back_to_golden_before_every_task(arena: Arena) -> None:
    arena.run("fresh", *tasks("score", "bad-exit"), "--set", "fresh=each")
    for attempt in ends(arena, "fresh"):
        assert "Windows went back to golden" in log_of(arena, "fresh", attempt)


def test_nobody_sees_the_key(arena: Arena) -> None:
    run = arena.start_run("secret", *tasks("slow"), "--workers", "1", "--task-timeout", "5")
    seen = _watch(arena, "run.py")
    assert seen, "the client was never seen"
    assert not [argv for argv in seen if KEY in argv]
    assert KEY not in run.finish()
    raw = KEY.encode()
    assert not [path for path in arena.home.rglob("*") if path.is_file() and raw in path.read_bytes()]
    for host in arena.lab.hosts:
        inspected = host.run(["docker", "inspect", "winarena"], check=False).stdout
        assert KEY not in inspected
        places = (DATA, "/root/.evalfleet", "/dev/shm", "/tmp", "/var/lib/stand-in-docker")
        assert not host.run(["grep", "-rlsF", KEY, *places], check=False).stdout


def _watch(arena: Arena, program: str) -> list[str]:
    """Command lines of all hosts, as soon as one of the program is among them."""

    def seen() -> list[str] | None:
        lines = [" ".join(process.argv) for host in arena.lab.hosts for process in host.processes()]
        return lines if any(program in line for line in lines) else None

    return until(seen, f"{program} to run")


def test_people_can_reset_windows_and_take_a_picture_by_hand(arena: Arena) -> None:
    arena.run("hand", *tasks("score"), "--workers", "1")
    host = next(h for h in arena.lab.hosts if h.run(["test", "-d", DATA], check=False).returncode == 0)
    config = json.loads(host.run(["cat", f"{DATA}/config.json"]).stdout)
    assert (config["container"], config["ports"]["vnc"], config["ports"]["guest"]) == ("winarena", 8006, 5000)
    go = f"cd {DATA}/program && python3 -m waa.host"
    assert "went back to golden" in host.run(["sh", "-c", f"{go} reset"], timeout_s=PATIENCE_S).stdout
    shot = host.run(["sh", "-c", f"{go} screenshot | head -c 4 | tail -c 3"], timeout_s=PATIENCE_S).stdout
    assert shot == "PNG"


@pytest.mark.nightly
def test_a_pool_is_prepared_once_for_runs_of_any_model_and_its_windows_comes_back(make: Make) -> None:
    arena = make()
    arena.start("pool", "create", "mine", "--on", "lab", "--workers", "1").finish()
    arena.start("pool", "prepare", "mine", "waa").finish()
    shown = arena.start("pool", "status", "mine").finish()
    assert "`evalfleet pool vnc mine` opens these screens:\n198.18.1.1  http://127.0.0.1:8006/" in shown
    (prepared,) = [event for event in arena.events("mine") if isinstance(event, MachinePrepared)]
    assert {f"setup.{step}" for step in STEPS} < set(prepared.timings)
    # as after a stop and a start of the machine
    arena.lab.hosts[0].run(["docker", "stop", "-t", "0", "winarena"])
    asked = ("--pool", "mine", "--name", "r", "--set", "base_url=http://127.0.0.1:9/v1")
    arena.start("run", "waa", *asked, "--model", "another", "--set", "max_steps=9").finish()
    (ready,) = [event for event in arena.events("r") if isinstance(event, MachineReady)]
    assert set(ready.timings) == {"boot", "setup", "probe"}, "no step was run again"
    assert arena.results("r")["scored"] == 1
    arena.start("pool", "delete", "mine", "--yes").finish()


def test_what_the_chosen_tasks_need_and_windows_lacks_stops_the_run_at_its_first_attempt(make: Make) -> None:
    arena = make(lacks=["VLC"], tasks={"notepad": ["one"], "vlc": [f"v{n}" for n in range(10)]})
    said = arena.run("r", "--canary", "1", code=4)
    assert "this Windows lacks VLC (for 10 of the chosen tasks)" in said
    results = arena.results("r")
    assert (results["scored"], results["broken"] + results["unrun"]) == (0, 11)
    assert len(arena.state("r").attempts) == 3, "one task was tried, as often as a task is"
    said = arena.run("no-canary", code=4)
    assert "the first 10 attempts all broke alike (readiness) and none scored" in said
    arena.run("any", *tasks("one", "v0", "v1"), "--set", "programs=any")
    assert arena.results("any")["scored"] == 3


def test_a_refused_pull_names_its_step_and_what_to_do(make: Make) -> None:
    arena = make(private=True)
    arena.run("r", code=4)
    condemned = [e for e in arena.events("r") if isinstance(e, MachineCondemned) and e.cause]
    assert condemned[0].step == "image"
    assert "the registry refuses the pull" in condemned[0].detail


def test_windows_that_never_boots_leaves_its_log_behind(make: Make) -> None:
    arena = make()
    (arena.golden / "data.img").write_bytes(b"no Windows here\n")
    arena.run("r", "--set", "boot_s=1", code=4)
    condemned = [e for e in arena.events("r") if isinstance(e, MachineCondemned) and e.cause]
    assert condemned[0].step == "windows"
    assert "did not answer /probe within" in condemned[0].detail
    assert "failed to load Boot0001" in condemned[0].detail
    left = arena.home / "r" / ".machines" / condemned[0].machine / "windows"
    assert "failed to load Boot0001" in (left / "container.log").read_text()


@pytest.mark.nightly
def test_a_virtual_machine_that_ends_is_told_with_its_own_words(make: Make) -> None:
    """Its container runs on, and says the same line again and again."""
    arena = make()
    words = "qemu-system-x86_64: failed to initialize kvm: Cannot allocate memory"
    (arena.golden / "plan.json").write_text(json.dumps({"boot_fails": words}))
    arena.run("r", "--set", "boot_s=3000", code=4)
    condemned = [e for e in arena.events("r") if isinstance(e, MachineCondemned) and e.cause]
    assert condemned[0].step == "windows"
    assert f"Windows does not run: its virtual machine has ended: ERROR: {words}" in condemned[0].detail
    left = arena.home / "r" / ".machines" / condemned[0].machine / "windows"
    assert re.search(r"Waiting for a response .* \(\d+ times\)$", (left / "container.log").read_text(), re.M)


@pytest.mark.nightly
def test_a_restart_lets_windows_shut_down_and_cuts_off_one_that_hangs(make: Make) -> None:
    arena = make()
    arena.run("r", *tasks("score"))
    go = f"cd {DATA}/program && python3 -c"
    script = "from waa.host import vm, docker; print(vm.shut_down(docker.Docker(), 'winarena', {}))"
    host = arena.lab.hosts[0]
    host.run(["sh", "-c", f'{go} "{script.format(60)}"'])
    assert host.run(["tail", "-n1", f"{DATA}/storage/data.qcow2"]).stdout == "shut down\n"
    host.run(["docker", "restart", "-t", "0", "winarena"])
    until(lambda: guest_answers(host), "Windows to come back")
    host.run(["python3", "-c", HANG])
    assert host.run(["sh", "-c", f'{go} "{script.format(1)}"']).stdout == "False\n"


def guest_answers(host: NamespaceHost) -> bool:
    return host.run(["curl", "-sfm", "2", "127.0.0.1:5000/probe"], check=False).returncode == 0
