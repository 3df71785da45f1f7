"""What `[places.NAME]` may say for virtual machines of whatever cloud, and the account that they are for."""

from __future__ import annotations

import getpass
import ipaddress
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct, field

from evalfleet.errors import RequestError
from evalfleet.ports import PlaceContext

MachineUse: TypeAlias = Literal["run", "pool"]
"""What a machine is made for."""
_USER = re.compile(r"[a-z_][a-z0-9_-]{0,31}")


class PlaceSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The settings that all places in clouds have in common."""

    spot: Annotated[bool, Meta(description="cheaper machines that the cloud may take back")] = False
    spot_only: Annotated[
        bool, Meta(description="with `spot`: no regular machines, whatever is taken back or cannot be had")
    ] = False
    isolation: Annotated[
        Literal["user", "container", "none"] | None,
        Meta(description="user: each attempt is a user of its own; else so where that can be had"),
    ] = None
    key: Annotated[str, Meta(description="a private key of yours to come in with; else one is made")] = ""
    public_ip: Annotated[bool, Meta(description="false: machines have no public address")] = True
    jump: Annotated[str, Meta(description="[user@]host[:port][,...] to go through")] = ""
    owner: Annotated[str, Meta(description="who is to be asked about the machines; else your user name")] = ""
    prices: Annotated[
        Mapping[str, Annotated[float, Meta(ge=0, le=10_000)]],
        Meta(description="USD an hour by size, or size@region: yours, not the list's"),
    ] = field(default_factory=dict[str, float])
    endpoint: Annotated[str, Meta(description="of the cloud's API, if it is not the public one")] = ""
    ca: Annotated[str, Meta(description="file of the authorities to trust, for endpoints of your own")] = ""
    answer_s: Annotated[
        float, Meta(gt=0, description="a machine that runs must answer within so many seconds")
    ] = 600.0
    settle_s: Annotated[
        float, Meta(ge=0, description="a machine is gone when two listings so far apart do not show it")
    ] = 60.0


class VmSettings(PlaceSettings, frozen=True, forbid_unknown_fields=True):
    """The settings that places of VMs have in common. Without `public_ip`, `ssh_from` may be empty."""

    user: Annotated[str, Meta(description="made on the machines, to come in as")] = "evalfleet"
    ssh_from: Annotated[
        tuple[str, ...], Meta(description="addresses or ranges that may connect, such as 203.0.113.7/32")
    ] = ()
    port: Annotated[int, Meta(ge=1, le=65535, description="of the machines' sshd")] = 22
    name: Annotated[str, Meta(description="of machines; must have {machine} in it")] = "{machine}"
    max_vcpus: Annotated[int, Meta(ge=0, description="all machines of this home together; 0: no limit")] = 0
    creates_a_minute: Annotated[
        int, Meta(ge=1, description="so many machines of one region are asked for in a minute at most")
    ] = 200  # what clouds let a subscription write at once, before they count by the second
    lost_s: Annotated[
        float,
        Meta(ge=12, description="silence of so many seconds before a machine is mended: clouds pause some"),
    ] = 45.0
    teardown_s: Annotated[
        float, Meta(gt=0, description="so many seconds before the end of its time a machine is deleted")
    ] = 120.0


class VmAccount(Struct, frozen=True, kw_only=True):
    """The account that a place uses: what the settings leave open, filled in from the environment."""

    owner: str
    """Who is to be asked about the machines."""
    ca: str = ""
    """An absolute path, or empty."""
    key: str = ""
    """An absolute path, or empty."""


def problems_of(settings: PlaceSettings, name: str, named: str) -> list[str]:
    """What is wrong with what all clouds have in common. `named`: the characters of a machine's name."""
    found: list[str] = []
    if "{machine}" not in name or not re.fullmatch(rf"[{{}}{named}]+", name):
        found.append(f"`name` must have {{machine}} in it, and otherwise only characters of [{named}]")
    if settings.endpoint and not settings.endpoint.startswith("https://"):
        found.append("`endpoint` must begin with https://: tokens are not sent in the clear")
    return found


def source_problems(ssh_from: Sequence[str], *, must: bool) -> list[str]:
    """What is wrong with `ssh_from`. `must`: it may not be empty."""
    if must and not ssh_from:
        return [
            '`ssh_from` is not set: say which addresses may connect, such as ssh_from = ["203.0.113.7/32"] '
            "(`curl https://api.ipify.org` prints yours)"
        ]
    return [problem for each in ssh_from if (problem := _source_problem(each))]


def is_user_name(name: str) -> bool:
    return _USER.fullmatch(name) is not None


def _source_problem(text: str) -> str:
    """What is wrong with an entry of `ssh_from`; empty if nothing is."""
    try:
        network = ipaddress.ip_network("0.0.0.0/0" if text == "*" else text, strict=False)
    except ValueError:
        return f"ssh_from: {text!r} is no address or range"
    if network.version == 6:
        return (
            f"ssh_from: {text!r} is IPv6, and the machines have IPv4 addresses only: give your IPv4 address "
            "(`curl -4 https://api.ipify.org` prints it)"
        )
    return ""


def file_of(name: str, setting: str, given: str, context: PlaceContext) -> str:
    """The absolute path that a setting of the place names, or nothing. Raises RequestError."""
    file = str(context.base / Path(given).expanduser()) if given else ""
    if file and not Path(file).is_file():
        raise RequestError(f"place {name!r}: {setting} = {file!r} is no file; correct it")
    return file


def owner_of(settings: PlaceSettings, environ: Mapping[str, str]) -> str:
    """Who is to be asked about machines: the owner that the settings name, or else the user."""
    try:
        return settings.owner or environ.get("USER") or getpass.getuser()
    except (OSError, KeyError):
        return "unknown"
