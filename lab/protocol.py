"""What controllers and the keeper of a lab say to each other: one question a connection, as JSON."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Refusal = Literal["", "unknown", "deleting", "full", "shape", "failed", "closing"]
Phase = Literal["pending", "up", "gone"]


class Shape(Struct, frozen=True):
    """What the hosts of one lab have in common."""

    cpus: float | None
    memory_bytes: int | None
    disk_bytes: int
    expose: tuple[str, ...]


class KeeperRecord(Struct, frozen=True):
    """A keeper as it wrote itself down. It lives if something listens at its socket.

    `lab`: the lab's directory. `network`: a namespace. `key` and `known_hosts`: files of an SSH client.
    """

    pid: int
    lab: str
    socket: str
    network: str
    key: str
    known_hosts: str


class KeeperOrders(Struct, frozen=True):
    """What a new keeper is told: where it is to write itself down, under which lock, and what hosts have."""

    record: str
    lock: str
    shape: Shape


class Add(Struct, frozen=True, tag=True):
    """An order for a host, or for the one that a machine has, until its expiry. Answered when the host is
    up."""

    machine: str
    expires_s: float
    most: int
    shape: Shape


class Taken(Struct, frozen=True, tag=True):
    """The machine's supervisor runs: it is up."""

    machine: str


class ExtendExpiry(Struct, frozen=True, tag="Extend"):
    """An order to move the end of a machine."""

    machine: str
    expires_s: float


class Remove(Struct, frozen=True, tag=True):
    """An order to end a machine. It is answered when its host is gone."""

    machine: str


class List(Struct, frozen=True, tag=True):
    """All machines there are."""


class End(Struct, frozen=True, tag=True):
    """Who asks is leaving. With no machine left so does the keeper: no answer, and the line ends with it."""


Question = Add | Taken | ExtendExpiry | Remove | List | End


class Seen(Struct, frozen=True):
    """A machine, as the keeper knows it."""

    machine: str
    phase: Phase
    address: str = ""
    host: str = ""


class KeeperAnswer(Struct, frozen=True):
    """What the keeper answers. `refusal` is a word for programs, `detail` is for people."""

    refusal: Refusal = ""
    detail: str = ""
    machines: tuple[Seen, ...] = ()
