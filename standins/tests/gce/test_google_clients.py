"""Google's own clients against the stand-in: independent witnesses that it speaks Compute Engine's API.

They have an environment of their own: `make test-gear` makes it. GOOGLE_CLIENTS names the Python of another.
Every call and every answer is checked against Google's discovery document as well, where that is at hand.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from standins.gce import StandIn
from tests.cloud.gce_places import FAST
from tests.waiting import PATIENCE_S

CLIENTS = os.environ.get("GOOGLE_CLIENTS", "")
pytestmark = pytest.mark.skipif(not CLIENTS, reason="NO TEST BY GOOGLE'S OWN CLIENTS: not installed")
WITNESSES = Path(__file__).with_name("witnesses.py")
FULL = "us-central1-b"


@pytest.fixture
def google() -> Iterator[StandIn]:
    with StandIn(timing=FAST) as made:
        made.cloud.catalog.capacity[FULL, ""] = 0
        yield made
        assert not made.left()
        assert not made.meters.running()


def witness(*words: str) -> Any:
    """What it says, with no login of anybody's at hand."""
    done = subprocess.run(
        [CLIENTS, str(WITNESSES), *words],
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_client_that_is_made_from_the_discovery_document(google: StandIn) -> None:
    found = witness("api", google.anonymous_endpoint, FULL)
    assert found["full"][0].startswith("ZONE_RESOURCE_POOL_EXHAUSTED")
    assert (found["inserted"], found["status"], found["deleted"]) == ("DONE", "RUNNING", "DONE")
    assert (found["taken"], found["told_no_key"], found["gone"]) == (409, 404, 404)
    assert found["listed"] == ["witness-1"]
    assert found["warned"], "zones without machines have a warning in their place"
    assert found["moved_while_it_ran"] == 400, "a limit is moved only while a machine is stopped"
    assert (found["stopped"], found["ends_stopped"]) == ("TERMINATED", None)
    assert found["ends"] < found["ends_again"]
    assert found["serial"]
    assert found["cpus"] == 4


def test_the_generated_library(google: StandIn) -> None:
    found = witness("sdk", google.anonymous_endpoint, FULL)
    assert "ZONE_RESOURCE_POOL_EXHAUSTED" in found["full"]
    assert (found["status"], found["stopped"], found["gone"]) == ("RUNNING", "TERMINATED", 404)
    assert found["labels"] == {"team": "witness"}
    assert found["ends"]
    assert found["listed"] == ["witness-1"]


def test_a_service_accounts_key_gets_a_token_at_its_own_token_uri(google: StandIn) -> None:
    found = witness("login", google.endpoint, str(google.key), str(google.ca))
    assert (found["status"], found["name"]) == (200, google.project)
    assert found["without"] == 401
