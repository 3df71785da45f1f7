"""Runs on jobs of Azure Machine Learning whose containers are processes: pilots and mailboxes are real."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from standins.azure_ml import Processes, StandIn
from tests.cloud import ml_places
from tests.cloud.mail_desk import nothing_left
from tests.cloud.services import desk
from tests.desk import Desk
from tests.docs.pages import ROOT, File, steps

CANNOT = Processes.missing()
pytestmark = pytest.mark.skipif(CANNOT is not None, reason=f"NO TEST OF AZURE ML'S JOBS: {CANNOT}")


@pytest.fixture
def ml() -> Iterator[StandIn]:
    with StandIn(Processes(), ml_timing=ml_places.FAST) as made:
        yield made


@pytest.mark.nightly
def test_what_the_page_tells_to_type_works(ml: StandIn, tmp_path: Path) -> None:
    page = ROOT / "docs/azure-ml.md"
    at = Desk(tmp_path, tmp_path / "results", ml.service_principal())
    for step in steps(page):
        if isinstance(step, File):
            (tmp_path / step.name).write_text(step.content)
    here = {"endpoint": ml.endpoint, "storage_endpoint": ml.storage_endpoint, "ca": str(ml.ca)}
    lines = "".join(f'{key} = "{value}"\n' for key, value in here.items())
    own = f'{lines}isolation = "none"\npoll_s = 0.2\nsettle_s = 0.5\n'
    (tmp_path / "evalfleet.toml").write_text((tmp_path / "evalfleet.toml").read_text() + own)
    blocks = re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    commands = [shlex.split(line, comments=True)[1:] for block in blocks for line in block.splitlines()]
    assert len(commands) >= 4
    for command in commands:
        done = at(*command)
        assert done.code == 0, (command, done)
    assert at.results("first")["scored"] == 3
    nothing_left(ml)


def test_a_plan_for_compute_instances_has_no_spot_ones(ml: StandIn, tmp_path: Path) -> None:
    at = desk(ml, tmp_path, 2, compute="instances")
    done = at("plan", "b.toml", "--on", "p", "--workers", "2", "--draws", "20")
    assert done.code == 0, done
    assert "(stopped pool)" in done.out
    assert " spot " not in done.out
