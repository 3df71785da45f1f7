"""What `[places.NAME]` with kind = "ssh" may say."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from evalfleet.channels.ssh.target import Access
from evalfleet.errors import RequestError
from evalfleet.ports import PlaceContext

from .roster import LONGEST_ASIDE_S


class SshSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """What is not given comes from ~/.ssh/config and OpenSSH's defaults."""

    hosts: Annotated[tuple[str, ...], Meta(description="[user@]host[:port], each one machine")]
    user: str | None = None
    key: Annotated[str | None, Meta(description="a private key; else the agent's and ~/.ssh's")] = None
    known_hosts: Annotated[str | None, Meta(description="else the user's own; verified always")] = None
    port: int | None = None
    jump: Annotated[str | None, Meta(description="[user@]host[:port][,...] to go through")] = None
    python: Annotated[str, Meta(description="Python 3.8 or later on the hosts")] = "python3"
    connect_timeout_s: Annotated[float, Meta(gt=0)] = 10.0
    max_per_host: Annotated[int, Meta(ge=1, description="machines a host")] = 1
    gone_after_s: Annotated[
        float, Meta(ge=0, description="a deleted machine counts as gone when its host was silent for so long")
    ] = 120.0
    set_aside_s: Annotated[
        float,
        Meta(
            ge=0, le=LONGEST_ASIDE_S, description="a host that does badly is left alone for so long, at first"
        ),
    ] = 30.0
    usd_per_hour: float = 0.0


def access_of(name: str, settings: SshSettings, context: PlaceContext) -> Access:
    """How the hosts are reached. Raises RequestError."""
    if not settings.hosts:
        raise RequestError(f"place {name!r} has no hosts; list some in `hosts`")
    if len(set(settings.hosts)) < len(settings.hosts):
        raise RequestError(f"place {name!r} lists a host twice; `max_per_host` gives it more machines")

    def path(setting: str, given: str | None) -> str | None:
        file = str(context.base / Path(given).expanduser()) if given else None
        if file is not None and not os.path.isfile(file):
            raise RequestError(f"place {name!r}: {setting} = {file!r} is no file; correct it")
        return file

    return Access(
        user=settings.user,
        key=path("key", settings.key),
        known_hosts=path("known_hosts", settings.known_hosts),
        port=settings.port,
        jump=settings.jump,
        python=settings.python,
        connect_timeout_s=settings.connect_timeout_s,
        agent=context.environ.get("SSH_AUTH_SOCK"),
    )
