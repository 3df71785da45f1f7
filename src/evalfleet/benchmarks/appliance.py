"""What people can do by hand with machines that were set up for a benchmark, beside running its tasks.

A kind of benchmark may have an `Appliance`. `evalfleet pool do`, `reset`, `clean`, `vnc`, `screenshot`,
`tunnel` and `status --probe` are made of nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct


class HostVerb(Struct, frozen=True):
    """A command that people may run on machines which nobody else uses meanwhile."""

    does: str
    """What it does, as in `reset: bring ... back`."""
    command: tuple[str, ...]
    limit_s: float
    """The longest that it may take."""
    says: Mapping[int, str]
    """Exit codes that mean success, and what is said then; `{machine}` is the machine's name."""
    asks: str = ""
    """What it deletes, if people must agree to that: `delete all of it`."""
    undoes: bool = False
    """After it, the machine is set up no more."""


class Screen(Struct, frozen=True):
    """What a machine shows, for people to look at. Ports are those of the machine's own loopback."""

    port: int
    """Where a browser finds it."""
    picture_port: int
    picture_path: str
    """Where a PNG of it is to be had from the guest itself."""
    picture: tuple[str, ...]
    """A command that prints a PNG, for a guest that hangs."""


class Appliance(Struct, frozen=True, kw_only=True):
    """What runs on a machine that was set up for a benchmark, and what can be asked of it.

    Its commands know nothing of a run's settings, and may be run on any machine: where nothing was set up,
    they end with the exit code `absent`.
    """

    what: str
    """What runs there, as people call it: `there is no ... on it`."""
    absent: int
    verbs: Mapping[str, HostVerb] = {}
    probe: tuple[str, ...] = ()
    """A command that tells by exit code 0 that it answers, and changes nothing."""
    rest: tuple[str, ...] = ()
    """A command that ends it before a disk is copied, and leaves what was set up as a new machine is to find
    it. It may be repeated."""
    screen: Screen | None = None
    tunnel: tuple[int, int] | None = None
    """What `pool tunnel` opens unless told otherwise: the first port to try here, and the machine's."""
    registry: Mapping[str, object] = {}
    """What `vm_pool_registry.json` says of such a machine."""
    ready_key: str = ""
    """The key by which it says that the machine is ready."""
