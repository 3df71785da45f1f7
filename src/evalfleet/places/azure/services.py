"""What the services of Azure's that place work on nodes have in common (Machine Learning, Batch): prices and
offers of nodes, the shell around a pilot, and what is ours by its tags.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

from msgspec import structs

from evalfleet.channels.mail.boxes import BOOT, CONCEAL, KeptMailbox, Mailboxes, MailPilot, MailStore
from evalfleet.channels.supervisor.pilot import NO_KVM
from evalfleet.errors import PlaceError, RequestError
from evalfleet.model import Machine, MachineId, Needs, Offer
from evalfleet.places.vm.answers import as_refusal
from evalfleet.places.vm.place import UNSEEN
from evalfleet.places.vm.preflight import clock_doubt
from evalfleet.places.vm.price_book import Quote
from evalfleet.ports import Belonging, Check
from evalfleet.single_flight import SingleFlight

from .answers import ArmFault
from .arm import ArmClient
from .names import EXPIRES, HOME, KIND, MACHINE, OWNER, moment, tags_of
from .prices import OWN, SPOT_FAMILY, AzurePriceBook
from .settings import NodeSettings
from .sizes import VmSize, fits, size_of

WHOSE = "Azure's"
COMING_S = 2.0
OLD_PYTHON, NO_PYTHON = 78, 79
"""Exit codes of a pilot whose image it cannot run in."""
NO_PYTHON_WORDS = "evalfleet: the image has no python3"
OLD_PYTHON_WORDS = "evalfleet: python3 of the image is older than 3.8"
REFUSALS = {
    NO_KVM: "no virtual machine can be made on its node (/dev/kvm); name other `sizes`",
    NO_PYTHON: "the image has no python3; name an `image` with Python 3.8 or later",
    OLD_PYTHON: "the image's python3 is older than 3.8; name an `image` with a later one",
}
"""What the pilot's exit codes mean that tell of the size or the image, and so of all machines alike."""


# -- the shell around a pilot ----------------------------------------------------------------------------


def pilot_script(run: str) -> str:
    """Runs a pilot in a shell of its image, or says why that cannot be done."""
    missing = f"{{ echo {NO_PYTHON_WORDS} >&2; exit {NO_PYTHON}; }}"
    old = f"{{ echo {OLD_PYTHON_WORDS} >&2; exit {OLD_PYTHON}; }}"
    return (
        f"command -v python3 >/dev/null || {missing}; "
        f"python3 -c 'import sys; sys.exit(sys.version_info < (3, 8))' || {old}; exec {run}"
    )


def mail_pilot_script() -> str:
    """The programs of such a pilot are in its environment, so that the command stays short."""
    return pilot_script('python3 -I -c "$EVALFLEET_CONCEAL" "$EVALFLEET_BOOT"')


def mail_pilot_environ(pilot: MailPilot) -> dict[str, str]:
    return {"EVALFLEET_CONCEAL": CONCEAL, "EVALFLEET_BOOT": BOOT, **pilot.environ}


# -- prices and offers -----------------------------------------------------------------------------------


def check_priced(place: str, settings: NodeSettings, region: str, book: AzurePriceBook) -> None:
    """Raises RequestError if one of the sizes has no price in the region."""
    missing = [
        name
        for name in settings.sizes
        if (
            name not in settings.prices
            if (size := size_of(name)) is None
            else node_price(settings, book, size, region, spot=False) is None
        )
    ]
    if missing:
        raise RequestError(
            f"place {place!r}: the price of {', '.join(missing)} in {region} is not known; set "
            f"prices = {{ {missing[0]} = 0.5 }} (USD an hour)"
        )


def node_price(
    settings: NodeSettings, book: AzurePriceBook, size: VmSize, region: str, *, spot: bool
) -> Quote | None:
    """Of an hour of a node: the service itself costs nothing, and system disks come with the nodes."""
    given = settings.prices.get(f"{size.name}@{region}", settings.prices.get(size.name))
    return book.machine(size, region, spot=spot) if given is None else Quote(given, OWN)


def node_offers(
    settings: NodeSettings,
    sizes: Sequence[str],
    region: str,
    book: AzurePriceBook,
    needs: Needs,
    disk_gb: int,
    made: Callable[[VmSize], Offer],
) -> Sequence[Offer]:
    """What can be had, cheapest first; with `spot`, regular nodes beside the spot ones.

    `made`: an offer of this size as the place has it, which is completed with what all have in common.
    """
    kinds = ([True] if settings.spot else []) + ([] if settings.spot and settings.spot_only else [False])
    offers = [
        structs.replace(
            offer,
            region=region,
            spot=spot,
            family=SPOT_FAMILY if spot else size.series.family,
            cost=structs.replace(
                offer.cost,
                usd_per_hour=round(quote.usd, 6),
                idle_usd_per_hour=round(quote.usd, 6),
                priced=quote.as_of,
            ),
            life=structs.replace(
                offer.life,
                settle_s=settings.settle_s,
                queues=True,
                queue_s=settings.expected_queue_s,
                max_queue_s=settings.queue_s,
                extendable=False,
                max_life_s=settings.time_limit_s,
            ),
        )
        for spot in kinds
        for size in filter(None, map(size_of, sizes))
        if fits(size, needs, disk_gb)
        for offer in (made(size),)
        if (quote := node_price(settings, book, size, region, spot=spot)) is not None
    ]
    return sorted(offers, key=lambda offer: offer.cost.usd_per_hour)


# -- doctor ----------------------------------------------------------------------------------------------


def offer_checks(offers: Sequence[Offer], needs: Needs, region: str, billed: str) -> list[Check]:
    if not offers:
        wanted = needs.in_words() or "what is needed"
        told = f"none of `sizes` has {wanted} and a price in {region}"
        return [Check("offers", "bad", told, "name larger ones, or their `prices`")]
    first = offers[0]
    told = f"from ${first.cost.usd_per_hour:.3f} an hour ({first.size}); prices of {first.cost.priced}"
    return [Check("prices", "good", f"{told}; {billed}")]


async def looked(name: str, look: Callable[[], Awaitable[list[Check]]], *, must: bool) -> list[Check]:
    """The checks that `look` makes. What it cannot see is bad if it `must` be seen, else a warning."""
    try:
        return await look()
    except (ArmFault, PlaceError) as fault:
        refusal = fault.refusal(name) if isinstance(fault, ArmFault) else fault
        told, _, remedy = str(refusal).partition("; ")
        return [Check(name, "bad" if must else "warn", f"it cannot be seen: {told}", remedy)]


async def storage_checks(opened: Callable[[], Awaitable[MailStore]]) -> list[Check]:
    """Check that mailboxes can be made there, and that addresses can be signed. Raises PlaceError."""
    store = await opened()
    count = len(await store.bucket.names("about/"))
    await store.bucket.sign("GET", ["about/x"], 60.0)
    by = "its key" if store.secret else "the login"
    return [Check("storage", "good", f"{store.bucket.url} lets us in by {by}; mailboxes there: {count}")]


# -- what is ours ----------------------------------------------------------------------------------------


def belongings_of(parts: Iterable[tuple[str, str, Mapping[str, str]]], where: str) -> list[Belonging]:
    """By machine and home, what there is of it: kinds, names and tags of the `parts` that we have made."""
    names: dict[tuple[str, str], list[str]] = {}
    tags: dict[tuple[str, str], Mapping[str, str]] = {}
    for what, name, told in parts:
        if MACHINE in told:
            key = (told[MACHINE], told.get(HOME, ""))
            names.setdefault(key, []).append(f"{what} {name}")
            tags.setdefault(key, told)
    return [_belonging(key, tags[key], names[key], where) for key in sorted(names)]


def box_parts(boxes: Iterable[KeptMailbox]) -> list[tuple[str, str, Mapping[str, str]]]:
    """Return mailboxes as parts of machines, with tags as other parts have them."""
    return [
        (
            "mailbox",
            box.name,
            tags_of(
                box.machine, box.home, box.owner, "pool" if box.for_pool else "run", box.expires_at or 0.0, {}
            ),
        )
        for box in boxes
    ]


def _belonging(key: tuple[str, str], tags: Mapping[str, str], parts: Sequence[str], where: str) -> Belonging:
    ends_at = moment(tags.get(EXPIRES, ""))
    return Belonging(
        MachineId(key[0]),
        key[1],
        tags.get(OWNER, ""),
        where,
        None if ends_at is None else round(ends_at * 1e6),
        tuple(parts),
        of_pool=tags.get(KIND) == "pool",
    )


SightingT = TypeVar("SightingT")


class ServiceLooks(Generic[SightingT]):
    """What exists in a service, looked at once for all who ask, and no more often than its settings say.

    While a machine has its node, which is billed, but not yet its pilot, looks are COMING_S apart.
    """

    def __init__(self, look: Callable[[], Awaitable[SightingT]], poll_s: float) -> None:
        self._take, self._poll_s = look, poll_s
        self._is_coming = False
        self._looked_at = -poll_s
        self._flight = SingleFlight(self._look, self._pause_s)

    async def fresh(self) -> SightingT:
        """Raises PlaceError."""
        with as_refusal(UNSEEN):
            return await self._flight.fresh()

    async def _look(self) -> SightingT:
        self._looked_at = time.monotonic()
        return await self._take()

    def _pause_s(self) -> float:
        pause_s = min(self._poll_s, COMING_S) if self._is_coming else self._poll_s
        return max(0.0, self._looked_at + pause_s - time.monotonic())

    def note(self, machines: Iterable[Machine]) -> None:
        """What the last look has shown."""
        self._is_coming = any(machine.phase == "pending" for machine in machines)


def without_mail(machine: Machine, boxes: Mailboxes, *, has_box: bool) -> Machine:
    """The machine as it is by its mailbox, whatever its service says of it: nobody can reach one whose
    mailbox was deleted, or is in a storage account that is gone."""
    if boxes.gone and machine.phase in ("queued", "pending", "up"):
        return structs.replace(machine, phase="gone", detail=boxes.gone)
    if not has_box and machine.phase == "up":
        return structs.replace(machine, phase="gone", detail="its mailbox was deleted")
    return machine


async def knock(arm: ArmClient, place: str, ask: Callable[[], Awaitable[object]]) -> Sequence[str]:
    """Are we let in, and is this computer's clock right? Raises PlaceError if we are not."""
    with as_refusal(f"place {place!r}"):
        try:
            await ask()
        except ArmFault as fault:
            if fault.refusal("").transient:
                return ()  # the run asks again
            raise
        except PlaceError as err:
            if err.transient:
                return ()
            raise
    return tuple(filter(None, (clock_doubt(arm.skew_s, WHOSE),)))
