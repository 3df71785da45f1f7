"""A machine becomes an image: cleaned, stopped, marked as generalized, and copied to every region.

Each step is found done or not by what Azure says, so that whoever comes after a crash goes on. Generalized,
not specialized: only so does a machine that is made from it take a user, keys and a host key of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager

from evalfleet.channels.ssh.target import HostDown, HostLost, HostRefused
from evalfleet.clock import pauses
from evalfleet.errors import PlaceError, RequestError
from evalfleet.model import Machine, MachineId
from evalfleet.places.vm.answers import Json, Problem
from evalfleet.places.vm.image_cleanup import clean, seal
from evalfleet.places.vm.ssh_access import SshAccess, address_of
from evalfleet.ports import Image

from . import galleries, leftovers
from .answers import ArmFault, fault_of, tags_in
from .arm import ArmClient
from .galleries import CLEANED, IMAGE, RESTED, SIZE, SOURCE, ImageIds
from .inventory import GroupInventory
from .lifecycle import AzureControl
from .names import HOME
from .region_network import RegionNetwork, check_ours
from .settings import AzureSettings
from .template import COMPUTE, GALLERIES, RESOURCES

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 15.0
MADE_S = 900.0
SNAPSHOTS = "Microsoft.Compute/snapshots"
COPIED_S = 4 * 3600.0
GONE_S = 900.0
Rest = Callable[[], Awaitable[None]]
"""Brings the benchmark on the machine to rest."""
Tell = Callable[[str], None]


class ImageGallery:
    """The gallery of this home's images: machines become images there, and all homes' images are listed.

    Raises ArmFault, PlaceError.
    """

    def __init__(
        self,
        arm: ArmClient,
        inventory: GroupInventory,
        lifecycle: AzureControl,
        access: SshAccess,
        network: RegionNetwork,
        settings: AzureSettings,
        home: str,
    ) -> None:
        self._arm = arm
        self._inventory = inventory
        self._lifecycle = lifecycle
        self._access = access
        self._settings = settings
        self._root = network.root
        self._home = home
        self._tags = network.tags

    def _ids(self, image: str) -> ImageIds:
        return ImageIds(self._root, self._home, image)

    # -- a name --------------------------------------------------------------------------------

    async def reserve(self, machine: MachineId, image: str) -> None:
        galleries.check_name(image)
        ids = self._ids(image)
        if await self._begun(ids, machine, image) is not None:
            return
        vm = await self._vm(machine)
        tags = galleries.tags_of(image, machine, self._tags)
        here = galleries.plain_region(vm["location"])
        await self._have(ids.gallery, galleries.gallery(here, self._tags))
        shown = await self._have(ids.definition, galleries.definition(here, tags, image, vm))
        if tags_in(shown).get(SOURCE) != machine:  # another was to become it, and did not
            await self._merge_tags(ids.definition, {SOURCE: machine})

    async def _begun(self, ids: ImageIds, machine: MachineId, image: str) -> Json | None:
        """The image, if there is one of this machine. Another's keeps the name."""
        shown = await self._arm.find(ids.version, GALLERIES)
        if shown is not None:
            check_ours({"id": ids.version, **shown}, self._home)
            if tags_in(shown).get(SOURCE) != machine:
                raise RequestError(
                    f"there is an image {image!r} already; choose another name, or delete it with "
                    f"`evalfleet machines --delete-image {image}`"
                )
        return shown

    async def _have(self, id: str, wanted: Json) -> Json:
        """Make it if it is not there. What is not ours is left alone."""
        shown = await self._arm.find(id, GALLERIES)
        if shown is None:
            shown = await self._arm.send("PUT", id, GALLERIES, wanted)
        check_ours({"id": id, **shown}, self._home)
        async with asyncio.timeout(MADE_S):
            async for state in self._states(id):
                if state == "succeeded":
                    break
                if state in ("failed", ""):
                    raise ArmFault(409, (Problem("RetryableError", f"{id} could not be made"),))
        return shown

    # -- the machine ---------------------------------------------------------------------------

    async def capture(self, machine: Machine, image: str, rest: Rest, tell: Tell) -> Image:
        ids, operation = self._ids(image), ""
        shown = await self._begun(ids, machine.id, image)
        if shown is not None and galleries.state_of(shown) in ("failed", "being deleted"):
            await self._remove(ids.version, self._home, image)
            shown = None
        if shown is None:
            operation = await self._publish(machine.id, image, ids, rest, tell)
        return await self._copied(ids, operation, tell)

    async def _publish(self, machine: MachineId, image: str, ids: ImageIds, rest: Rest, tell: Tell) -> str:
        vm = await self._vm(machine)
        if not galleries.is_generalized(vm):
            tell(f"{machine} is cleaned and stopped; its local disk (/mnt) will not be in the image")
            await self._quiet(machine, vm, image, rest)
            await self._lifecycle.stop(machine)
            await self._arm.send("POST", f"{vm['id']}/generalize", COMPUTE)
            vm = await self._vm(machine)
        tags = galleries.tags_of(image, machine, self._tags)
        gb = galleries.number(tags_in(vm).get(SIZE, "")) or self._settings.disk_gb
        body = galleries.version(vm, tags, gb, self._settings.regions)
        return await self._arm.begin(ids.version, GALLERIES, "PUT", body)

    async def _quiet(self, machine: MachineId, shown: Json, image: str, rest: Rest) -> None:
        """Bring the machine to rest, clean it and seal it. Tags mark the first two as done.

        A machine that was cleaned and lets nobody in is taken for sealed.
        """
        user, tags = self._settings.user, tags_in(shown)
        vm = (await self._inventory.fresh()).vms.get(machine)
        if vm is None or vm.power != "running":
            if tags.get(CLEANED) != image:
                raise _cannot(machine, "it does not run, and was not cleaned")
            return
        try:
            address = address_of(await self._lifecycle.running(vm))
            if image not in (tags.get(RESTED), tags.get(CLEANED)):
                await rest()
                await self._merge_tags(vm.id, {RESTED: image})
            if tags.get(CLEANED) != image:
                gb = await clean(self._access.host_home(machine, address).host, user)
                await self._merge_tags(vm.id, {CLEANED: image, SIZE: f"{gb:.1f}"})
            await seal(self._access.host_home(machine, address).host, user)
        except (HostDown, HostLost, HostRefused) as err:
            if tags_in(await self._vm(machine)).get(CLEANED) != image:
                raise _cannot(machine, str(err)) from err
        finally:
            await self._access.drop(machine)

    async def _vm(self, machine: MachineId) -> Json:
        """The VM as Azure shows it now, with its power and whether it is generalized."""
        vm = (await self._inventory.fresh()).vms.get(machine)
        if vm is None:
            raise _cannot(machine, "there is no such machine any more")
        return await self._arm.get(vm.id, COMPUTE, **{"$expand": "instanceView"})

    async def _merge_tags(self, id: str, tags: Mapping[str, str]) -> None:
        body = {"operation": "Merge", "properties": {"tags": dict(tags)}}
        await self._arm.send("PATCH", f"{id}/providers/Microsoft.Resources/tags/default", RESOURCES, body)

    # -- the copies ----------------------------------------------------------------------------

    async def _copied(self, ids: ImageIds, operation: str, tell: Tell) -> Image:
        shown = await self._arm.get(ids.version, GALLERIES)
        found = galleries.read({"id": ids.definition}, shown)
        tell(f"copied to {', '.join(found.regions)}: {found.gb:.0f} GB each, which takes some minutes")
        async with asyncio.timeout(COPIED_S):
            async for state in self._states(ids.version):
                if state == "succeeded":
                    break
                if state in ("failed", ""):
                    raise await self._why(ids.version, operation)
        return galleries.read({"id": ids.definition}, await self._arm.get(ids.version, GALLERIES))

    async def _why(self, id: str, operation: str) -> ArmFault:
        shown = await self._arm.find(operation, "") if operation else None
        error = (shown or {}).get("error")
        return fault_of(409, error or {"code": "RetryableError", "message": f"{id} could not be made"})

    async def _states(self, id: str) -> AsyncGenerator[str]:
        """Of something that is being made, until somebody has seen enough; empty: it is not there."""
        rests = pauses(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            shown = await self._arm.find(id, GALLERIES)
            yield str(shown["properties"].get("provisioningState", "")).lower() if shown else ""
            await asyncio.sleep(next(rests))

    # -- all of them ---------------------------------------------------------------------------

    async def images(self) -> Sequence[Image]:
        """In the whole subscription, or where we may look, by their tags."""
        found = galleries.definitions_in(await leftovers.resources_of(self._arm, self._root, galleries.TYPES))
        versions = await asyncio.gather(*(self._version(each) for each in found))
        images = [galleries.read(each, version) for each, version in zip(found, versions, strict=True)]
        return (*images, *await self._snapshots())

    async def _snapshots(self) -> list[Image]:
        """In our group; none, if we may not look."""
        try:
            shown = await self._arm.all(f"{self._root}/providers/{SNAPSHOTS}", COMPUTE)
        except ArmFault as fault:
            if fault.status not in (403, 404):
                raise
            return []
        return [image for each in shown if (image := galleries.snapshot(each)) is not None]

    async def _version(self, definition: Json) -> Json | None:
        try:
            return await self._arm.find(galleries.version_of(definition["id"]), GALLERIES)
        except ArmFault as fault:
            if fault.status != 403:
                raise
            return galleries.hidden(definition)  # somebody else's, perhaps: the others are seen all the same

    async def drop(self, image: Image) -> None:
        """The version first, then what is empty then."""
        definition = image.parts[0]
        await self._remove(galleries.version_of(definition), image.home, image.name)
        await self._remove(definition, image.home, image.name)
        gallery = definition.rsplit("/images/", 1)[0]
        if await self._arm.find(gallery, GALLERIES) is not None:
            left = await self._arm.all(f"{gallery}/images", GALLERIES)
            if not left:
                await self._remove(gallery, image.home, "")

    async def _remove(self, id: str, home: str, image: str) -> None:
        """Remove it, and wait until it is gone. What does not have the tags any more is left alone."""
        rests, until = pauses(FIRST_PAUSE_S, LONGEST_PAUSE_S), time.monotonic() + GONE_S
        while (shown := await self._arm.find(id, GALLERIES)) is not None:
            tags = tags_in(shown)
            if tags.get(HOME) != home or tags.get(IMAGE, "") != image:
                raise PlaceError(f"{id} is not ours; it is left alone", transient=False, scope="machine")
            if time.monotonic() > until:
                raise PlaceError(f"{id} is still there after {GONE_S:g} s", transient=True)
            try:
                await self._arm.send("DELETE", id, GALLERIES)
            except ArmFault as fault:
                if fault.status not in (404, 409):
                    raise  # else something is being done to it, or what is in it goes first
                if not image and fault.status == 409:
                    return  # somebody has put another image into the gallery
            await asyncio.sleep(next(rests))


def _cannot(machine: MachineId, why: str) -> PlaceError:
    return PlaceError(f"{machine} cannot be captured: {why}", transient=False, scope="machine")


@contextmanager
def image_refusal(image: str) -> Generator[None]:
    """Raise what Azure's no to something about an image means: PlaceError or RequestError for ArmFault."""
    try:
        yield
    except TimeoutError:
        raise PlaceError(f"image {image}: it takes too long; try again", transient=True) from None
    except ArmFault as fault:
        if fault.has("NotOurs"):
            raise RequestError(f"{fault.problems[0].message}: choose another name or group") from fault
        raise fault.refusal(f"image {image}") from fault
