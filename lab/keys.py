"""Ed25519 keys in OpenSSH's formats.

In Python, because a key then costs 1 ms: `ssh-keygen` takes 7 to 20 ms, seconds for some hundred hosts.
Not constant in time: good for a lab's keys, which live for minutes on one machine, and for nothing else.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import os
import struct
from pathlib import Path
from typing import NamedTuple

from evalfleet.files import OURSELVES, replace

KIND = b"ssh-ed25519"
PRIME = 2**255 - 19
D = -121665 * pow(121666, -1, PRIME) % PRIME
BASE_X = 15112221349535400772501151409588531511454012693041857206046113283949847762202
BASE_Y = 4 * pow(5, -1, PRIME) % PRIME

Point = tuple[int, int, int, int]


class LabKey(NamedTuple):
    """A pair of keys. `public`: as in known_hosts, without a comment. `private`: the file's content."""

    public: str
    private: bytes


def new_key(comment: str) -> LabKey:
    return key_from_seed(os.urandom(32), comment)


def key_from_seed(seed: bytes, comment: str) -> LabKey:
    point = public_bytes(seed)
    blob = _string(KIND) + _string(point)
    public = f"{KIND.decode()} {base64.b64encode(blob).decode()}"
    check = os.urandom(4)
    inner = check + check + blob + _string(seed + point) + _string(comment.encode())
    inner += bytes(range(1, 1 + -len(inner) % 8))
    outer = b"openssh-key-v1\0" + _string(b"none") + _string(b"none") + _string(b"")
    text = base64.encodebytes(outer + struct.pack(">I", 1) + _string(blob) + _string(inner))
    private = b"-----BEGIN OPENSSH PRIVATE KEY-----\n" + text + b"-----END OPENSSH PRIVATE KEY-----\n"
    return LabKey(public, private)


def write_private(path: Path, private: bytes) -> None:
    """Replaces the file in one step; never readable by others."""
    replace(path, private, mode=OURSELVES)


def public_bytes(seed: bytes) -> bytes:
    """RFC 8032, 5.1.5."""
    scalar = int.from_bytes(hashlib.sha512(seed).digest()[:32], "little")
    scalar = (scalar & ((1 << 254) - 8)) | (1 << 254)
    x, y, z, _ = _times_base(scalar)
    inverse = pow(z, -1, PRIME)
    encoded = y * inverse % PRIME | (x * inverse % PRIME & 1) << 255
    return encoded.to_bytes(32, "little")


def _string(value: bytes) -> bytes:
    return struct.pack(">I", len(value)) + value


def _add(a: Point, b: Point) -> Point:
    m = (a[1] - a[0]) * (b[1] - b[0]) % PRIME
    n = (a[1] + a[0]) * (b[1] + b[0]) % PRIME
    c = 2 * a[3] * b[3] * D % PRIME
    d = 2 * a[2] * b[2] % PRIME
    e, f, g, h = n - m, d - c, d + c, n + m
    return (e * f % PRIME, g * h % PRIME, f * g % PRIME, e * h % PRIME)


@functools.cache
def _doublings() -> tuple[Point, ...]:
    """The base point times 1, 2, 4, ...: computed once, a key is then additions only."""
    point: Point = (BASE_X, BASE_Y, 1, BASE_X * BASE_Y % PRIME)
    points: list[Point] = [point]
    for _ in range(255):
        point = _add(point, point)
        points.append(point)
    return tuple(points)


def _times_base(scalar: int) -> Point:
    total: Point = (0, 1, 1, 0)
    for bit, point in enumerate(_doublings()):
        if scalar >> bit & 1:
            total = _add(total, point)
    return total
