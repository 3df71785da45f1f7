"""The login to a private registry, with which nodes pull `container`."""

from __future__ import annotations

from collections.abc import Mapping

from evalfleet.errors import PlaceError
from evalfleet.places.vm.answers import Json

from .settings import AzureBatchSettings

DOCKER_HUB = "docker.io"


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
