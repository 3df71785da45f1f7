"""What docs/hal.md shows with --dry-run is done: on real SSH hosts, and on a stand-in for Google Cloud."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lab import Lab
from standins.gce import Hosts, StandIn
from tests.cloud.gce_places import FAST, TYPE, ZONE
from tests.docs.pages import ROOT, File, Shell, steps
from tests.ssh.fleet import Fleet, fleet
from tests.waiting import PATIENCE_S

PAGE = ROOT / "docs/hal.md"
CANNOT = Lab.missing()


def commands(word: str) -> list[str]:
    """Those of the page that are shown with --dry-run, without it."""
    shown = [step.command for step in steps(PAGE) if isinstance(step, Shell)]
    return [each.replace(" --dry-run", "") for each in shown if word in each and "--dry-run" in each]


def write_files(folder: Path, place: str, settings: Mapping[str, Any]) -> None:
    """The files of the page, with a place that is there instead of its examples."""
    for step in steps(PAGE):
        if isinstance(step, File):
            (folder / step.name).parent.mkdir(parents=True, exist_ok=True)
            (folder / step.name).write_text(step.content, "utf-8")
    config = (folder / "evalfleet.toml").read_text("utf-8").partition("[places.")[0]
    keys = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
    (folder / "evalfleet.toml").write_text(f"{config}[places.{place}]\n{keys}", "utf-8")


def run(command: str, folder: Path, environ: Mapping[str, str], prefix: Sequence[str] = ()) -> str:
    done = subprocess.run(
        [*prefix, "bash", "-c", command],
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "  tasks       4: 4 scored, 0 broken" in done.stdout, done.stdout
    return done.stdout


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Fleet]:
    with fleet(tmp_path / "hosts", 2) as made:
        yield made
        assert not [str(path) for host in made.hosts for path in host.home.iterdir()], "left on a host"


def test_the_commands_for_ssh_hosts_give_a_first_result(
    hosts: Fleet, folder: Path, environment: Mapping[str, str]
) -> None:
    write_files(folder, "mine", {"kind": "ssh", **hosts.settings()})
    (command,) = commands("--on mine")
    assert "4 on 2 machines" in run(command, folder, environment)


@pytest.mark.nightly
@pytest.mark.skipif(CANNOT is not None, reason=f"NO TEST OF REAL HOSTS: {CANNOT}")
def test_the_commands_for_google_cloud_give_a_first_result(
    folder: Path, environment: Mapping[str, str]
) -> None:
    with StandIn(Hosts(), timing=FAST, seed=3) as google:
        settings = {
            "project": google.project,
            "endpoint": google.endpoint_inside,
            "ca": str(google.ca),
            "types": [TYPE],
            "zones": [ZONE],
            "ssh_from": ["*"],
            "settle_s": 0.5,
        }
        write_files(folder, "gce", settings)
        by_run, by_hal_eval = commands("gce"), commands("--google-cloud")
        environ = {**environment, **google.environment_inside}
        for command in (*by_run, *by_hal_eval):
            run(command, folder, environ, google.hosts.lab.prefix)
            assert not google.left()
        assert (len(by_run), len(by_hal_eval)) == (1, 1)
    (tree,) = (folder / "results/gaia").iterdir()
    lines = (tree / f"{tree.name}_RAW_SUBMISSIONS.jsonl").read_text("utf-8").splitlines()
    assert [next(iter(json.loads(line))) for line in lines] == ["right", "wrong", "measured", "more"]
