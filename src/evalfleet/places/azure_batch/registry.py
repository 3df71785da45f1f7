"""The login to a private registry, with which nodes pull `container`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from evalfleet.errors import PlaceError
from evalfleet.places.vm.answers import Json

if TYPE_CHECKING:
    from .settings import AzureBatchSettings

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
DOCKER_HUB = "docker.io"


def registry_problems(settings: AzureBatchSettings) -> list[str]:
    """Return what is wrong with the registry's settings. A password in place of its name is not shown."""
    problems: list[str] = []
    if settings.registry_password and not _VARIABLE.fullmatch(settings.registry_password):
        problems.append("`registry_password` is the name of a variable, never the password itself")
    if bool(settings.registry_password) != bool(settings.registry_user):
        problems.append("a registry needs `registry_user` with `registry_password`")
    if settings.registry_user and not settings.container:
        problems.append("`registry_user` needs `container`: anyone could read a password in the start task")
    return problems


def registry_login(settings: AzureBatchSettings, environ: Mapping[str, str]) -> Json:
    """Return the login that Batch is sent, empty if images are public. Raises PlaceError."""
    if not settings.registry_user:
        return {}
    if not (password := environ.get(settings.registry_password)):
        raise PlaceError(
            f"the password of the container's registry is not known; set {settings.registry_password} in the "
            "environment, or in .env beside evalfleet.toml",
            transient=False,
            scope="place",
        )
    host, slash, _ = settings.container.partition("/")
    server = host if slash and ("." in host or ":" in host) else DOCKER_HUB
    return {"registryServer": server, "username": settings.registry_user, "password": password}
