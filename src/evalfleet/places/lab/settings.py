"""What `[places.NAME]` with kind = "lab" may say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from evalfleet.errors import RequestError
from evalfleet.ports import PlaceContext

GIB = 1 << 30


class LabSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Hosts cost nothing; what they use is this computer's."""

    max_hosts: Annotated[int, Meta(ge=1, le=500, description="never more than this at once")] = 50
    cpus: Annotated[float, Meta(ge=0, description="cores a host may use; 0: all there are")] = 0.0
    memory_gb: Annotated[float, Meta(ge=0, description="a host's memory; 0: all there is")] = 0.0
    disk_gb: Annotated[float, Meta(gt=0, description="what a host may write; it is memory, once written")] = (
        1.0
    )
    user: Annotated[Literal["lab", "root"], Meta(description="who tasks run as")] = "lab"
    expose: Annotated[
        tuple[str, ...], Meta(description="directories of this computer that hosts see, read-only")
    ] = ()


class Shape(Struct, frozen=True):
    """What the hosts of one lab have in common."""

    cpus: float | None
    memory_bytes: int | None
    disk_bytes: int
    expose: tuple[str, ...]


def shape_of(name: str, settings: LabSettings, context: PlaceContext) -> Shape:
    """Raises RequestError."""
    exposed = [context.base / Path(given).expanduser() for given in settings.expose]
    for path in exposed:
        if not path.is_dir():
            raise RequestError(
                f"place {name!r}: expose names {str(path)!r}, which is no directory; correct it"
            )
    return Shape(
        cpus=settings.cpus or None,
        memory_bytes=int(settings.memory_gb * GIB) or None,
        disk_bytes=int(settings.disk_gb * GIB),
        expose=tuple(str(path.resolve()) for path in exposed),
    )
