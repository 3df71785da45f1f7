"""Which hosts work: how each has done of late, and what a look at it before anything runs there finds."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from evalfleet.channels.ssh.target import HostDown, HostKeyUnknown, HostLost, HostRefused
from evalfleet.model import Needs
from evalfleet.ports import Check, HostKey

SHORTEST_S = 2.0
REFUSED_S = 15.0
"""A host that refused us is asked again after so long at first: nobody mends anything sooner."""
LONGEST_S = 60.0
LONGEST_ASIDE_S = 1800.0
BAD_STREAK = 3
MOST_REFUSALS = 6
"""A host that refuses us so many times in a row, over minutes, needs somebody's hand; it is left alone."""
NEVER = float("inf")


class HostHealth:
    """The health of one host. `down_since` is when it first did not answer; `refusal` needs somebody's hand.

    `set_aside_s`: for how long it is set aside when it did badly; each time twice as long.
    """

    def __init__(self, order: int, set_aside_s: float) -> None:
        self.order = order
        self.refusal: HostRefused | None = None
        self.problem = ""
        self.worked = False
        """It has done something for us since this process began."""
        self.late = False
        """It has not answered yet, while others have."""
        self.down_since: float | None = None
        self.retry_at = 0.0
        self.aside_until = 0.0
        self.aside = 0
        self._delay_s = SHORTEST_S
        self._set_aside_s = set_aside_s
        self._bad = 0
        self._refusals = 0

    # -- does it answer? ---------------------------------------------------------------------------

    def answered(self) -> None:
        self.down_since = None
        self.worked, self.late = True, False
        self._refusals = 0
        self.refusal, self.problem = None, ""
        self.retry_at = 0.0
        self._delay_s = SHORTEST_S

    def silent(self, now: float, problem: str, refusal: HostRefused | None = None) -> None:
        """It did not answer, or refused us: it is not asked again for a while, each time longer."""
        self.problem = problem
        self.refusal = refusal
        self.late = False
        if self.down_since is None:
            self.down_since = now
        self._refusals = self._refusals + 1 if refusal is not None else 0
        if refusal is not None:
            self._delay_s = max(self._delay_s, REFUSED_S)
        self.retry_at = now + self._delay_s if self._refusals < MOST_REFUSALS else NEVER
        self._delay_s = min(self._delay_s * 2, LONGEST_S)

    # -- does it do well? --------------------------------------------------------------------------

    def did(self, well: bool) -> None:
        self._bad = 0 if well else self._bad + 1
        if well:
            self.aside = 0

    def given_up(self, now: float) -> bool:
        """A machine on it was deleted. True: it did badly, so it is set aside for a while."""
        if self._bad < BAD_STREAK and self.down_since is None:
            return False
        self._bad = 0
        self.aside += 1
        self.aside_until = now + min(self._set_aside_s * 2 ** (self.aside - 1), LONGEST_ASIDE_S)
        return True

    def usable(self, now: float) -> bool:
        return now >= self.retry_at and now >= self.aside_until

    def due(self) -> float:
        return max(self.retry_at, self.aside_until)


def in_order(standings: Iterable[tuple[str, HostHealth]], now: float) -> list[str]:
    """Hosts to try, best first: those that did well, then those that were in trouble and are due again."""
    usable = [
        (each.aside > 0, each.late or each.down_since is not None, each.order, name)
        for name, each in standings
        if each.usable(now)
    ]
    return [name for _, _, _, name in sorted(usable)]


if TYPE_CHECKING:
    from evalfleet.channels.ssh.host_home import HostFacts, HostHome

COLUMNS = ("host", "key", "login", "python", "cpus", "memory", "disk free", "gpus", "held by")
"""What is shown of every host; what is not known is a dash."""


SWITCH_ON = "switch it on, or take it out of `hosts`"


async def examine_host(host_home: HostHome, needs: Needs, most: int, trusting: str) -> Check:
    """One host. `most`: machines that it may carry; `trusting`: what to do about an unknown key."""
    name = host_home.host.name
    facts = dict.fromkeys(COLUMNS, "-") | {"host": name}
    try:
        await host_home.machines()
        told = await host_home.facts()
    except HostKeyUnknown as err:
        facts |= {"key": "unknown", "fingerprint": err.fingerprint}
        return Check(name, "bad", err.what, trusting, facts)
    except HostRefused as err:
        facts |= _until(err)
        remedy = err.remedy if err.stage == "python" else _without(name, str(err), err.what)
        return Check(name, "bad", err.what, remedy, facts)
    except (HostDown, HostLost) as err:
        why = str(err).removeprefix(f"{name} ").removeprefix(f"{name}: ")
        return Check(name, "bad", why, SWITCH_ON, facts)
    facts |= columns_of(told, host_home.home)
    if shortage := missing(told, needs):
        return Check(name, "bad", shortage, "take it out of `hosts`, or lower `needs`", facts)
    if not told.writable:
        return Check(name, "bad", "its home cannot be written to", "mend that", facts)
    others = [each for each in told.held if each.home != host_home.home]
    if len(told.held) >= most:
        own = (
            "a pool of yours has it: `evalfleet pool ls`"
            if told.held[0].is_pool
            else "a run of yours uses it"
        )
        wait = "wait until it is given back, or ask them" if others else own
        return Check(name, "warn", f"held by {told.held[0].told(host_home.home)}", wait, facts)
    return Check(name, "good", "free", "", facts)


def _without(name: str, message: str, what: str) -> str:
    """The rest of a refusal's message: both fingerprints of a changed key, say."""
    return message.removeprefix(f"{name}: {what}").lstrip("; ").strip()


def _until(err: HostRefused) -> dict[str, str]:
    """How far we came."""
    if err.stage == "key":
        return {"key": "CHANGED" if "CHANGED" in err.what else "unverified"}
    return {"key": "known", "login": "refused"} if err.stage == "login" else {"key": "known", "login": "ok"}


def columns_of(told: HostFacts, own_home: str) -> dict[str, str]:
    """What is shown of a host that works."""
    return {
        "key": "known",
        "login": told.user,
        "python": told.python,
        "cpus": f"{told.cpus:g}",
        "memory": f"{told.memory_gb:.1f} GB",
        "disk free": f"{told.disk_gb:.1f} GB",
        "gpus": f"{len(told.gpus)} x {told.gpus[0]}" if told.gpus else "none",
        "held by": "; ".join(each.told(own_home) for each in told.held) or "nobody",
    }


def missing(told: HostFacts, needs: Needs) -> str:
    """What the benchmark needs and the host has not; empty if it has all of it, or may do all the same."""
    if not needs.strict:
        return ""
    short = [
        f"{has:.3g} of {wanted:g} {what}"
        for what, has, wanted in (
            ("CPUs", told.cpus, needs.cpus),
            ("GB of memory", told.memory_gb, needs.memory_gb),
            ("GB of free disk", told.disk_gb, needs.disk_gb),
            ("GPUs", len(told.gpus), needs.gpus),
        )
        if has * _TOLERANCE < wanted
    ]
    if needs.nested_virtualization and not told.kvm:
        short.append("no /dev/kvm that we may use")
    return f"it has only {', '.join(short)}" if short else ""


_TOLERANCE = 1.05
"""A computer that is sold with 16 GB shows less of it."""


def host_key(err: HostKeyUnknown, host: str) -> HostKey:
    """What kept us from reaching `host`: its own key, or that of one before it."""
    return HostKey(err.host, err.fingerprint, err.file, err.line, is_jump=err.host != host)


def write_down(keys: Sequence[HostKey]) -> None:
    """Add them to their files of known hosts, which are made if need be. Raises OSError."""
    for file in dict.fromkeys(key.file for key in keys):
        path = Path(file)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lines = "".join(f"{key.line}\n" for key in keys if key.file == file)
        with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "r+b") as known:
            before = known.seek(0, os.SEEK_END)
            if before:
                known.seek(before - 1)
                if known.read(1) != b"\n":
                    lines = f"\n{lines}"
            known.write(lines.encode())
            known.flush()
            os.fsync(known.fileno())
