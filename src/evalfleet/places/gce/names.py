"""Names of what we make, and the labels by which it is known as ours. Pure.

Labels have 63 of `[a-z0-9_-]`, names of instances 63 of `[a-z0-9-]`: what must be changed gets a mark of its
own, and the description has the machine's id as it is. Firewalls have no labels: their name and their
description say whose they are.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from datetime import UTC, datetime

from evalfleet.model import MachineId
from evalfleet.places.vm.answers import Json, table
from evalfleet.places.vm.settings import MachineUse

HOME, POOL, KIND, MACHINE, OWNER, EXPIRES, IMAGE = (
    "evalfleet-home",
    "evalfleet-pool",
    "evalfleet-kind",
    "evalfleet-machine",
    "evalfleet-owner",
    "evalfleet-expires-at",
    "evalfleet-image",
)
DESCRIPTION = "evalfleet machine "
"""How the description of all that belongs to a machine begins; its id follows."""
LONGEST_NAME, LONGEST_LABEL = 60, 63
LABEL = re.compile(r"[a-z0-9_-]{0,63}")
LABEL_KEY = re.compile(r"[a-z][a-z0-9_-]{0,62}")


def name_of(machine: MachineId, form: str = "{machine}") -> str:
    """The name of the machine's instance, and of its disk."""
    return plain(form.replace("{machine}", machine))


def plain(text: str, longest: int = LONGEST_NAME) -> str:
    """The text as an instance may be called."""
    cleaned = re.sub(r"[^a-z0-9-]+", "-", text.lower()).strip("-")
    if not re.match(r"[a-z]", cleaned):
        cleaned = f"m-{cleaned}".rstrip("-")
    if cleaned == text and len(text) <= longest:
        return text
    return f"{cleaned[: longest - 7].rstrip('-')}-{_mark(text)}"


def label(text: str) -> str:
    """The text as the value of a label."""
    if LABEL.fullmatch(text):
        return text
    cleaned = re.sub(r"[^a-z0-9_-]+", "-", text.lower()).strip("-")
    return f"{cleaned[: LONGEST_LABEL - 7]}-{_mark(text)}".lstrip("-")


def _mark(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def labels_of(
    machine: MachineId, home: str, owner: str, kind: MachineUse, expires_at: float, own: Mapping[str, str]
) -> dict[str, str]:
    """The labels of all that belongs to a machine.

    `evalfleet-pool` is the run or the pool that it was made for, and `evalfleet-kind` says which.
    """
    made_for = {HOME: label(home), POOL: label(machine.rsplit("-", 2)[0]), KIND: kind}
    whose = {MACHINE: label(machine), OWNER: label(owner), EXPIRES: str(int(expires_at))}
    return {**own, **made_for, **whose}


def machine_in(shown: Json) -> MachineId | None:
    """The machine that an instance or a disk says it belongs to; None if it says none."""
    said = table(shown.get("labels")).get(MACHINE)
    if not said:
        return None
    described = str(shown.get("description", ""))
    machine = described.removeprefix(DESCRIPTION)
    return MachineId(machine if machine != described and label(machine) == said else str(said))


def shared_name(home: str, place: str, what: str) -> str:
    """The name of a firewall rule or a tag that the machines of a place share."""
    return plain(f"evalfleet-{home[:6].lower()}-{plain(place, 30)}-{what}")


def timestamp(at: float) -> str:
    """A time, in seconds since 1970, as Google writes it."""
    return datetime.fromtimestamp(int(at), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def moment(text: object) -> float | None:
    """The time that Google wrote, with a time zone of its own; None if there is none."""
    try:
        return datetime.fromisoformat(str(text)).timestamp() if text else None
    except ValueError:
        return None


def seconds(text: object) -> float | None:
    """The time in a label; None if somebody has written something else there."""
    return float(str(text)) if re.fullmatch(r"\d{1,12}", str(text)) else None
