"""QEMU's disk format, as much of it as a thin layer over another disk needs.

What Windows writes goes into the layer, and the disk below is only read: to go back to it takes a new layer
of a few kilobytes instead of a copy of 30 GB. QEMU's documentation has the format (`interop/qcow2`).
"""

from __future__ import annotations

import os
import struct

from .shell import Failed

MAGIC = b"QFI\xfb"
CLUSTER = 1 << 16
TABLE_SPAN = CLUSTER // 8 * CLUSTER
"""What one entry of the first table covers: a cluster full of entries, each for a cluster."""
FORMAT_OF_BACKING = 0xE2792ACA
_HEADER = struct.Struct(">4sIQIIQIIQQIIQQQQII")


class Disk:
    """A disk image: its format, the size that a guest sees, and what it is a layer over, if anything."""

    def __init__(self, path: str) -> None:
        """Raises Failed if it cannot be read."""
        try:
            with open(path, "rb") as file:
                head = file.read(_HEADER.size)
                self.is_qcow2 = head.startswith(MAGIC)
                if not self.is_qcow2:
                    self.size, self.backing = os.fstat(file.fileno()).st_size, ""
                    return
                _, _, at, length, _, self.size = struct.unpack(">4sIQIIQ", head[:32])
                file.seek(at)
                self.backing = file.read(length).decode("utf-8", "replace") if at else ""
        except (OSError, struct.error) as err:
            raise Failed(f"{path} cannot be read as a disk: {err}") from None

    @property
    def format(self) -> str:
        return "qcow2" if self.is_qcow2 else "raw"


def write_layer(path: str, below: Disk, name: str) -> None:
    """An empty layer over a disk, which whoever opens it finds under `name`. Raises OSError."""
    entries = -(-below.size // TABLE_SPAN)
    table_clusters = max(1, -(-entries * 8 // CLUSTER))
    clusters = 3 + table_clusters
    backing, kind = name.encode(), below.format.encode()
    extensions = struct.pack(">II8s", FORMAT_OF_BACKING, len(kind), kind) + bytes(8)
    backing_at = _HEADER.size + len(extensions)
    header = _HEADER.pack(
        *(MAGIC, 3, backing_at, len(backing), 16, below.size, 0, entries, 3 * CLUSTER, CLUSTER, 1, 0, 0),
        *(0, 0, 0, 4, _HEADER.size),
    )
    with open(path, "wb") as file:
        file.write(header + extensions + backing)
        file.seek(CLUSTER)
        file.write(struct.pack(">Q", 2 * CLUSTER))  # where clusters are counted
        file.seek(2 * CLUSTER)
        file.write(struct.pack(">H", 1) * clusters)
        file.truncate(clusters * CLUSTER)
