"""A damaged run is refused, and no report file is made of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from evalfleet.errors import JournalForeign
from evalfleet.planning.workspace import Workspace
from evalfleet.web.export import write_html
from tests.large_run import damage, make_large_run


def test_no_file_is_made_of_a_damaged_run(tmp_path: Path) -> None:
    make_large_run(tmp_path)
    asyncio.run(write_html(Workspace.here(tmp_path), "r", tmp_path / "whole.html", "none"))
    assert (tmp_path / "whole.html").exists()
    damage(tmp_path)
    with pytest.raises(JournalForeign, match="event 5000"):
        asyncio.run(write_html(Workspace.here(tmp_path), "r", tmp_path / "r.html", "none"))
    assert not (tmp_path / "r.html").exists()
