"""Google's own clients against the stand-ins: independent witnesses that they speak Google's protocols.

They have an environment of their own: `make test-gear` makes it. GOOGLE_CLIENTS names the Python of another.
Every call and every answer of Compute Engine's is checked against Google's discovery document as well, where
that is at hand; of Cloud Storage's XML API there is none, and gsutil is its witness.
"""

from __future__ import annotations

import asyncio
import configparser
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from evalfleet.mirror import open_objects
from evalfleet.mirror.objects import ObjectExists
from standins.gce import StandIn
from standins.gcs import PAGE, CloudStorage
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


class Gsutil:
    """Google's own command line for Cloud Storage, told to use its XML API, and the stand-in's address."""

    def __init__(self, storage: CloudStorage, folder: Path) -> None:
        storage.environ(folder)
        host, _, port = storage.url.removeprefix("http://").partition(":")
        sections: dict[str, dict[str, object]] = {
            "Credentials": {"gs_service_key_file": folder / "key.json", "gs_host": host, "gs_port": port},
            "Boto": {"is_secure": False, "num_retries": 1},
            "OAuth2": {"provider_token_uri": f"{storage.url}/token", "token_cache": "in_memory"},
            "GSUtil": {"prefer_api": "xml", "state_dir": folder, "software_update_check_period": 0},
        }
        settings = configparser.ConfigParser()
        settings.read_dict(sections)
        with (folder / "boto").open("w") as file:
            settings.write(file)
        self._environ = {"PATH": os.environ["PATH"], "HOME": str(folder), "BOTO_CONFIG": str(folder / "boto")}

    def __call__(self, *words: str, code: int = 0) -> str:
        """What it says, all of it."""
        done = self._run(words)
        assert done.returncode == code, done.stderr
        return (done.stdout + done.stderr).decode()

    def read(self, url: str) -> bytes:
        """By `cat`: its `cp` does not bring what is large from a port that is not Google's (boto fails)."""
        done = self._run(("cat", url))
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _run(self, words: Sequence[str]) -> subprocess.CompletedProcess[bytes]:
        argv = [str(Path(CLIENTS).with_name("gsutil")), *words]
        return subprocess.run(argv, env=self._environ, capture_output=True, timeout=PATIENCE_S)


def test_gsutil_finds_what_our_client_wrote_and_our_client_what_gsutil_wrote(tmp_path: Path) -> None:
    async def write() -> None:
        for name, content in written.items():
            await ours.create(name, content)
        await ours.replace("r/big", big)

    async def read() -> None:
        assert await ours.read("r/theirs") == b"from gsutil\n"
        assert await ours.read("r/journal/000000001.jsonl") is None
        with pytest.raises(ObjectExists):
            await ours.create("r/theirs", b"x")
        assert await ours.folders() == ["r"]
        left = [*list(written)[1:], "r/theirs", "r/big"]
        assert await ours.names("") == sorted(left)

    written = {f"r/journal/{n:09}.jsonl": f"line {n}".encode() for n in range(1, PAGE + 3)}
    big, theirs = tmp_path / "big", tmp_path / "theirs"
    big.write_bytes(os.urandom(12 << 20))
    theirs.write_text("from gsutil\n")
    with CloudStorage("bucket", "read-only") as storage:
        storage.read_only.add("read-only")
        gsutil = Gsutil(storage, tmp_path)
        ours = open_objects("gs://bucket/runs", storage.environ(tmp_path))
        asyncio.run(write())
        assert any("uploadId" in request for request in storage.requests), "what is large goes in parts"
        listed = gsutil("ls", "-r", "gs://bucket/runs/**").split()
        assert listed == [f"gs://bucket/runs/{name}" for name in sorted([*written, "r/big"])]
        assert gsutil.read("gs://bucket/runs/r/big") == big.read_bytes()
        only_new = ("-h", "x-goog-if-generation-match:0", "cp", str(theirs))
        gsutil(*only_new, "gs://bucket/runs/r/theirs")
        refused = gsutil(*only_new, "gs://bucket/runs/r/journal/000000002.jsonl", code=1)
        assert "PreconditionException: 412" in refused
        gsutil("rm", "gs://bucket/runs/r/journal/000000001.jsonl")
        assert "AccessDenied" in gsutil("cp", str(theirs), "gs://read-only/x", code=1)
        assert "bucket does not exist" in gsutil("ls", "gs://absent/", code=1)
        asyncio.run(read())
