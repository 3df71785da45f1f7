"""What a shell offers after the words that somebody has typed: asked of a real bash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.harness import Fleet, tasks

ASK = """\
eval "$(evalfleet completion bash)"
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_evalfleet
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def ran(fleet: Fleet) -> Fleet:
    fleet.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), fleet.environ["PATH"]))
    fleet.bench(tasks(2))
    assert fleet.run().code == 0
    return fleet


def offered(fleet: Fleet, *words: str) -> set[str]:
    done = subprocess.run(
        ["bash", "-c", ASK, "bash", "evalfleet", *words],
        cwd=fleet.folder,
        env=fleet.environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert not done.stderr
    return set(done.stdout.split())


def test_commands_flags_runs_tasks_and_files_are_offered(ran: Fleet) -> None:
    assert offered(ran, "re") == {"resume", "rerun", "report", "reap", "restart", "replace"}
    assert offered(ran, "show", "") == {"latest", "r"}
    assert offered(ran, "show", "r", "") == {"a_1", "a_2"}
    assert offered(ran, "show", "--json", "latest", "a_2") == {"a_2"}
    assert offered(ran, "report", "r", "--form") == {"--format"}
    assert offered(ran, "completion", "") == {"bash", "zsh", "fish"}
    assert offered(ran, "run", "b") == {"b.toml"}
    assert offered(ran, "pool", "st") == {"start", "status", "stop"}
    assert {"local", "ssh"} <= offered(ran, "run", "b.toml", "--on", "")
    ran.config('[places.mine]\nkind = "local"\n[places.most]\nkind = "local"\n')
    assert offered(ran, "run", "b.toml", "--on", "mi") == {"mine"}


def test_what_is_wrong_offers_nothing_and_says_nothing(ran: Fleet) -> None:
    for words in (("huh", ""), ("show", "nothing", ""), ("pool", "huh", ""), ("ls", "--since", "")):
        assert offered(ran, *words) == set()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_is_one_that_its_shell_can_read(fleet: Fleet, shell: str) -> None:
    script = fleet("completion", shell).out
    assert "evalfleet completion --words" in script
    if shutil.which(shell) is None:
        pytest.skip(f"NO TEST OF COMPLETION IN {shell.upper()}: it is not installed")
    subprocess.run([shell, "-n", "-c", script], check=True)


def test_a_shell_must_be_named(fleet: Fleet) -> None:
    fleet("completion").refused("for which shell? Write bash, zsh or fish")
