"""What things cost at Azure: the list that was fetched last, and behind it the one that came with us."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from evalfleet.ports import Price, PriceTable

from . import listed
from .sizes import Size, size_of

FILE = Path(".azure") / "prices.json"
HOURS_A_MONTH = 730.0
ELSEWHERE = 1.5
"""Where no price is known: more than in any region that we looked at."""
ADDRESS = "address"
BUILT_IN = "built in"
Key = tuple[str, str]


def disk(kind: str, gb: int) -> str:
    """As tables call it. Disks are billed as the next larger of a few."""
    sizes = listed.DISK_USD_A_MONTH[kind]
    return f"disk {kind} {next((each for each in sorted(sizes) if each >= gb), max(sizes))} GB"


class Quote(Struct, frozen=True):
    """A price, and of when it is."""

    usd: float
    as_of: str


class Book:
    """Looks prices up. What the fetched list does not have, the built-in one has or guesses."""

    def __init__(self, fetched: PriceTable | None) -> None:
        self._fetched = fetched
        self._known = {} if fetched is None else _by_key(fetched)

    @classmethod
    def of(cls, home: Path) -> Book:
        return cls(load(home))

    def machine(self, size: Size, region: str, *, spot: bool) -> Quote:
        for table, known in self._tables():
            found = known.get((size.name.lower(), region))
            usd = None if found is None else found.spot_usd_per_hour if spot else found.usd_per_hour
            if usd is not None:
                return Quote(usd, table.as_of)
        return Quote(_guessed(size, region, spot=spot), listed.AS_OF)

    def extra(self, what: str, region: str) -> Quote:
        """Of a disk or an address."""
        for table, known in self._tables():
            found = known.get((what.lower(), region))
            if found is not None:
                return Quote(found.usd_per_hour, table.as_of)
        (usd,) = (each.usd_per_hour for each in _extras("eastus") if each.what == what)
        return Quote(usd * ELSEWHERE, listed.AS_OF)

    def _tables(self) -> Iterator[tuple[PriceTable, Mapping[Key, Price]]]:
        if self._fetched is not None:
            yield self._fetched, self._known
        yield built_in(), _built_in_by_key()


def load(home: Path) -> PriceTable | None:
    """The list that was fetched last, if any. One that cannot be read is none."""
    try:
        return msgspec.json.decode((home / FILE).read_bytes(), type=PriceTable)
    except (OSError, msgspec.MsgspecError):
        return None


def save(home: Path, table: PriceTable) -> Path:
    """In the place of the one before, whole or not at all."""
    path = home / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=1))
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return path


# -- what came with evalfleet ----------------------------------------------------------------------


@functools.cache
def built_in() -> PriceTable:
    regular, spot = _rows(listed.REGULAR), _rows(listed.SPOT)
    machines = [
        Price(name, region, usd, spot[name, region]) for (name, region), usd in sorted(regular.items())
    ]
    extras = [price for region in listed.REGIONS for price in _extras(region)]
    return PriceTable(listed.AS_OF, BUILT_IN, (*machines, *extras))


def _rows(text: str) -> dict[Key, float]:
    lines = [line.split() for line in text.strip().splitlines()]
    return {
        (name, region): float(usd)
        for name, *figures in lines
        for region, usd in zip(listed.REGIONS, figures, strict=True)
    }


def _extras(region: str) -> list[Price]:
    """Disks and addresses of other regions are as much dearer than eastus's as machines are there."""
    machines = _rows(listed.REGULAR)
    factor = max(1.0, machines["Standard_D4s_v5", region] / machines["Standard_D4s_v5", "eastus"])
    guessed = factor > 1.0
    disks = [
        Price(disk(kind, gb), region, round(factor * usd / HOURS_A_MONTH, 6), estimated=guessed)
        for kind, sizes in listed.DISK_USD_A_MONTH.items()
        for gb, usd in sizes.items()
    ]
    return [*disks, Price(ADDRESS, region, listed.ADDRESS_USD)]


@functools.cache
def _built_in_by_key() -> Mapping[Key, Price]:
    return _by_key(built_in())


def _by_key(table: PriceTable) -> dict[Key, Price]:
    return {(each.what.lower(), each.region): each for each in table.prices}


def _guessed(size: Size, region: str, *, spot: bool) -> float:
    """By its vCPUs from a size of its series that is listed, rounded up; dearer where nothing is listed."""
    known = _built_in_by_key()
    base_cpus = 8 if size.cpus >= 8 else 4
    base = size_of(size.series.size_name(base_cpus))
    assert base is not None
    found = known.get((base.name.lower(), region)) or known[base.name.lower(), "eastus"]
    usd = found.spot_usd_per_hour if spot else found.usd_per_hour
    assert usd is not None
    factor = 1.0 if found.region == region else ELSEWHERE
    return math.ceil(usd * factor * size.cpus / base_cpus * 1000) / 1000
