"""Large runs are shown before their events are compared with their checksums: damage is told soon after."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path

import pytest

from evalfleet.errors import JournalForeign
from evalfleet.planning.workspace import Workspace
from evalfleet.views.dashboard.snapshots import KEPT
from evalfleet.web.export import write_html
from evalfleet.web.hub import Hub
from tests.large_run import EVENTS, damage, make_large_run
from tests.waiting import until_async


@pytest.fixture
def home(tmp_path: Path) -> Path:
    make_large_run(tmp_path)
    return tmp_path


async def _opened(hub: Hub) -> None:
    snapshot = json.loads(gzip.decompress(await hub.snapshot("r")))
    assert (snapshot["seq"], snapshot["run"]["status"]) == (EVENTS, "done")


def test_a_large_run_is_shown_and_then_verified_and_kept(home: Path) -> None:
    async def look() -> None:
        hub = Hub(Workspace.here(home))
        await _opened(hub)
        assert not (home / "r" / KEPT).exists(), "what is not verified is not kept"

        async def kept() -> bool:
            return (home / "r" / KEPT).exists()

        await until_async(kept, "the snapshot is kept")
        await hub.close()

    asyncio.run(look())


def test_no_file_is_made_of_a_damaged_run(home: Path) -> None:
    damage(home)
    with pytest.raises(JournalForeign, match="event 5000"):
        asyncio.run(write_html(Workspace.here(home), "r", home / "r.html", "none"))
    assert not (home / "r.html").exists()


def test_damage_of_a_large_run_is_told_after_it_is_shown_and_at_once_the_next_time(home: Path) -> None:
    damage(home)

    async def look() -> None:
        hub = Hub(Workspace.here(home))
        await _opened(hub)
        messages = [message async for message in hub.events("r", EVENTS)]
        assert messages[-1].startswith(b"event: damaged\n")
        assert b"event 5000 of 'r' is not as it was written" in messages[-1]
        assert not (home / "r" / KEPT).exists()
        with pytest.raises(JournalForeign, match="event 5000"):
            await hub.open("r")
        await hub.close()

    asyncio.run(look())
