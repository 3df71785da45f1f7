"""Preparing the demo: what can be known without a network."""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path

import pytest

from evalfleet.demo import prepare
from tests.waiting import until


def test_paths_with_spaces_quotes_and_accents_reach_the_command(tmp_path: Path) -> None:
    python = Path('/tmp/a "quoted" föld\\er/bin/python')
    prepare.write_benchmark(prepare.MINIWOB, tmp_path, python, "/opt/Google Chrome/chrome")
    benchmark = tomllib.loads((tmp_path / "benchmark.toml").read_text(encoding="utf-8"))
    assert benchmark["command"][0] == str(python)
    assert benchmark["command"][-1] == "/opt/Google Chrome/chrome"
    assert all((tmp_path / name).exists() for name in (*benchmark["files"], benchmark["tasks"]))


def test_what_an_interrupted_preparation_left_is_made_anew(tmp_path: Path) -> None:
    left = prepare.fresh(tmp_path, "x")
    (left / "half").write_text("written")
    part = prepare.fresh(tmp_path, "x")
    assert list(tmp_path.iterdir()) == [part]
    assert list(part.iterdir()) == []


def test_a_failing_command_is_one_line_with_a_hint() -> None:
    script = "import sys; sys.exit('WARNING: x\\nERROR: No matching distribution\\nnotice')"
    with pytest.raises(prepare.DemoError) as error:
        prepare.command([sys.executable, "-c", script], "install it", "is PyPI reachable?")
    assert str(error.value) == "could not install it: ERROR: No matching distribution; is PyPI reachable?"


def test_a_folder_that_cannot_be_written_is_a_demo_error(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    with pytest.raises(prepare.DemoError, match="cannot write"):
        prepare.prepare(taken, lambda line: None)


def test_a_browser_that_does_not_work_fails_the_trial(tmp_path: Path) -> None:
    prepare.write_benchmark(prepare.MINIWOB, tmp_path, Path(sys.executable), "/bin/false")
    with pytest.raises(prepare.TrialFailed):
        prepare.try_once(prepare.MINIWOB, tmp_path, Path(sys.executable), "/bin/false")


def test_an_upgraded_browser_is_tried_again(tmp_path: Path) -> None:
    browser = tmp_path / "chrome"
    browser.write_text("1")
    before = prepare.folder_key(prepare.MINIWOB, Path("p"), str(browser))
    assert prepare.folder_key(prepare.MINIWOB, Path("p"), str(browser)) == before
    os.utime(browser, (1, 1))
    assert prepare.folder_key(prepare.MINIWOB, Path("p"), str(browser)) != before


def test_somebody_who_waits_is_told_every_while_that_it_goes_on() -> None:
    said: list[str] = []
    with prepare.ticking(said.append, 0.01):
        until(lambda: len(said) >= 2, "two ticks")
    assert all(line.startswith("  ... ") and line.endswith(" s") for line in said)
    told = len(said)
    with prepare.ticking(said.append):
        pass
    assert len(said) == told, "what is quick says nothing"
