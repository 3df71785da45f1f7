"""What can be told before money is spent, as far as it is alike in all clouds. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from evalfleet.model import Offer
from evalfleet.ports import Check

UNLIMITED = 1 << 30
"""More machines than anybody wants."""
Room = Mapping[str, Mapping[str, int]]
"""By region: for how many machines each of what is limited lasts."""


def machine_words(offer: Offer, disk: str, *, public_ip: bool) -> str:
    """What a machine of this offer would be."""
    words = (
        offer.size,
        "spot" if offer.spot else "regular",
        disk,
        "public address" if public_ip else "no public address",
        f"${offer.cost.usd_per_hour:.3f}/h",
    )
    return ", ".join(words)


def workers_checks(
    workers: int, room: Room, page: str, *, everywhere: Mapping[str, int] | None = None
) -> list[Check]:
    """For how many machines do quotas last, in all regions together?

    `everywhere`: for how many those last that are of all regions together. `page`: where to ask for more.
    """
    if workers < 2:
        return []
    limits = everywhere or {}
    rooms = {region: min(each.values(), default=UNLIMITED) for region, each in room.items()}
    many = min([sum(rooms.values()), *limits.values()])
    each = ", ".join(f"{n if n < UNLIMITED else 'any number'} in {region}" for region, n in rooms.items())
    told = f"{min(many, workers)} of {workers} machines can be had ({each})"
    room_in_all = {"": many}
    if many >= workers:
        return [Check("workers", "good", told, room=room_in_all)]
    scarce = [what for what, left in limits.items() if left < workers]
    scarce += [
        f"{what} in {region}" for region, has in room.items() for what, left in has.items() if left < workers
    ]
    remedy = f"raise {', '.join(scarce)} ({page}), name more `regions`, or use fewer --workers"
    return [Check("workers", "warn" if many else "bad", told, remedy, room=room_in_all)]


def clock_doubt(skew_s: float, whose: str) -> str:
    """What to tell if this computer's clock is so much behind the cloud's; empty if it is right.

    `whose`: the name of the cloud, in the genitive.
    """
    if not skew_s:
        return ""
    minutes = abs(skew_s) / 60
    wrong = f"{minutes:.0f} min" if minutes < 100 else f"{minutes / 60:.1f} h"
    which = "behind" if skew_s > 0 else "ahead of"
    return (
        f"this computer's clock is {wrong} {which} {whose}; machines end by {whose} clock all the same; "
        "set this computer's clock (`timedatectl set-ntp true`)"
    )


def clock_checks(skew_s: float, whose: str) -> Sequence[Check]:
    why, _, advice = clock_doubt(skew_s, whose).rpartition("; ")
    return [Check("clock", "warn", why, advice)] if why else []


def price_checks(offers: Sequence[Offer], named: str, more: str) -> list[Check]:
    """Are there offers, and from which price on? `named`: the setting that names sizes."""
    if not offers:
        return [Check("offers", "bad", f"none of `{named}` has what is needed", "name larger ones")]
    first = offers[0]
    usd = first.cost.usd_per_hour
    told = f"from ${usd:.3f} an hour ({first.size} in {first.region}), disk and address included"
    return [Check("prices", "good", f"{told}; prices of {first.cost.priced}; {more}")]
