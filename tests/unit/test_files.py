"""Files that others read: replaced whole, or created once."""

from __future__ import annotations

import stat
from pathlib import Path

from evalfleet.files import OURSELVES, create, replace


def test_of_two_who_create_a_file_the_first_stays_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "key"
    create(path, b"first", mode=OURSELVES)
    create(path, b"second")
    assert path.read_bytes() == b"first"
    assert stat.S_IMODE(path.stat().st_mode) == OURSELVES
    replace(path, b"third", mode=OURSELVES)
    assert path.read_bytes() == b"third"
    assert [found.name for found in tmp_path.iterdir()] == ["key"]
