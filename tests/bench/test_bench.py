"""The benchmarks run and say what they must. What they measure is for people to read, never asserted here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import BENCHES, main
from bench.result import Aim, Result, at_least, at_most, below, table
from evalfleet.lab import Lab

ROOT = Path(__file__).resolve().parent.parent.parent

FIGURES = {
    "cluster-overhead": {"tasks", "slots", "machines", "overhead_s", "makespan_over_bound", "mailbox"},
    "mailbox": {"machines", "attempts", "bucket", "folder", "counted"},
    "startup": {"help_cpu_s", "run_help_cpu_s", "imports_of_ls"},
    "budget-overshoot": {"simulated", "real"},
    "watching": {"machines", "draw_ms", "alerts_look_ms"},
    "alerts": {"rules", "worst_s", "told_again", "counted"},
    "follow": {"counted"},
    "dashboard": {"runs_cold_s", "runs_warm_s", "client_gzip_bytes", "tasks_200", "watched", "replayed"},
    "report-html": {"report_cpu_s", "file_MB", "network_requests", "opened"},
    "store": {"take_over_s", "double_writes", "mirror_ms_an_attempt_s3", "mirror_ms_an_attempt_folder"},
    "before": {"commit", "counted", "startup_help", "startup_ls"},
    "ls": {"runs", "ls_cpu_s", "ls_wall_s", "first_ls_cpu_s", "verify_all_cpu_s"},
    "sim-scale": {"400_tasks_on_20_machines", "steady_us_at_10_machines"},
    "tiers": {"scored", "extra_s", "to_open_s", "scored_share", "jobs_succeeding", "invariants_broken"},
    "stuck": {"running_never_started", "place_away", "no_output", "hangs"},
    "shape": {"files", "lines", "class_names_used_twice", "optional_protocols"},
    "dispatch": {"attempts_per_s", "steady_attempts_per_s", "counted"},
    "makespan": {"dynamic", "dynamic_known", "round_robin", "slices", "real"},
    "waa-plan": {"size", "usd_per_hour", "cold", "stopped_pool", "frugal"},
    "calibration": {"runs", "inside", "inside_with_earlier_runs", "too_long"},
    "policies": {"default_known", "default_unknown", "fifo", "round_robin", "slices"},
    "reconcile": {"counted_usd", "billed_usd", "counted_over_billed", "rows"},
    "plan-speed": {"runs", "seconds", "cpu_ms_a_run", "minutes_90"},
    "recovery": {"killed", "attach"},
    "ssh-dispatch": {"true", "sleep", "bound_s", "counted"},
    "ssh-scale": {"connect_s", "memory_kb_a_host", "hold_cpu_share", "storm_s", "at_5000_hosts"},
    "first-contact": {"hosts", "exit_code", "longest_line", "counted"},
    "lost-host": {"power_loss", "counted"},
    "waa-154": {"dynamic", "dynamic_known", "slices", "round_robin", "bound_s", "machine_lost", "counted"},
    "waa-faults": {"faults", "clean", "zeros_that_are_not_the_agents", "scores_called_broken"},
    "fuzz": {"inputs", "lines_reached", "slowest_input_cpu_s", "memory_grown_mb", "counted"},
    "waa-fresh": {"disk_gb", "overlay", "copy", "times_faster", "counted"},
    "meter": {"added_p50_ms", "cpu_percent", "memory_mb", "tokens_served", "tokens_miscounted"},
    "hostile": {"attacks", "outcomes", "user_touched", "none_touched"},
    "isolation-cost": {"shared_none_ms", "shared_user_ms", "busy_user_more_ms", "counted"},
    "azure-fleet": {"imports", "3_machines", "counted"},
    "gce-fleet": {"3_machines", "counted"},
    "gce-leak": {"crash_points", "counted", "resources_left", "billed_s_past_expiry", "lives_past_limit"},
    "azure-first-run": {"deployments_canary", "deployments_at_once", "refused_delete_told", "counted"},
    "hal-overhead": {"cpu_s_a_task", "s_a_task", "counted"},
    "hal-fleet": {"lines", "scores", "machines_left", "counted"},
    "hal-plan": {"10_tasks_of_5_min", "spot_off", "counted"},
    "slurm-leak": {"crash_points", "counted", "jobs_left", "steps_left", "files_left", "processes_left"},
    "service-start": {"service_s", "submit_s", "up_s", "own_s", "counted"},
    "service-leak": {"counted", "azure_batch", "azure_ml"},
    "azure-leak": {"crash_points", "counted", "resources_left", "billed_s_past_expiry"},
}
AGAINST = {
    "cluster-overhead": {"srun", "sbatch"},
    "mailbox": set[str](),
    "startup": {"python_pass", "python_import_argparse"},
    "budget-overshoot": set[str](),
    "watching": set[str](),
    "alerts": set[str](),
    "follow": set[str](),
    "dashboard": {"inspect_view"},
    "report-html": set[str](),
    "store": set[str](),
    "before": set[str](),
    "ls": set[str](),
    "sim-scale": set[str](),
    "tiers": set[str](),
    "stuck": set[str](),
    "shape": set[str](),
    "dispatch": {"gnu_parallel", "gnu_parallel_joblog_results", "xargs"},
    "makespan": {"ideal_queue", "ideal_queue_known"},
    "waa-plan": set[str](),
    "plan-speed": set[str](),
    "reconcile": set[str](),
    "policies": set[str](),
    "calibration": set[str](),
    "recovery": set[str](),
    "ssh-dispatch": {"bare_asyncssh", "gnu_parallel"},
    "ssh-scale": set[str](),
    "first-contact": set[str](),
    "lost-host": set[str](),
    "waa-154": set[str](),
    "waa-faults": set[str](),
    "fuzz": set[str](),
    "waa-fresh": set[str](),
    "meter": {"litellm"},
    "hostile": set[str](),
    "isolation-cost": set[str](),
    "azure-fleet": set[str](),
    "gce-fleet": set[str](),
    "gce-leak": set[str](),
    "azure-first-run": {"ideal"},
    "hal-overhead": {"hal_local_runner"},
    "hal-fleet": set[str](),
    "hal-plan": set[str](),
    "slurm-leak": set[str](),
    "service-start": set[str](),
    "service-leak": set[str](),
    "azure-leak": set[str](),
}
NEED_LAB = (
    "first-contact",
    "follow",
    "hal-fleet",
    "ssh-dispatch",
    "ssh-scale",
    "lost-host",
    "reconcile",
    "waa-154",
    "waa-faults",
    "azure-fleet",
    "gce-fleet",
)
NEED_CHECKOUT = () if os.environ.get("WAA_CHECKOUT") else ("waa-faults",)


def bench(*words: str, scratch: Path) -> subprocess.CompletedProcess[str]:
    paths = (str(ROOT / "src"), os.environ.get("PYTHONPATH", ""))
    environ = {**os.environ, "TMPDIR": str(scratch), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    argv = [sys.executable, "-m", "bench", *words]
    return subprocess.run(argv, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=170)


NIGHTLY = (
    *NEED_LAB,
    "azure-leak",
    "gce-leak",
    "azure-first-run",
    "budget-overshoot",
    "calibration",
    "cluster-overhead",
    "dashboard",
    "fuzz",
    "hostile",
    "mailbox",
    "makespan",  # near: policies, tests/sim
    "policies",
    "recovery",  # near: dispatch, tests/e2e/test_resume.py
    "report-html",
    "service-leak",
    "sim-scale",  # near: stuck, tests/sim
    "slurm-leak",
    "store",
    "waa-plan",  # near: plan-speed, tests/unit/test_planner.py
    "watching",
)
SLOW = ("isolation-cost", "service-start")


def when(name: str) -> Sequence[pytest.MarkDecorator]:
    return [pytest.mark.nightly] if name in NIGHTLY else [pytest.mark.slow] if name in SLOW else []


ALL = [pytest.param(name, marks=when(name)) for name in BENCHES]


@pytest.mark.parametrize("name", ALL)
def test_last_line_is_the_result_and_nothing_is_left(name: str, tmp_path: Path) -> None:
    done = bench(name, "--json", "--quick", scratch=tmp_path)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == {"bench", "figures", "against", "aims"}
    assert found["bench"] == name
    if (name in NEED_LAB and Lab.missing()) or name in NEED_CHECKOUT:
        assert set(found["figures"]) == {"error"}  # says so, and does not fall over
        return
    assert set(found["figures"]) >= FIGURES[name]
    assert set(found["against"]) == AGAINST[name]
    assert all(set(aim) == {"value", "aim", "met"} for aim in found["aims"].values())
    assert list(tmp_path.iterdir()) == []
    for exact in (
        "tasks_lost",
        "tasks_scored_twice",
        "attempts_started_twice",
        "jobs_lost",
        "double_writes",
        "left_behind",
        "resources_left",
        "zeros_that_are_not_the_agents",
        "scores_called_broken",
        "tokens_miscounted",
        "network_requests",
    ):
        assert found["aims"].get(exact, {"met": True})["met"], exact  # counts, not timings


def test_a_peer_that_is_missing_is_reported() -> None:
    from bench.dispatch import peer

    assert peer(("no-such-program",), 1) == {"error": "not installed"}


def test_without_a_name_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in BENCHES)


def test_an_aim_is_met_on_its_own_side() -> None:
    assert below(1.0, 2.0).met
    assert not below(2.0, 2.0).met
    assert at_most(2.0, 2.0).met
    assert not at_least(1.9, 2.0).met


def test_the_table_says_which_aims_were_missed() -> None:
    result = Result(
        "x", {"a": {"b": 1}, "rate": 1234.5}, {"speed": Aim(3.0, 2.0, "<")}, {"p": {"error": "no"}}
    )
    shown = table("x: a title", result)
    assert "MISSED" in shown
    assert "a.b" in shown
    assert "1,23" in shown
    assert "p.error" in shown
