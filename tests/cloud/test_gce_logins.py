"""Credentials of every kind that google-auth knows: each gets in to Compute Engine, and to Cloud Storage.

google-auth's own code runs. Where it knows only Google's own hosts, a proxy leads from those to the stand-in.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from evalfleet.errors import PlaceError
from evalfleet.mirror import StoreAway, StoreRefused, open_objects
from evalfleet.testing.harness import raised
from standins.cloud.name_proxy import leading_to
from standins.gce import StandIn
from standins.gce.identity import EMAIL, USER_TOKEN, WORKLOAD_TOKEN
from standins.gcs import CloudStorage
from tests.cloud.gce_places import FAST, place
from tests.waiting import PATIENCE_S

ACT_AS = f"https://iamcredentials.googleapis.com/v1/projects/-/serviceAccounts/{EMAIL}:generateAccessToken"
USER = {"client_id": "c", "client_secret": "s", "refresh_token": USER_TOKEN}


@pytest.fixture(scope="module")
def google() -> Iterator[StandIn]:
    with StandIn(timing=FAST) as made:
        yield made


@pytest.fixture(scope="module")
def storage(google: StandIn) -> Iterator[CloudStorage]:
    with CloudStorage("bucket") as made:
        made.identity = google.identity
        yield made


@pytest.fixture
def asked(google: StandIn, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Hosts of Google's that were asked for, and were the stand-in."""
    there = urlsplit(google.endpoint)
    with leading_to(str(there.hostname), there.port or 0) as (proxy, hosts):
        monkeypatch.setenv("HTTPS_PROXY", proxy)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("SSL_CERT_FILE", str(google.ca))
        yield hosts


def workload(google: StandIn, folder: Path) -> dict[str, Any]:
    (folder / "subject").write_text(WORKLOAD_TOKEN)
    return {
        "type": "external_account",
        "audience": "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/providers/x",
        "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
        "token_url": json.loads(google.key.read_text())["token_uri"],
        "credential_source": {"file": str(folder / "subject")},
    }


def by_script(folder: Path) -> dict[str, Any]:
    """What says who we are is a program's answer: google-auth runs it only where that is allowed."""
    answer = {"version": 1, "success": True, "token_type": "urn:ietf:params:oauth:token-type:jwt"}
    script = folder / "tell"
    script.write_text(f"#!/bin/sh\necho '{json.dumps({**answer, 'id_token': WORKLOAD_TOKEN})}'\n")
    script.chmod(0o700)
    return {"executable": {"command": str(script), "timeout_millis": 30_000}}


def credentials(kind: str, google: StandIn, folder: Path) -> dict[str, Any]:
    """The file that GOOGLE_APPLICATION_CREDENTIALS names."""
    token_url = json.loads(google.key.read_text())["token_uri"]
    files: dict[str, dict[str, Any]] = {
        "a service account's key": json.loads(google.key.read_text()),
        "a person": {"type": "authorized_user", **USER},
        "a person who acts as a service account": {
            "type": "impersonated_service_account",
            "source_credentials": {"type": "authorized_user", **USER},
            "service_account_impersonation_url": ACT_AS,
        },
        "a workload": workload(google, folder),
        "a workload that acts as a service account": {
            **workload(google, folder),
            "service_account_impersonation_url": ACT_AS,
        },
        "a workload by a program": {**workload(google, folder), "credential_source": by_script(folder)},
        "a person of another identity provider": {
            "type": "external_account_authorized_user",
            "audience": "//iam.googleapis.com/locations/global/workforcePools/p/providers/x",
            **USER,
            "token_url": token_url,
            "token_info_url": f"{token_url}info",
        },
    }
    return files[kind]


@pytest.mark.parametrize(
    ("kind", "hosts"),
    [
        ("a service account's key", set[str]()),
        ("a person", {"oauth2.googleapis.com"}),
        (
            "a person who acts as a service account",
            {"oauth2.googleapis.com", "iamcredentials.googleapis.com"},
        ),
        ("a workload", set[str]()),
        ("a workload that acts as a service account", {"iamcredentials.googleapis.com"}),
        ("a workload by a program", set[str]()),
        ("a person of another identity provider", set[str]()),
    ],
)
def test_each_kind_gets_in_to_machines_and_to_buckets_and_is_told_when_it_is_over(
    google: StandIn,
    storage: CloudStorage,
    asked: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    hosts: set[str],
) -> None:
    monkeypatch.setenv("GOOGLE_EXTERNAL_ACCOUNT_ALLOW_EXECUTABLES", "1")
    (tmp_path / "login.json").write_text(json.dumps(credentials(kind, google, tmp_path)))
    environ = {
        "GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / "login.json"),
        "GOOGLE_CLOUD_PROJECT": google.project,
        "STORAGE_EMULATOR_HOST": storage.url,
    }

    async def use() -> None:
        made = place(google, tmp_path, environ=environ)
        try:
            assert not await made.list("run")
        finally:
            await made.close()
        objects = open_objects(f"gs://bucket/{tmp_path.name}", environ)
        await objects.create("a", b"x")
        google.identity.revoke()  # the next token is another one
        made = place(google, tmp_path, environ=environ)
        try:
            assert not await made.list("run")
        finally:
            await made.close()
        assert await open_objects(f"gs://bucket/{tmp_path.name}", environ).read("a") == b"x"
        google.identity.is_disabled = True
        with pytest.raises(StoreRefused, match="we may not use it with these credentials"):
            await open_objects("gs://bucket/x", environ).names("a")

    try:
        asyncio.run(use())
    finally:
        google.identity.is_disabled = False
    assert hosts <= set(asked)


def test_a_machine_of_googles_writes_to_a_bucket_by_its_own_account(
    google: StandIn, storage: CloudStorage, tmp_path: Path
) -> None:
    """By another process: google-auth reads the metadata server's address when it is imported."""
    there = urlsplit(google.anonymous_endpoint).netloc
    program = (
        "import asyncio, os; from evalfleet.mirror import open_objects\n"
        "asyncio.run(open_objects('gs://bucket/machine', os.environ).create('a', b'by the machine'))\n"
    )
    environ = {"GCE_METADATA_HOST": there, "GCE_METADATA_IP": there, "STORAGE_EMULATOR_HOST": storage.url}
    environ |= {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], env=environ, check=True, timeout=PATIENCE_S)
    assert storage.buckets["bucket"]["machine/a"] == b"by the machine"


def test_a_person_whose_network_is_down_is_not_told_that_he_is_not_let_in(
    storage: CloudStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    (tmp_path / "login.json").write_text(json.dumps({"type": "authorized_user", **USER}))
    environ = {
        "GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / "login.json"),
        "STORAGE_EMULATOR_HOST": storage.url,
    }

    async def use() -> None:
        with pytest.raises(StoreAway, match="nobody answers who gives tokens"):
            await open_objects("gs://bucket/x", environ).names("a")

    asyncio.run(use())


def test_a_network_that_answers_in_googles_stead_is_a_network_that_is_down(
    google: StandIn, tmp_path: Path
) -> None:
    """As those of hotels do, with a page."""

    class Page(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>Welcome to our hotel</html>")

        def log_message(self, format: str, *args: object) -> None: ...

    async def use(environ: dict[str, str]) -> None:
        made = place(google, tmp_path, environ=environ)
        error = await raised(PlaceError, made.list("run"))
        await made.close()
        assert error.transient
        assert "\n" not in str(error)

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        google.identity.write_key(tmp_path / "login.json", f"http://127.0.0.1:{server.server_port}/token")
        asyncio.run(use({"GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / "login.json")}))
        server.shutdown()
