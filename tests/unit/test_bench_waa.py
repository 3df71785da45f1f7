"""The model of Windows Agent Arena's durations that the benchmarks use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.waa_durations import COLD, LIMIT_S, STOPPED, VARIABLE, durations, machine_s, tasks


def test_without_the_list_there_are_as_many_tasks_a_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    named = tasks()
    assert len(named) == len({each.id for each in named}) == 154
    assert sum(each.domain == "libreoffice_calc" for each in named) == 24


def test_the_list_of_a_checkout_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "src/win-arena-container/client/evaluation_examples_windows"
    folder.mkdir(parents=True)
    (folder / "test_all.json").write_text(json.dumps({"vlc": ["a", "b"], "clock": ["c"]}))
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert [(each.domain, each.id) for each in tasks()] == [("vlc", "a"), ("vlc", "b"), ("clock", "c")]


def test_a_wrong_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(RuntimeError, match=r"no test_all\.json"):
        tasks()


def test_durations_are_drawn_from_the_seed_and_within_what_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    drawn = [seconds for seed in range(20) for seconds in durations(seed, tasks())]
    assert durations(3, tasks()) == durations(3, tasks()) != durations(4, tasks())
    assert min(drawn) >= 13.0  # ten seconds, and a step
    assert max(drawn) <= LIMIT_S
    assert 146 < sum(drawn) / len(drawn) < 513


def test_a_stopped_machine_comes_sooner_than_a_new_one() -> None:
    for seed in range(20):
        assert 360 <= machine_s(seed, "m", STOPPED) <= 660 < 1500 <= machine_s(seed, "m", COLD) <= 2580
