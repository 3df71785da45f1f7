"""The login to a private registry, with which nodes pull `container`: by a password, or by an identity."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from evalfleet.errors import PlaceError
from evalfleet.places.vm.answers import Json

if TYPE_CHECKING:
    from .settings import AzureBatchSettings

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_IDENTITY = re.compile(r"/subscriptions/[^/]+/resourceGroups/[^/]+/providers/.+/[^/]+", re.IGNORECASE)
DOCKER_HUB = "docker.io"


def registry_problems(settings: AzureBatchSettings) -> list[str]:
    """What is wrong with what the settings say of it. A password in place of its name is not shown."""
    by_password = bool(settings.registry_password or settings.registry_password_file)
    if not (by_password or settings.registry_user or settings.registry_identity or settings.registry):
        return []
    found: list[str] = []
    if settings.registry_password and not _VARIABLE.fullmatch(settings.registry_password):
        found.append("`registry_password` is the name of a variable, never the password itself")
    if settings.registry_password and settings.registry_password_file:
        found.append("give `registry_password` or `registry_password_file`, not both")
    if settings.registry_identity and (by_password or settings.registry_user):
        found.append("give `registry_identity`, or a user and its password, not both")
    if not settings.registry_identity and not (by_password and settings.registry_user):
        found.append("a registry needs `registry_user` with `registry_password`, or `registry_identity`")
    if settings.registry_identity and not _IDENTITY.fullmatch(settings.registry_identity):
        found.append("`registry_identity` must be the id of an identity, /subscriptions/.../NAME")
    if settings.registry_identity and not settings.pool:
        found.append(
            "`registry_identity` needs `pool`: a pool that Batch makes for a job has no identity, one of "
            "yours may have been given it"
        )
    if not settings.container:
        found.append(
            "a registry's password needs `container`, by which Batch keeps it to itself: in the start task "
            "of nodes everybody could read it. Benchmarks with images of their own have `registry_password`"
        )
    return found


def registry_of(settings: AzureBatchSettings) -> str:
    """The address of the registry that nodes log in to; empty if they log in to none."""
    if not (settings.registry_user or settings.registry_identity):
        return ""
    host, slash, _ = settings.container.partition("/")
    own = host if slash and ("." in host or ":" in host) else DOCKER_HUB
    return settings.registry or own


def registry_login(settings: AzureBatchSettings, base: Path, environ: Mapping[str, str]) -> Json:
    """What Batch is told of the registry; nothing if images are public. Raises PlaceError."""
    server = registry_of(settings)
    if not server:
        return {}
    if settings.registry_identity:
        return {"registryServer": server, "identityReference": {"resourceId": settings.registry_identity}}
    password = _password(settings, base, environ)
    return {"registryServer": server, "username": settings.registry_user, "password": password}


def _password(settings: AzureBatchSettings, base: Path, environ: Mapping[str, str]) -> str:
    if name := settings.registry_password:
        if not environ.get(name):
            raise _no_password(f"set {name} in the environment, or in .env beside evalfleet.toml")
        return environ[name]
    file = base / Path(settings.registry_password_file).expanduser()
    try:
        password = file.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as err:
        why = err.strerror if isinstance(err, OSError) else "it is no text"
        raise _no_password(f"registry_password_file = {str(file)!r} cannot be read: {why}") from None
    if not password:
        raise _no_password(f"registry_password_file = {str(file)!r} is empty")
    return password


def _no_password(remedy: str) -> PlaceError:
    return PlaceError(
        f"the password of the container's registry is not known; {remedy}", transient=False, scope="place"
    )
