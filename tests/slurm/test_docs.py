"""The commands of docs/slurm.md, on a real Slurm."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from tests.desk import Desk
from tests.docs.pages import ROOT, File, steps

from .cluster import Cluster

PAGE = ROOT / "docs/slurm.md"


def test_what_the_page_tells_to_type_works(cluster: Cluster, tmp_path: Path) -> None:
    at = Desk(tmp_path, tmp_path / "results", dict(cluster.environ))
    for step in steps(PAGE):
        if isinstance(step, File):
            (tmp_path / step.name).write_text(step.content)
    # polls every ten seconds are kind to a cluster, and slow
    (tmp_path / "evalfleet.toml").write_text((tmp_path / "evalfleet.toml").read_text() + "poll_s = 0.2\n")
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    commands = [shlex.split(line, comments=True)[1:] for block in blocks for line in block.splitlines()]
    assert len(commands) >= 3
    for command in commands:
        done = at(*command)
        assert done.code == 0, (command, done)
    assert at.results("first")["scored"] == 3
