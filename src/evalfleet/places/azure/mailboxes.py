"""Mailboxes in a storage account of Azure's: a container each, as a signature is for a container alone.

What a job is told is read by all who may look at jobs. So it is the address of one blob, by a token for that
blob alone: the first start takes it away, with the key and the token of the mailbox in it, and from then on
the address leads nowhere. A place of Azure's has its mailboxes by

    boxes = BlobMailboxes("batch", context, owner, opened, now, lost_s)

where `opened` tells the client of the storage account, which may have to be asked for first. The name of the
service keeps apart what several have in one account.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from evalfleet.channels.mailbox import Mail
from evalfleet.channels.mailboxes import WAY, KeptMailbox, Mailboxes
from evalfleet.errors import PlaceError
from evalfleet.model import MachineId
from evalfleet.places.vm.answers import as_refusal
from evalfleet.places.vm.settings import MachineUse
from evalfleet.ports import PlaceContext

from .answers import ArmFault
from .blobs import CREATE, EARLY_S, PUT, VERSION, BlobClient, BlobContainer, BlobMail
from .names import EXPIRES, HOME, MACHINE, OWNER, moment, tags_of

log = logging.getLogger(__name__)
GONE = 1.4
"""A storage account counts as gone after so many times the seconds that a machine may be silent: before those
that are all silent at once are given up, so that it is told why."""
NODE_MAY, TAKER_MAY = "rc", "rcd"
"""Read and create; and delete."""
PREFIX = "evalfleet-"


def container_of(service: str, home: str, machine: MachineId) -> str:
    """The name of a machine's container: Azure allows 63 letters, digits and single hyphens."""
    mark = hashlib.sha256(f"{home}/{machine}".encode()).hexdigest()[:10]
    words = re.sub(r"[^a-z0-9]+", "-", f"{home[:12]}-{machine}".lower()).strip("-")
    return f"{PREFIX}{service}-{words[:36].rstrip('-')}-{mark}"


class BlobMailboxes(Mailboxes):
    """The mailboxes of a home in a storage account. `now`: by Azure's clock.

    `lost_s`: how long a machine may be silent. An account that tells nothing for longer, as it was deleted or
    lets us in no more, counts as `gone`, and what is in it, too: else nobody could see a machine's end.
    """

    def __init__(
        self,
        service: str,
        context: PlaceContext,
        owner: str,
        opened: Callable[[], Awaitable[BlobClient]],
        now: Callable[[], float],
        lost_s: float,
    ) -> None:
        super().__init__(context.home)
        self.gone = ""
        """Why nothing is expected of the storage account any more, until it answers again."""
        self._gone_s, self._told_at = GONE * lost_s, time.monotonic()
        self._unremoved: set[str] = set()
        """Containers that could not be removed, as the account was gone."""
        self._service = service
        self._home, self._owner, self._opened, self._now = context.home_id, owner, opened, now
        self._use: MachineUse = "pool" if context.for_pool else "run"

    async def key(self, machine: MachineId) -> str:
        """Made of the account's key, where that is known: so another computer of ours can tell it, too."""
        with as_refusal(machine):
            account = (await self._opened()).account
        if not account.key:
            return await super().key(machine)
        box = self._container(machine)
        return hmac.new(account.key.encode(), f"evalfleet/{box}".encode(), hashlib.sha256).hexdigest()

    async def _open(self, machine: MachineId, seconds: float) -> Mapping[str, Any]:
        with as_refusal(f"the mailbox of {machine}"):
            blobs = await self._opened()
            if blobs.longest_s is not None and seconds > blobs.longest_s:
                raise PlaceError(
                    f"{machine} may wait and run for {seconds:g} s, which outlasts any token of a login; set "
                    "AZURE_STORAGE_ACCOUNT_KEY, or a shorter time",
                    transient=False,
                    scope="place",
                )
            container, until = self._container(machine), self._now() + seconds
            tags = tags_of(machine, self._home, self._owner, self._use, until, {})
            await blobs.make_container(container, tags)
            return {
                "url": f"{blobs.account.url}/{container}",
                "query": await blobs.token(NODE_MAY, until + EARLY_S, container),
                "headers": {"x-ms-version": VERSION},
                "create": {**CREATE, **PUT},
            }

    async def _hand_over(
        self, machine: MachineId, box: Mapping[str, Any], seconds: float
    ) -> Mapping[str, Any]:
        container = self._container(machine)
        with as_refusal(f"the mailbox of {machine}"):
            blobs = await self._opened()
            await blobs.write(container, WAY, json.dumps(box).encode())
            query = await blobs.token(TAKER_MAY, self._now() + seconds + EARLY_S, container, WAY)
        headers = {"x-ms-version": VERSION, **PUT}
        return {"take": f"{blobs.account.url}/{container}/{WAY}?{query}", "headers": headers}

    def mail(self, machine: MachineId) -> Mail:
        return BlobMail(self._opened, self._container(machine))

    async def remove(self, machine: MachineId) -> None:
        container = self._container(machine)
        try:
            await self._delete(container)
        except PlaceError:
            if not self.gone:
                raise
            self._unremoved.add(container)

    async def seen(self) -> Sequence[BlobContainer]:
        """The same as `containers`, and none where the storage account is gone. Raises ArmFault."""
        try:
            found = await self.containers()
        except ArmFault as fault:
            silent_s = time.monotonic() - self._told_at
            if silent_s < self._gone_s:
                raise
            if not self.gone:
                log.warning("the storage of mailboxes is gone: %s", fault)
            why = fault.refusal("the storage of its mailbox is gone")
            self.gone = f"{why} (for {silent_s / 60:.0f} min)" if why.transient else str(why)
            return ()
        self.gone, self._told_at = "", time.monotonic()
        for box in found:
            if box.name in self._unremoved:
                await (await self._opened()).delete_container(box.name)
        found = [box for box in found if box.name not in self._unremoved]
        self._unremoved.clear()
        return found

    async def containers(self) -> Sequence[BlobContainer]:
        """Those of all homes, with their tags. Raises ArmFault."""
        found = await (await self._opened()).containers(f"{PREFIX}{self._service}-")
        return [each for each in found if MACHINE in each.tags]

    async def left(self) -> Sequence[BlobContainer]:
        """Those that can be seen: what else there is of machines can be found without them."""
        try:
            return await self.containers()
        except ArmFault as fault:
            log.warning("mailboxes cannot be seen: %s", fault.refusal("their storage"))
            return ()

    async def all(self) -> Sequence[KeptMailbox]:
        with as_refusal("mailboxes cannot be seen"):
            return [_kept(each) for each in await self.containers()]

    async def remove_kept(self, box: KeptMailbox) -> None:
        await self._delete(box.name)

    def _container(self, machine: MachineId) -> str:
        return container_of(self._service, self._home, machine)

    async def _delete(self, container: str) -> None:
        with as_refusal(f"mailbox {container}"):
            await (await self._opened()).delete_container(container)


def _kept(container: BlobContainer) -> KeptMailbox:
    tags = container.tags
    expires_at = moment(tags.get(EXPIRES, ""))
    return KeptMailbox(
        MachineId(tags[MACHINE]), tags.get(HOME, ""), tags.get(OWNER, ""), expires_at, container.name
    )
