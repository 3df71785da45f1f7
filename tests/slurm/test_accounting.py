"""A cluster that keeps accounts: Slurm's own slurmdbd says who may use what."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest

from evalfleet.errors import PlaceError
from evalfleet.model import Needs
from evalfleet.places.slurm import SlurmPlace, SlurmSettings
from evalfleet.ports import PlaceContext
from tests.slurm.test_run import desk, nothing_left

from .accounting import accounting
from .cluster import Cluster, missing


@pytest.mark.nightly
async def test_accounts_and_qualities_of_service_are_those_of_the_cluster(tmp_path: Path) -> None:
    assert missing() is None, missing()
    cluster = Cluster(tmp_path / "slurm", 2)
    with accounting(cluster):
        try:
            cluster.ask("sacctmgr", "-i", "add", "cluster", "test")
            cluster.start()
            for order in (
                ("add", "account", "lab"),
                ("add", "qos", "good"),
                ("add", "qos", "others"),
                ("add", "user", "root", "account=lab", "qos=good", "defaultqos=good"),
            ):
                cluster.ask("sacctmgr", "-i", *order)
            for settings, words, setting in (
                ({"account": "nope"}, "account", "account"),
                ({"account": "lab", "qos": "nope"}, "qos", "qos"),
                ({"account": "lab", "qos": "others"}, "qos", "qos"),
            ):
                told = await refusal(cluster, tmp_path, settings)
                assert words in told.lower(), told
                assert f"change `{setting}" in told, told
                assert "\n" not in told
            at = desk(cluster, tmp_path / "f", 2, 'account = "lab"\nqos = "good"\n')
            done = at("run", "b.toml", "--on", "hpc", "--workers", "2", "--name", "r")
            assert done.code == 0, done
            kept = cluster.ask("sacct", "-n", "-X", "-P", "-o", "account,qos,state").splitlines()
            assert set(kept) == {"lab|good|CANCELLED by 0"}, kept
            nothing_left(cluster, tmp_path / "f")
        finally:
            cluster.stop()


async def refusal(cluster: Cluster, folder: Path, settings: dict[str, Any]) -> str:
    context = PlaceContext(folder, secrets.token_hex(3), environ=cluster.environ)
    place = SlurmPlace.make("hpc", SlurmSettings(folder=str(folder), **settings), context)
    with pytest.raises(PlaceError) as refused:
        await place.offers(Needs())
    assert not refused.value.transient
    return str(refused.value)
