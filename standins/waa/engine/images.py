"""Images and where they come from: pull, login, image inspect."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import sys
import time

from . import flags
from .errors import Failure, daemon
from .store import ROOT, locked, quoted, read_json, settings, write_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

AUTH_FILE = os.path.join(os.environ.get("HOME", "/root"), ".docker", "config.json")


def full(reference: str) -> str:
    """With a tag, as `images` shows it."""
    last = reference.rpartition("/")[2]
    return reference if ":" in last or "@" in last else reference + ":latest"


def server_of(reference: str) -> str:
    first, slash, _ = reference.partition("/")
    named = slash and ("." in first or ":" in first or first == "localhost")
    return first if named else "docker.io"


def local(reference: str) -> dict[str, Any] | None:
    path = os.path.join(ROOT, "images", quoted(full(reference)))
    found: dict[str, Any] | None = read_json(os.path.join(path, "image.json"))
    return None if found is None else {**found, "path": path, "reference": full(reference)}


def pull_command(argv: list[str]) -> int:
    given = flags.parse("pull", argv, ("quiet", "all-tags"), ("platform",), {"q": "quiet"})
    if len(given.rest) != 1:
        raise Failure("\"docker pull\" requires exactly 1 argument.\nSee 'docker pull --help'.")
    pull(given.rest[0], quiet=given.has("quiet"))
    return 0


def pull(reference: str, *, quiet: bool = False, out: Any = None) -> None:
    reference, out = full(reference), out or sys.stdout
    source = os.path.join(settings().get("registry", "/nowhere"), quoted(reference))
    offered = read_json(os.path.join(source, "image.json"))
    if offered is None:
        raise _refused(reference)
    _check_login(reference, offered)
    layers = [hashlib.sha256(f"{reference}{n}".encode()).hexdigest()[:12] for n in range(3)]

    def say(line: str) -> None:
        if not quiet:
            print(line, file=out, flush=True)

    say(f"{reference.rpartition(':')[2]}: Pulling from {reference.rpartition(':')[0]}")
    for layer in layers:
        say(f"{layer}: Pulling fs layer")
    for layer in layers:
        time.sleep(float(offered.get("pull_s", 0)) / len(layers))
        say(f"{layer}: Download complete")
    if offered.get("pull_fails"):
        raise Failure(str(offered["pull_fails"]))
    fresh = _keep(source, reference)
    for layer in layers:
        say(f"{layer}: Pull complete")
    say(f"Digest: sha256:{hashlib.sha256(reference.encode()).hexdigest()}")
    what = "Downloaded newer image for" if fresh else "Image is up to date for"
    say(f"Status: {what} {reference}")
    print(
        reference if server_of(reference) != "docker.io" else f"docker.io/{reference}", file=out, flush=True
    )


def _keep(source: str, reference: str) -> bool:
    target = os.path.join(ROOT, "images", quoted(reference))
    with locked():
        fresh = not os.path.exists(target)
        if fresh:
            draft = f"{target}.{os.getpid()}"
            shutil.copytree(source, draft, symlinks=True)
            os.replace(draft, target)
    return fresh


def _refused(reference: str) -> Failure:
    name, _, tag = reference.rpartition(":")
    folder = settings().get("registry", "/nowhere")
    known = os.listdir(folder) if os.path.isdir(folder) else []
    if any(entry.startswith(quoted(name + ":")) for entry in known):
        return daemon(f"manifest for {name}:{tag} not found: manifest unknown: manifest unknown")
    return daemon(
        f"pull access denied for {name}, repository does not exist or may require 'docker login': "
        "denied: requested access to the resource is denied"
    )


def _check_login(reference: str, offered: dict[str, Any]) -> None:
    server = server_of(reference)
    if offered.get("private") and not _is_known(server, _saved(server)):
        path = reference.partition("/")[2].replace(":", "/manifests/")
        raise daemon(f'Head "https://{server}/v2/{path}": unauthorized: authentication required')


def _is_known(server: str, login: tuple[str, str] | None) -> bool:
    users = settings().get("logins", {}).get(server, {})
    return login is not None and users.get(login[0]) == login[1]


def _saved(server: str) -> tuple[str, str] | None:
    entry = (read_json(AUTH_FILE) or {}).get("auths", {}).get(server)
    if entry is None:
        return None
    user, _, password = base64.b64decode(entry["auth"]).decode().partition(":")
    return user, password


def login(argv: list[str]) -> int:
    given = flags.parse(
        "login", argv, ("password-stdin",), ("username", "password"), {"u": "username", "p": "password"}
    )
    server = given.rest[0] if given.rest else "docker.io"
    if given.has("password-stdin"):
        if not given.of("username"):
            raise Failure("Must provide --username with --password-stdin")
        password = sys.stdin.read().rstrip("\r\n")
    else:
        password = given.of("password")
        print("WARNING! Using --password via the CLI is insecure. Use --password-stdin.", file=sys.stderr)
    if not given.of("username") or not password:
        raise Failure("Error: Cannot perform an interactive login from a non TTY device")
    if not _is_known(server, (given.of("username"), password)):
        raise daemon(f'Get "https://{server}/v2/": unauthorized: authentication required')
    auths = read_json(AUTH_FILE) or {}
    secret = base64.b64encode(f"{given.of('username')}:{password}".encode()).decode()
    auths.setdefault("auths", {})[server] = {"auth": secret}
    os.makedirs(os.path.dirname(AUTH_FILE), mode=0o700, exist_ok=True)
    write_json(AUTH_FILE, auths)
    print("Login Succeeded")
    return 0


def logout(argv: list[str]) -> int:
    server = argv[0] if argv else "docker.io"
    auths = read_json(AUTH_FILE) or {}
    auths.get("auths", {}).pop(server, None)
    write_json(AUTH_FILE, auths)
    print(f"Removing login credentials for {server}")
    return 0


def described(image: dict[str, Any]) -> dict[str, Any]:
    digest = hashlib.sha256(image["reference"].encode()).hexdigest()
    return {
        "Id": f"sha256:{digest}",
        "RepoTags": [image["reference"]],
        "RepoDigests": [f"{image['reference'].rpartition(':')[0]}@sha256:{digest}"],
        "Size": image.get("size", 0),
        "Architecture": "amd64",
        "Os": "linux",
        "Config": {
            "Env": image.get("env", []),
            "Entrypoint": image.get("entrypoint"),
            "Cmd": image.get("cmd"),
            "WorkingDir": image.get("workdir", ""),
        },
    }


def image_list() -> list[dict[str, Any]]:
    folder = os.path.join(ROOT, "images")
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    found = [read_json(os.path.join(folder, name, "image.json")) for name in names]
    paths = [os.path.join(folder, name) for name in names]
    return [{**each, "path": path} for each, path in zip(found, paths) if each]


def images_command(argv: list[str]) -> int:
    given = flags.parse("images", argv, ("quiet", "all"), ("filter", "format"), {"q": "quiet", "a": "all"})
    if not given.has("quiet") and not given.has("format"):
        print("REPOSITORY   TAG   IMAGE ID   CREATED   SIZE")
    for image in image_list():
        name, _, tag = image["reference"].rpartition(":")
        if given.rest and given.rest[0] not in (name, image["reference"]):
            continue
        digest = hashlib.sha256(image["reference"].encode()).hexdigest()[:12]
        print(digest if given.has("quiet") else f"{name}   {tag}   {digest}   now   {image.get('size', 0)}B")
    return 0


def remove(argv: list[str]) -> int:
    given = flags.parse("rmi", argv, ("force", "no-prune"), (), {"f": "force"})
    for name in given.rest:
        image = local(name)
        if image is None:
            raise daemon(f"No such image: {full(name)}")
        shutil.rmtree(image["path"])
        print(f"Untagged: {full(name)}")
    return 0


def dump(what: object) -> str:
    return json.dumps(what, indent=4)
