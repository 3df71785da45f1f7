"""What would be made for machines, in words, before anything is. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from evalfleet.model import MachineId, Offer
from evalfleet.ports import Made

from .names import names_of, plain, shared_name
from .settings import Account, AzureSettings
from .sizes import region_and_zone
from .template import RANGE


def outline(
    place: str,
    settings: AzureSettings,
    account: Account,
    home: str,
    machines: Sequence[tuple[MachineId, Offer]],
) -> Iterator[Made]:
    """What machines share first, then each of them with all that goes with it."""
    yield Made("resource group", account.group, "", "made if it is not there")
    for region in dict.fromkeys(region_and_zone(offer.region)[0] for _, offer in machines):
        if settings.subnet:
            yield Made("subnet", settings.subnet, region, "yours")
        else:
            yield Made("network", shared_name(home, region, "net"), region, RANGE)
        rules = shared_name(home, region, f"{plain(place)}-ssh")
        who = ", ".join(settings.ssh_from) or "nowhere but the network itself"
        yield Made("security group", rules, region, f"port {settings.port} from {who}; nothing else")
    for machine, offer in machines:
        yield _machine(settings, machine, offer)


def _machine(settings: AzureSettings, machine: MachineId, offer: Offer) -> Made:
    region, zone = region_and_zone(offer.region)
    words = (
        offer.size,
        "spot" if offer.spot else "regular",
        f"{settings.disk_gb} GB {settings.disk}",
        "public address" if settings.public_ip else "no public address",
        f"${offer.usd_per_hour:.3f}/h",
    )
    where = f"{region}, zone {zone}" if zone else region
    return Made("machine", names_of(machine, settings.name).vm, where, ", ".join(words))
