"""Azurite, Microsoft's own emulator of blobs, for nightly tests."""

from __future__ import annotations

import base64
import hmac
import json
import os
import re
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path

from tests.waiting import until

AZURITE_ACCOUNT = "devstoreaccount1"
# the same for everybody, by its documentation
AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
VERSION = "2021-12-02"


@contextmanager
def azurite(folder: Path, ca: Path | None = None) -> Iterator[Mapping[str, str]]:
    """A server with the container `bucket`. It is fetched once, by npm, unless AZURITE names its folder.

    `ca`: it serves https by `server.pem` beside that file, and lets in logins, too.
    """
    kept = Path(os.environ.get("AZURITE") or Path.home() / ".cache" / "evalfleet-azurite")
    main = kept / "node_modules/azurite/dist/src/blob/main.js"
    if not main.exists():
        kept.mkdir(parents=True, exist_ok=True)
        (kept / "package.json").write_text("{}")
        subprocess.run(["npm", "install", "azurite@3"], cwd=kept, check=True, capture_output=True)
    flags = ["--blobPort", "0", "--location", str(folder), "--skipApiVersionCheck", "--disableTelemetry"]
    scheme, trusted = "http", None
    if ca is not None:
        own = str(ca.with_name("server.pem"))
        flags += ["--oauth", "basic", "--cert", own, "--key", own]
        scheme, trusted = "https", ssl.create_default_context(cafile=str(ca))
    folder.mkdir(exist_ok=True)
    log = folder / "azurite.log"
    with log.open("wb") as said:
        server = subprocess.Popen(["node", str(main), *flags], stdout=said)
    try:
        listens = re.compile(r"listens on https?://127\.0\.0\.1:(\d+)")
        port = until(lambda: listens.search(log.read_text()), log.read_text)[1]
        endpoint = f"{scheme}://127.0.0.1:{port}/{AZURITE_ACCOUNT}"
        until(lambda: _made_container(f"{endpoint}/bucket?restype=container", trusted), "Azurite")
        keys = {"AZURE_STORAGE_ACCOUNT_NAME": AZURITE_ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": AZURITE_KEY}
        yield {**keys, "AZURE_STORAGE_ENDPOINT": endpoint}
    finally:
        server.kill()
        server.wait()


def login_token() -> str:
    """As Entra ID gives one for storage; Azurite reads it, and does not ask who has signed it."""
    now, tenant = int(time.time()), "66666666-7777-8888-9999-000000000000"
    claims = {"aud": "https://storage.azure.com", "iss": f"https://sts.windows.net/{tenant}/", "ver": "1.0"}
    claims |= {"tid": tenant, "oid": "11111111-2222-3333-4444-555555555555"}
    times = {"iat": now - 60, "nbf": now - 60, "exp": now + 3600}
    parts = [json.dumps(part).encode() for part in ({"alg": "RS256", "typ": "JWT"}, {**claims, **times})]
    return ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in (*parts, b"nobody"))


def _made_container(url: str, trusted: ssl.SSLContext | None) -> bool:
    date, version = formatdate(usegmt=True), VERSION
    resource = f"/{AZURITE_ACCOUNT}/{AZURITE_ACCOUNT}/bucket\nrestype:container"
    signed = "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:{version}\n{resource}"
    digest = hmac.new(base64.b64decode(AZURITE_KEY), signed.encode(), "sha256").digest()
    key = f"SharedKey {AZURITE_ACCOUNT}:{base64.b64encode(digest).decode()}"
    headers = {"x-ms-date": date, "x-ms-version": version, "Authorization": key}
    try:
        urllib.request.urlopen(
            urllib.request.Request(url, method="PUT", headers=headers), context=trusted
        ).close()
        return True
    except urllib.error.HTTPError:
        raise
    except OSError:
        return False
