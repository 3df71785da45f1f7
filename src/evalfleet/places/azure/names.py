"""Names of what we make, and the tags by which it is known as ours. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from datetime import UTC, datetime

from msgspec import Struct

from evalfleet.model import MachineId
from evalfleet.places.vm.settings import MachineUse

HOME, POOL, KIND, MACHINE, OWNER, EXPIRES = (
    "evalfleet-home",
    "evalfleet-pool",
    "evalfleet-kind",
    "evalfleet-machine",
    "evalfleet-owner",
    "evalfleet-expires-at",
)
RECORD = "evalfleet-"
"""How the names of our deployments begin."""
LONGEST = 50
"""The longest name of a machine: Azure allows 64, and we append to it."""


class Names(Struct, frozen=True):
    """The names of everything that belongs to one machine."""

    vm: str
    nic: str
    address: str
    disk: str
    schedule: str
    deployment: str


def names_of(machine: MachineId, form: str = "{machine}") -> Names:
    return _names(plain(form.replace("{machine}", machine)))


def names_of_record(deployment: str) -> Names | None:
    """The names of all that the deployment of this name makes; None if it is none of ours."""
    vm = deployment.removeprefix(RECORD)
    return _names(vm) if vm != deployment else None


def _names(vm: str) -> Names:
    return Names(vm, f"{vm}-nic", f"{vm}-ip", f"{vm}-os", f"shutdown-computevm-{vm}", f"{RECORD}{vm}")


def plain(text: str) -> str:
    """The text as a host may be called. To Azure `A` is `a`: what must be changed gets a mark of its own."""
    cleaned = re.sub(r"[^a-z0-9-]+", "-", text.lower()).strip("-")
    if cleaned == text and len(text) <= LONGEST:
        return text
    return f"{cleaned[: LONGEST - 7].rstrip('-')}-{hashlib.sha256(text.encode()).hexdigest()[:6]}".lstrip("-")


def tags_of(
    machine: MachineId, home: str, owner: str, kind: MachineUse, expires_at: float, own: Mapping[str, str]
) -> dict[str, str]:
    """The tags of all that belongs to a machine.

    `evalfleet-pool` is the run or the pool that it was made for, and `evalfleet-kind` says which.
    """
    made_for = {HOME: home, POOL: machine.rsplit("-", 2)[0], KIND: kind}
    return {**own, **made_for, MACHINE: machine, OWNER: owner, EXPIRES: stamp(expires_at)}


def shared_tags(home: str, owner: str, own: Mapping[str, str]) -> dict[str, str]:
    """The tags of what a home's machines share."""
    return {**own, HOME: home, OWNER: owner}


def shared_name(home: str, region: str, what: str) -> str:
    """The name of a network, or of rules, that machines of a region share."""
    return f"evalfleet-{home[:6]}-{region}-{what}"


def stamp(at: float) -> str:
    """A time, in seconds since 1970, as tags have it."""
    return datetime.fromtimestamp(int(at), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def moment(text: str) -> float | None:
    """The time in a tag; None if somebody has written something else there."""
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None
