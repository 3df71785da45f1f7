"""Looking at hosts before anything runs there: what each has, who holds it, and what must be mended."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from evalfleet.channels.ssh.target import HostDown, HostKeyUnknown, HostLost, HostRefused
from evalfleet.model import Needs
from evalfleet.ports import Check, HostKey

if TYPE_CHECKING:
    from evalfleet.channels.ssh.host_home import HostFacts, HostHome

COLUMNS = ("host", "key", "login", "python", "cpus", "memory", "disk free", "gpus", "held by")
"""What is shown of every host; what is not known is a dash."""


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
        return Check(name, "bad", why, "switch it on, or take it out of `hosts`", facts)
    facts |= _columns(told, host_home.home)
    if shortage := missing(told, needs):
        return Check(name, "bad", shortage, "take it out of `hosts`, or lower `needs`", facts)
    if not told.writable:
        return Check(name, "bad", "its home cannot be written to", "mend that", facts)
    others = [each for each in told.held if each.home != host_home.home]
    if len(told.held) >= most:
        wait = "wait until it is given back, or ask them" if others else "a run of yours uses it"
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


def _columns(told: HostFacts, own_home: str) -> dict[str, str]:
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
