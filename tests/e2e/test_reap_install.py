"""`reap --install`: a line in the crontab of whoever asks, that works by itself and can be removed again."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from evalfleet.cli.crontab import line_of, with_line
from tests.e2e.harness import Fleet
from tests.e2e.pools import say

CRONTAB = """#!/bin/sh
# as cron's: no table is an error, and the last line must be whole
file="{folder}/table"
if [ "$1" = -l ]; then
  [ -e "$file" ] || {{ echo "no crontab for you" >&2; exit 1; }}
  cat "$file"
else
  cat >"$file.new" && [ -z "$(tail -c 1 "$file.new")" ] && mv "$file.new" "$file"
fi
"""


@pytest.fixture
def table(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that a program called crontab keeps."""
    programs = fleet.folder / "bin"
    programs.mkdir()
    (programs / "crontab").write_text(CRONTAB.format(folder=fleet.folder))
    (programs / "crontab").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    fleet.config("")
    return fleet.folder / "table"


def test_installed_once_and_taken_out_again(fleet: Fleet, table: Path) -> None:
    others = "# mine\n0 5 * * * backup 50\\%\n"
    table.write_text(others)
    for _ in range(2):
        assert "every hour" in say(fleet, "reap", "--install").out
    (line,) = table.read_text().removeprefix(others).splitlines()
    assert line.endswith(f"# evalfleet reap in {fleet.folder}")
    say(fleet, "reap", "--install", "--pools")
    assert " reap --pools " in table.read_text()
    assert len(table.read_text().splitlines()) == 3
    assert "is gone" in say(fleet, "reap", "--uninstall").out
    assert table.read_text() == others
    assert "no job" in say(fleet, "reap", "--uninstall").out


def test_the_line_works_with_next_to_no_environment(fleet: Fleet, table: Path) -> None:
    say(fleet, "reap", "--install")
    command = table.read_text().split(" ", 5)[5].replace(r"\%", "%")
    done = subprocess.run(["/bin/sh", "-c", command], env={}, timeout=60, check=False)
    assert done.returncode == 0, (fleet.home / "reap.log").read_text()
    assert "nothing of ours has expired" in (fleet.home / "reap.log").read_text()


def test_a_secret_is_not_written_down_and_a_job_that_would_not_find_it_is_told(
    fleet: Fleet, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_CLIENT_SECRET", "hunter2")
    assert "AZURE_CLIENT_SECRET" in say(fleet, "reap", "--install").err
    assert "hunter2" not in table.read_text()
    (fleet.folder / ".env").write_text("AZURE_CLIENT_SECRET=hunter2\n")
    assert say(fleet, "reap", "--install").err == ""


def test_where_it_cannot_be(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    say(fleet, "reap", "--install").refused("no evalfleet.toml")
    fleet.config("")
    monkeypatch.setenv("PATH", str(fleet.folder))
    say(fleet, "reap", "--install").refused("no crontab", "--install=github")
    workflow = say(fleet, "reap", "--install=github").out
    assert "run: evalfleet reap" in workflow
    assert "pip install 'evalfleet[azure,ssh] @ git+https://" in workflow
    assert "\n          AZURE_CLIENT_SECRET: ${{ secrets.AZURE_CLIENT_SECRET }}\n" in workflow


def test_a_workflow_has_what_the_places_need_and_no_more(fleet: Fleet) -> None:
    fleet.config('[places.shed]\nkind = "ssh"\nhosts = ["shed"]\n')
    workflow = say(fleet, "reap", "--install=github").out
    assert "pip install 'evalfleet[ssh] @ git+https://" in workflow
    assert workflow.endswith("- run: evalfleet reap\n"), "nothing logs in there but keys"


def test_folders_with_odd_names() -> None:
    folder = Path("/tmp/it's 100% mine")
    line = line_of(folder, folder / "home", "/usr/bin/python3", "/bin")
    assert line.count("%") == line.count(r"\%") > 0
    assert with_line(with_line("", folder, line), folder, None) == ""
    assert with_line(line + "\n", Path("/tmp/mine"), None) == line + "\n"
