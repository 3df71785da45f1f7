"""A short run of the fuzzer, and that it finds planted faults. `python -m bench hostile` runs ten minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.fuzz import MOST_TOLD, Target, Unfit, fuzz, printable, targets


@pytest.mark.parametrize("name", [each.name for each in targets()])
def test_nothing_that_a_host_sends_is_a_crash_or_a_write_outside(name: str) -> None:
    found = fuzz(2.0, tuple(each for each in targets() if each.name == name), seed=7)
    assert found.crashes == []
    assert found.outside == []
    assert found.inputs[name] > 1


def crash_at_a_bracket(data: bytes, folder: Path) -> None:
    if b"[" in data:
        raise ValueError("a reader that falls over")


def write_above(data: bytes, folder: Path) -> None:
    (folder.parent / "home" / ".bashrc").write_bytes(data)


def show_anything(data: bytes, folder: Path) -> None:
    printable(data.decode("latin-1"))


def test_a_reader_that_falls_over_is_found() -> None:
    found = fuzz(60.0, (Target("bad", (b"x",), crash_at_a_bracket),))
    assert len(found.crashes) == MOST_TOLD
    assert "a reader that falls over" in found.crashes[0]


def test_a_write_outside_is_found() -> None:
    assert fuzz(60.0, (Target("bad", (b"x",), write_above),)).outside


def test_a_control_character_on_the_terminal_is_found() -> None:
    found = fuzz(60.0, (Target("bad", (b"x",), show_anything),))
    assert Unfit.__name__ in found.crashes[0]
