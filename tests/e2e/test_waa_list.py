"""`evalfleet run waa` without a checkout: its list of tasks comes from the image's registry."""

from __future__ import annotations

import json
import os
import select
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.unit.image_making import docker_archive, oci_files
from tests.unit.image_registry import PASSWORD, TOKEN, USER, Registry, registry, serving

ASKED = ("run", "waa", "--model", "m", "--dry-run", "--set", "base_url=http://127.0.0.1:9/v1")
LOGIN = ("--set", f"registry_user={USER}", "--set", "registry_password=REGISTRY_PASSWORD")


def evalfleet(folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("EVALFLEET_")}
    return subprocess.run(
        [sys.executable, "-m", "evalfleet", *ASKED, *words],
        cwd=folder,
        env={**clean, "EVALFLEET_HOME": str(folder / "home"), "OPENAI_API_KEY": "k", **environ},
        text=True,
        capture_output=True,
        timeout=60,
    )


def told(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_dry_run_lists_tasks_of_the_registry_and_knows_wrong_ones(tmp_path: Path) -> None:
    with registry(oci_files()) as server:
        image = ("--set", f"image={server.image}")
        done = evalfleet(tmp_path, *image, "--json")
        assert told(done)["tasks"] == ["n1", "n2", "v1"]
        note = f"tasks: from {server.image}@{server.digest}"
        assert f"evalfleet: note: {note}\n" in done.stderr
        assert note in told(done)["warnings"]
        asked = len(server.blobs_asked())
        assert told(evalfleet(tmp_path, *image, "--json", "--domain", "vlc"))["tasks"] == ["v1"]
        assert len(server.blobs_asked()) == asked, "the second time nothing is read again"
        wrong = evalfleet(tmp_path, *image, "--task", "n3")
        assert wrong.returncode == 2
        assert "--task 'n3' is not a task of the benchmark; there are n1, n2, v1" in wrong.stderr


def test_a_login_is_shown_nowhere(tmp_path: Path) -> None:
    with registry(oci_files(), "token") as server:
        asked = ("--set", f"image={server.image}", *LOGIN, "--json")
        good = evalfleet(tmp_path, *asked, REGISTRY_PASSWORD=PASSWORD)
        assert told(good)["tasks"] == ["n1", "n2", "v1"]
        bad = evalfleet(tmp_path / "home", *asked, REGISTRY_PASSWORD="wr0ng", EVALFLEET_HOME="other")
        assert (bad.returncode, bad.stdout, len(bad.stderr.splitlines())) == (2, "", 1)
    kept = [file.read_text() for file in (tmp_path / "home").rglob("*") if file.is_file()]
    assert kept
    for secret in (PASSWORD, TOKEN, "wr0ng"):
        assert not [text for text in (good.stdout, good.stderr, bad.stderr, *kept) if secret in text]


def test_a_saved_image_does_as_well(tmp_path: Path) -> None:
    docker_archive(tmp_path / "waa.tar")
    assert told(evalfleet(tmp_path, "--set", "waa=waa.tar", "--json"))["tasks"] == ["n1", "n2", "v1"]


# -- a registry behind a proxy, with an authority of its own ------------------------------------------


class Proxy(BaseHTTPRequestHandler):
    """Knows where `registry.test` is, which nobody else does."""

    port: int
    asked: list[str]

    def do_CONNECT(self) -> None:
        self.asked.append(self.path)
        with socket.create_connection(("127.0.0.1", self.port)) as there:
            self.send_response(200)
            self.end_headers()
            ends = {self.connection: there, there: self.connection}
            with suppress(OSError):
                while data := (end := select.select(list(ends), [], [], 30)[0][0]).recv(65536):
                    ends[end].sendall(data)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def behind(tmp_path: Path) -> Iterator[tuple[Registry, type[Proxy], dict[str, str]]]:
    """A registry, the proxy before it, and the environment that leads there."""
    certificate, key = tmp_path / "ca.pem", tmp_path / "key.pem"
    subject = ("-subj", "/CN=registry.test", "-addext", "subjectAltName=DNS:registry.test")
    made = ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    subprocess.run(
        [*made, "-days", "2", *subject, "-keyout", str(key), "-out", str(certificate)],
        check=True,
        capture_output=True,
        timeout=30,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with registry(oci_files(), context=context) as server:
        server.realm = "https://registry.test/token"

        class Mine(Proxy):
            port = server.server_port
            asked: list[str] = []  # noqa: RUF012

        proxy = ThreadingHTTPServer(("127.0.0.1", 0), Mine)
        environ = {"HTTPS_PROXY": f"http://127.0.0.1:{proxy.server_port}", "SSL_CERT_FILE": str(certificate)}
        with serving(proxy):
            yield server, Mine, environ


def test_proxies_and_authorities_are_those_of_the_environment(
    tmp_path: Path, behind: tuple[Registry, type[Proxy], dict[str, str]]
) -> None:
    server, proxy, environ = behind
    asked = ("--set", "image=registry.test/windowsarena/winarena", "--json")
    assert told(evalfleet(tmp_path, *asked, **environ))["tasks"] == ["n1", "n2", "v1"]
    assert set(proxy.asked) == {"registry.test:443"}
    trusting = {"HTTPS_PROXY": environ["HTTPS_PROXY"], "EVALFLEET_HOME": str(tmp_path / "other")}
    doubted = evalfleet(tmp_path, *asked, **trusting)
    assert doubted.returncode == 2
    assert "SSL_CERT_FILE names the file of another authority" in doubted.stderr
    server.blobs_at = "http://registry.test"
    led_out = evalfleet(tmp_path, *asked, **{**environ, "EVALFLEET_HOME": str(tmp_path / "other")})
    assert led_out.returncode == 2
    assert "registry.test answers 307" in led_out.stderr, "out of TLS nobody leads us"
