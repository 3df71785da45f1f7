"""Machines of Azure Batch that are real containers, by podman: here the image matters, and its registry."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from standins.azure_batch import StandIn
from standins.azure_batch.containers import PodmanNodes
from standins.podman import Podman
from standins.registry import Registry
from tests.cloud.batch_places import FAST
from tests.cloud.mail_desk import nothing_left
from tests.cloud.real_containers import PASSWORD, marks, podman, private
from tests.cloud.services import desk
from tests.desk import Desk

__all__ = ["podman", "private"]  # fixtures
pytestmark = marks("BATCH")


@pytest.fixture
def account(podman: Podman) -> Iterator[StandIn]:
    with StandIn(nodes=PodmanNodes(podman), timing=FAST) as made:
        yield made


def ran(at: Desk, *words: str, **variables: str) -> Any:
    return at("run", "b.toml", "--on", "p", "--workers", "1", "--name", "r", *words, env=variables)


def test_a_private_image_comes_by_its_password_and_tasks_do_not_see_it(
    account: StandIn, private: Registry, tmp_path: Path
) -> None:
    image = private.name("evals/tiny")
    login = {"registry_user": "evals", "registry_password": "ACR_PASSWORD", "isolation": "none"}
    at = desk(account, tmp_path, 1, sleeps=0, container=image, **login)
    script = tmp_path / "run.sh"
    script.write_text(f'cat /proc/*/environ > "$EVALFLEET_OUT/environ"\n{script.read_text()}')
    done = ran(at, ACR_PASSWORD=PASSWORD)
    assert done.code == 0, done
    (environ,) = (tmp_path / "results/r").glob("t*/t*.0/environ")
    assert b"EVALFLEET_OUT" in environ.read_bytes()
    holders = [
        file for file in tmp_path.rglob("*") if file.is_file() and PASSWORD.encode() in file.read_bytes()
    ]
    assert not holders
    assert PASSWORD not in json.dumps([done.out, done.err])
    nothing_left(account)


@pytest.mark.parametrize("password", ["wrong", ""])
def test_a_password_that_is_wrong_or_missing_stops_the_run_at_once_with_the_remedy(
    account: StandIn, private: Registry, tmp_path: Path, password: str
) -> None:
    login: dict[str, Any] = {"registry_user": "evals", "registry_password": "ACR_PASSWORD"}
    at = desk(account, tmp_path, 1, container=private.name("evals/tiny"), **login)
    done = ran(at, ACR_PASSWORD=password)
    assert done.code != 0
    told = done.out + done.err
    assert "ACR_PASSWORD" in told if not password else "unauthorized" in told
    assert password or not account.do(lambda: list(account.meters.spans)), "a node was had for nothing"
    tokens = [line for line in private.asked if "/v2/token" in line]
    assert len(tokens) <= 2, f"it was tried again and again: {tokens}"
    nothing_left(account)
