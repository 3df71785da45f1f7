"""A machine becomes an image of the project, for all regions: cleaned, stopped, its disk copied.

Each step is found done or not by the labels of the machine and by what Google says, so that whoever comes
after a crash goes on.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence

from evalfleet.channels.ssh.target import HostDown, HostLost, HostRefused
from evalfleet.errors import PlaceError, RequestError
from evalfleet.model import Machine, MachineId
from evalfleet.names import home_in
from evalfleet.places.vm.answers import Json, table
from evalfleet.places.vm.image_cleanup import clean, seal
from evalfleet.places.vm.ssh_access import SshAccess, address_of
from evalfleet.ports import Image

from .answers import GoogleFault
from .client import ComputeClient, path_of
from .inventory import Instance, ProjectInventory
from .lifecycle import InstanceControl
from .names import HOME, IMAGE, OWNER, label, plain
from .prices import AS_OF, IMAGE_USD_A_GB_MONTH, SNAPSHOT_USD_A_GB_MONTH
from .settings import GceSettings, GoogleAccount

SOURCE, SIZE = "evalfleet-captured-from", "evalfleet-gb"
RESTED, CLEANED = "evalfleet-rested-for", "evalfleet-cleaned-for"
"""Labels of a machine that is to become this image: the benchmark has come to rest; it was cleaned."""
_NAME = re.compile(r"[a-z](?:[a-z0-9-]{0,38}[a-z0-9])?")
Rest = Callable[[], Awaitable[None]]
"""Brings the benchmark on the machine to rest."""
Tell = Callable[[str], None]


class ProjectImages:
    """The images that machines of this home became; all homes' images are listed. Raises GoogleFault."""

    def __init__(
        self,
        client: ComputeClient,
        inventory: ProjectInventory,
        lifecycle: InstanceControl,
        access: SshAccess,
        settings: GceSettings,
        account: GoogleAccount,
        home: str,
    ) -> None:
        self._client = client
        self._inventory = inventory
        self._lifecycle = lifecycle
        self._access = access
        self._settings = settings
        self._account = account
        self._home = label(home)

    def _path(self, image: str) -> str:
        return f"{self._client.root}/global/images/{plain(f'evalfleet-{self._home[:6]}-{image}')}"

    async def reserve(self, machine: MachineId, image: str) -> None:
        """Check that the name can be used: an image needs nothing besides, and its name is made with it."""
        if not _NAME.fullmatch(image):
            raise RequestError(
                f"an image cannot be called {image[:90]!r}: up to 40 small letters, digits and '-', the "
                "first a letter"
            )
        await self._begun(machine, image)

    async def _begun(self, machine: MachineId, image: str) -> Json | None:
        """The image, if there is one of this machine. Another's keeps the name."""
        shown = await self._client.find(self._path(image))
        if shown is None:
            return None
        labels = table(shown.get("labels"))
        if labels.get(HOME) != self._home or labels.get(SOURCE) != label(machine):
            raise RequestError(
                f"there is an image {image!r} already; choose another name, or delete it with "
                f"`evalfleet machines --delete-image {image}`"
            )
        return shown

    async def capture(self, machine: Machine, image: str, rest: Rest, tell: Tell) -> Image:
        shown = await self._begun(machine.id, image)
        if shown is not None and shown.get("status") == "FAILED":
            await self._client.change("DELETE", self._path(image))
            shown = None
        if shown is None:
            await self._publish(machine.id, image, rest, tell)
        shown = await self._client.get(self._path(image))
        while shown.get("status") == "PENDING":  # another process has begun it
            for operation in await self._client.all(f"{self._client.root}/global/operations"):
                if str(operation.get("targetLink", "")).endswith(self._path(image)):
                    await self._client.finish(operation)
            shown = await self._client.get(self._path(image))
        return read(shown)

    async def _publish(self, machine: MachineId, image: str, rest: Rest, tell: Tell) -> None:
        vm = await self._vm(machine)
        tell(f"{machine} is cleaned and stopped, and becomes an image, which takes some minutes")
        await self._quiet(machine, vm, image, rest)
        await self._lifecycle.stop(machine)
        vm = await self._vm(machine)
        shown = await self._client.get(vm.path)
        labels = {
            **self._settings.labels,
            HOME: self._home,
            OWNER: label(self._account.owner),
            IMAGE: image,
            SOURCE: label(machine),
            SIZE: vm.labels.get(SIZE, str(self._settings.disk_gb)),
        }
        body = {"name": self._path(image).rsplit("/", 1)[-1], "labels": labels}
        source = path_of({"selfLink": shown["disks"][0]["source"]})
        await self._client.change(
            "POST", f"{self._client.root}/global/images", {**body, "sourceDisk": source}
        )

    async def _quiet(self, machine: MachineId, vm: Instance, image: str, rest: Rest) -> None:
        """Bring the machine to rest, clean it and seal it. Labels mark the first two as done.

        A machine that was cleaned and lets nobody in is taken for sealed.
        """
        if vm.status != "RUNNING":
            if vm.labels.get(CLEANED) != image:
                raise _cannot(machine, "it does not run, and was not cleaned")
            return
        user = self._settings.user
        try:
            address = address_of(await self._lifecycle.running(machine, vm))
            if image not in (vm.labels.get(RESTED), vm.labels.get(CLEANED)):
                await rest()
                vm = await self._marked(machine, {RESTED: image})
            if vm.labels.get(CLEANED) != image:
                gb = await clean(self._access.host_home(machine, address).host, user)
                vm = await self._marked(machine, {CLEANED: image, SIZE: f"{gb:.0f}"})
            await seal(self._access.host_home(machine, address).host, user)
        except (HostDown, HostLost, HostRefused) as err:
            if (await self._vm(machine)).labels.get(CLEANED) != image:
                raise _cannot(machine, str(err)) from err
        finally:
            await self._access.drop(machine)

    async def _marked(self, machine: MachineId, labels: dict[str, str]) -> Instance:
        vm = await self._vm(machine)
        await self._lifecycle.mark(vm, {**vm.labels, **labels})
        return await self._vm(machine)

    async def _vm(self, machine: MachineId) -> Instance:
        vm = (await self._inventory.fresh()).vms.get(machine)
        if vm is None:
            raise _cannot(machine, "there is no such machine any more")
        return vm

    # -- all of them ---------------------------------------------------------------------------

    async def all(self) -> Sequence[Image]:
        """In the whole project, by their labels."""
        found = await self._client.all(f"{self._client.root}/global/images", filter=f"labels.{IMAGE}:*")
        images = [read(each) for each in found if table(each.get("labels")).get(HOME)]
        return (*images, *await self._snapshots())

    async def _snapshots(self) -> list[Image]:
        """In the whole project; none, if we may not look."""
        try:
            shown = await self._client.all(f"{self._client.root}/global/snapshots")
        except GoogleFault as fault:
            if fault.status != 403:
                raise
            return []
        return [image for each in shown if (image := read_snapshot(each)) is not None]

    async def drop(self, image: Image) -> None:
        """What does not have the labels any more is left alone."""
        shown = await self._client.find(image.parts[0])
        if shown is None:
            return
        labels = table(shown.get("labels"))
        if (labels.get(HOME), labels.get(IMAGE)) != (image.home, image.name):
            raise PlaceError(
                f"{image.parts[0]} is not ours; it is left alone", transient=False, scope="machine"
            )
        try:
            await self._client.change("DELETE", image.parts[0])
        except GoogleFault as fault:
            if fault.status != 404:
                raise


def read(shown: Json) -> Image:
    """An image as Google shows it. Pure."""
    labels = table(shown.get("labels"))
    path = path_of(shown)
    gb = float(labels.get(SIZE) or shown.get("diskSizeGb") or 0)
    states = {"READY": "ready", "PENDING": "being made", "FAILED": "failed", "DELETING": "being deleted"}
    return Image(
        name=str(labels.get(IMAGE, "")),
        home=str(labels.get(HOME, "")),
        owner=str(labels.get(OWNER, "")),
        setting=f'image = "{path}"',
        state=states.get(str(shown.get("status")), str(shown.get("status"))),
        regions=tuple(str(each) for each in shown.get("storageLocations") or ()),
        gb=gb,
        usd_per_month=round(gb * IMAGE_USD_A_GB_MONTH, 2),
        prices_as_of=AS_OF,
        parts=(path,),
    )


def read_snapshot(shown: Json) -> Image | None:
    """A snapshot of a machine's disk, by the name of the disk; None: of another one. Google tells what it
    holds, and is paid for."""
    if not (home := home_in(str(shown.get("sourceDisk", "")).rsplit("/", 1)[-1])):
        return None
    gb = float(shown.get("storageBytes") or 0) / (1 << 30)
    return Image(
        name=str(shown.get("name")),
        home=home,
        owner=str(table(shown.get("labels")).get(OWNER, "")),
        setting="",
        state=str(shown.get("status", "")).lower(),
        regions=tuple(str(each) for each in shown.get("storageLocations") or ()),
        gb=round(gb, 1),
        usd_per_month=round(gb * SNAPSHOT_USD_A_GB_MONTH, 2),
        prices_as_of=AS_OF,
        parts=(path_of(shown),),
        kind="snapshot",
    )


def _cannot(machine: MachineId, why: str) -> PlaceError:
    return PlaceError(f"{machine} cannot be captured: {why}", transient=False, scope="machine")
