"""What Slurm's commands say, and what is made of it. Nothing here needs a cluster."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any, Literal

import pytest

from evalfleet.errors import PlaceError, RequestError
from evalfleet.places.slurm import SlurmPlace, SlurmSettings
from evalfleet.places.slurm.commands import Slurm, elapsed_s, limit, refusal
from evalfleet.places.slurm.login import Spoken, ThisComputer
from evalfleet.places.slurm.node_probe import probed
from evalfleet.ports import PlaceContext


@pytest.mark.parametrize(
    ("said", "setting"),
    [
        ("sbatch: error: invalid partition specified: nope", "partition"),
        (
            "sbatch: error: Batch job submission failed: Invalid account or account/partition combination "
            "specified",
            "account",
        ),
        ("sbatch: error: Batch job submission failed: Invalid qos specification", "qos"),
        (
            "sbatch: error: Batch job submission failed: Requested time limit is invalid (missing or exceeds "
            "some limit)",
            "time_limit_s",
        ),
        ("allocation failure: Invalid feature specification", "constraint"),
        ("sbatch: error: Invalid generic resource (gres) specification", "gpus"),
        ("allocation failure: Requested node configuration is not available", "cpus"),
    ],
)
def test_a_wrong_setting_is_named_and_not_tried_again(said: str, setting: str) -> None:
    err = refusal("sbatch", said + "\n")
    assert not err.transient
    assert f"change `{setting}" in str(err)
    assert "\n" not in str(err)


def test_clocks_that_are_apart_are_named() -> None:
    err = refusal("squeue", "slurm_load_jobs error: Munge decode failed: Expired credential\n")
    assert err.transient, "somebody may set the clock"
    assert "clocks" in str(err)


def test_other_trouble_is_transient() -> None:
    err = refusal("sbatch", "sbatch: error: Unable to contact slurm controller (connect failure)")
    assert err.transient
    assert str(err) == "sbatch: Unable to contact slurm controller (connect failure)"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("0:00", 0), ("1:02", 62), ("1:00:00", 3600), ("2-00:00:01", 172801)),
        *(("infinite", 0), ("INVALID", 0), ("9" * 200, 10**9)),
    ],
)
def test_times_are_read(text: str, seconds: int) -> None:
    assert elapsed_s(text) == seconds


def test_a_limit_is_never_rounded_down() -> None:
    assert [limit(seconds) for seconds in (0.5, 59, 60, 61, 7200)] == ["1", "1", "1", "2", "120"]


@pytest.mark.parametrize(
    ("out", "errors", "reach", "verdict", "found", "remedy"),
    [
        ({"python": "3.6.8", "old": True}, "", "step", "bad", "is 3.6.8", "set `python` of the place"),
        ({"sees": False}, "", "step", "bad", "it is not shared", "name a `folder`"),
        ({"at": -900.0}, "", "step", "warn", "900 s behind", "ask the cluster's administrators"),
        ({"at": 900.0}, "", "step", "warn", "900 s ahead", "ask the cluster's administrators"),
        (None, "srun: error: python3: command not found", "step", "bad", "nodes have no", "set `python`"),
        (
            None,
            "srun: error: Unable to allocate resources: Requested nodes are busy",
            "step",
            "warn",
            "",
            "try",
        ),
        (None, "srun: error: Access/permission denied", "step", "bad", "denied", 'set `reach = "mailbox"`'),
        (None, "srun: error: Access/permission denied", "mailbox", "good", "not needed", ""),
        (None, "srun: error: what", "step", "bad", "what", "`srun hostname`"),
        (b"Welcome", "", "step", "bad", "says b'Welcome'", "set `python`"),
    ],
)
def test_what_a_node_tells_doctor_comes_with_what_to_do(
    out: dict[str, Any] | bytes | None,
    errors: str,
    reach: Literal["step", "mailbox"],
    verdict: str,
    found: str,
    remedy: str,
) -> None:
    good = {"python": "3.11.2", "old": False, "node": "n1", "at": 0.0, "sees": True}
    line = json.dumps({**good, **out}).encode() if isinstance(out, dict) else out or b""
    settings = SlurmSettings(folder="shared", reach=reach)
    checks = probed(settings, Spoken(1 if errors else 0, line, errors.encode()), 0.0, "/shared")
    worst = max(checks, key=lambda check: ("good", "warn", "bad").index(check.verdict))
    assert (worst.verdict, found in worst.found, remedy in worst.remedy) == (verdict, True, True), checks
    assert bool(worst.remedy) == (verdict != "good"), checks
    assert "\n" not in worst.found + worst.remedy


def command(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_a_squeue_that_hangs_is_told_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command(tmp_path, "squeue", f"echo $$ >{tmp_path}/pid; exec sleep 600")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(PlaceError, match="squeue has not answered for 2 s") as told:
        asyncio.run(Slurm(ThisComputer({}), answer_s=2.0).jobs())
    assert told.value.transient
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_sacct_without_accounting_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command(tmp_path, "sacct", "echo Slurm accounting storage is disabled >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert asyncio.run(Slurm(ThisComputer({})).ended(["7"])) == ()


def test_the_books_tell_how_a_forgotten_job_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command(tmp_path, "sacct", "echo '7|CANCELLED by 1000|62|n1|main|a|b'")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (job,) = asyncio.run(Slurm(ThisComputer({})).ended(["7"]))
    assert (job.id, job.state, job.ran_s, job.node, job.name) == ("7", "CANCELLED", 62.0, "n1", "a|b")


def test_slurms_variables_of_the_job_we_are_in_are_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "64")
    environ = ThisComputer({"SLURM_CONF": "/etc/slurm.conf", "SLURM_NTASKS": "64", "SBATCH_QOS": "q"}).environ
    assert environ["SLURM_CONF"] == "/etc/slurm.conf"
    assert environ["SBATCH_QOS"] == "q"
    assert "SLURM_NTASKS" not in environ


def test_a_job_that_was_submitted_after_squeue_was_asked_is_not_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder is looked at after that, and tells of it: by its record, by its mark, or by both."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    mark = json.dumps({"start": "7.0", "node": "n1", "at": time.time()})
    for number, files in enumerate((("job",), ("start",), ("job", "start"))):
        home, machine = f"0a1b2{number}", "r-abc123-1"
        folder = tmp_path / "shared" / home / machine
        folder.mkdir(parents=True)
        contents = {"job": "7", "start": mark}
        submits = "; ".join(f"echo '{contents[name]}' >{folder}/{name}" for name in files)
        told = f"7|RUNNING|0:01|n1|main|None|evalfleet-{home}-{machine}"
        command(
            tmp_path, "squeue", f"[ ! -e {folder}/asked ] || echo '{told}'; touch {folder}/asked; {submits}"
        )
        settings = SlurmSettings(folder=str(tmp_path / "shared"), poll_s=0.05)
        place = SlurmPlace.make("hpc", settings, PlaceContext(tmp_path, home))

        async def phases(place: SlurmPlace = place) -> list[str]:
            seen: list[str] = [machine.phase for _ in range(3) for machine in await place.list("r")]
            await place.close()
            return seen

        seen = asyncio.run(phases())
        assert seen[0] == "queued", (files, seen)
        assert "gone" not in seen, (files, seen)
        assert seen[-1] == ("pending" if "start" in files else "queued"), (files, seen)


@pytest.mark.parametrize(("folder", "words"), [("", "has no 'folder'"), ("s3://bucket/mail", "buckets")])
def test_a_folder_that_can_be_none_is_refused_in_one_line(tmp_path: Path, folder: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as told:
        SlurmPlace.make("hpc", SlurmSettings(folder=folder), PlaceContext(tmp_path, "0a1b2c"))
    assert "\n" not in str(told.value)
