"""The account as one look shows it: jobs, pools and nodes of ours, and what their states mean."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from urllib.parse import quote

import msgspec
from msgspec import Struct, structs

from evalfleet.channels.link import plain
from evalfleet.channels.mail.boxes import KeptMailbox
from evalfleet.model import Machine, MachineId, decodable
from evalfleet.places.azure.answers import ArmFault
from evalfleet.places.azure.arm import ArmClient
from evalfleet.places.azure.names import HOME, MACHINE
from evalfleet.places.azure.services import REFUSALS
from evalfleet.places.vm.answers import Json, rows, table

from .pilot import RESTARTED
from .template import (
    BOOT_S,
    END_S,
    FOR_GOOD,
    HOST_KEY,
    LIFE,
    NO_IMAGE,
    NO_PULL,
    PREFIX,
    START,
    TASK,
    NodeStart,
    constraints,
    metadata_in,
)

VERSION = "2025-06-01"
CONTENT = "application/json; odata=minimalmetadata"
SCOPE = "https://batch.core.windows.net//.default"
"""Batch accepts tokens only for the audience `https://batch.core.windows.net/`, with its trailing slash."""
COMING = ("creating", "starting", "waitingforstarttask", "idle", "running", "upgradingos", "reimaging")
"""States of a node that is had, and billed, and of use now or soon."""
LOST = ("preempted", "rebooting", "leavingpool", "offline", "deallocating", "deallocated")
"""States of a node on which nothing of ours goes on."""
UNPULLABLE = (
    "an image of `images`, or `container`, is not there, or its registry does not let nodes read it: check "
    "its name, `registry_user` and `registry_password`"
)
SILENT = "the pilot has not answered"
START_LOG = "startup/stderr.txt"
"""What the start task of a node has written, below the node's folder of tasks."""
TASK_LOG = "stderr.txt"
WORDS_CAP = 300
REMEDIES = {
    "accountcorequotareached": "ask for more dedicated cores: the account's page Quotas in the portal",
    "accountlowprioritycorequotareached": "ask for more spot cores: the account's page Quotas in the portal",
    "accountvmseriescorequotareached": "ask for more cores of that series, or name other `sizes`",
    "allocationtimedout": "the region has no room for that size now: other `sizes` are tried",
}


class Sighting(Struct, frozen=True):
    """One machine of ours: its job, and as much of the rest as one must know."""

    machine: MachineId
    job: Json
    """Empty: only a pool is left of it."""
    pool: Json = {}
    node: Json = {}
    task: Json = {}
    start: NodeStart | None = None
    """What is known of its first start."""
    has_box: bool = False
    """Is there a mailbox of its own?"""
    words: str = ""
    """The last line of the log of its start task, or of its task, if that has failed."""

    @property
    def state(self) -> str:
        return str(self.job.get("state", "deleting")).lower()

    @property
    def requeued(self) -> int:
        """How often Batch has run its task anew."""
        told = table(self.task.get("executionInfo"))
        return int(told.get("requeueCount") or 0) + int(told.get("retryCount") or 0)

    @property
    def life_s(self) -> float:
        return float(metadata_in(self.job).get(LIFE) or 0.0)

    @property
    def first_start(self) -> NodeStart | None:
        """The start as the node shows it now, if it has one and no earlier one is known."""
        if self.start is not None or not self.node:
            return self.start
        node = str(self.node.get("id"))
        return NodeStart(f"{node}.{self.requeued}", node, seconds_of(self.node.get("allocationTime")))

    @property
    def address(self) -> str:
        """Where the node's sshd is reached; empty if it is not."""
        ends = rows(table(self.node.get("endpointConfiguration")).get("inboundEndpoints"))
        for end in ends:
            if end.get("backendPort") == 22 or str(end.get("name", "")).startswith("ssh"):
                return f"{end.get('publicIPAddress')}:{end.get('frontendPort')}"
        return ""


def seconds_of(stamp: object) -> float:
    """A time as Azure writes it, in seconds since 1970; 0 if it is none."""
    try:
        return datetime.fromisoformat(str(stamp).replace("Z", "+00:00")).timestamp()
    except ValueError:
        return 0.0


class BatchClient:
    """The calls of one Batch account that we need. All raise ArmFault."""

    def __init__(self, arm: ArmClient) -> None:
        self.arm = arm

    async def jobs(self, prefix: str) -> list[Json]:
        return await self.arm.all("/jobs", VERSION, **{"$filter": f"startswith(id,'{prefix}')"})

    async def pools(self) -> list[Json]:
        """Those that Batch has made for jobs of ours."""
        return await self.arm.all("/pools", VERSION, **{"$filter": f"startswith(id,'{PREFIX}')"})

    async def nodes(self, pool: str) -> list[Json]:
        try:
            return await self.arm.all(f"/pools/{pool}/nodes", VERSION)
        except ArmFault as fault:
            if fault.status == 404:
                return []
            raise

    async def running(self) -> Mapping[str, int]:
        """By pool, how many of its nodes run a task: one call for all."""
        counts = await self.arm.all("/nodecounts", VERSION)
        kinds = ("dedicated", "lowPriority")
        return {
            str(each.get("poolId")): sum(int(table(each.get(kind)).get("running") or 0) for kind in kinds)
            for each in counts
        }

    async def task(self, job: str) -> Json:
        return await self.arm.find(f"/jobs/{job}/tasks/{TASK}", VERSION) or {}

    async def host_key(self, job: str) -> str:
        """What the pilot told; empty if it has not yet."""
        return (await self._file(job, HOST_KEY)).strip()

    async def _file(self, job: str, path: str) -> str:
        try:
            return await self.arm.read(f"/jobs/{job}/tasks/{TASK}/files/{quote(path, safe='')}", VERSION)
        except ArmFault as fault:
            if fault.status in (404, 409):
                return ""
            raise

    async def task_words(self, job: str) -> str:
        """The last line that its task has written; empty if there is none, or nobody can tell."""
        return await self._last_line(f"/jobs/{job}/tasks/{TASK}/files/{TASK_LOG}")

    async def start_words(self, pool: str, node: str) -> str:
        """The same of the start task of a node: its exit code alone tells nobody what is wrong."""
        return await self._last_line(f"/pools/{pool}/nodes/{node}/files/{quote(START_LOG, safe='')}")

    async def _last_line(self, path: str) -> str:
        try:
            lines = (await self.arm.read(path, VERSION)).split("\n")
        except ArmFault:
            return ""
        return next((plain(line.strip(), WORDS_CAP) for line in reversed(lines) if line.strip()), "")

    async def add_job(self, body: Json) -> None:
        await self.arm.send("POST", "/jobs", VERSION, body)

    async def job(self, id: str) -> Json | None:
        return await self.arm.find(f"/jobs/{id}", VERSION)

    async def patch_job(self, id: str, body: Json) -> None:
        await self.arm.send("PATCH", f"/jobs/{id}", VERSION, body)

    async def delete(self, what: str) -> None:
        """`what`: jobs/ID or pools/ID. One that is gone, or is going, is deleted."""
        try:
            await self.arm.send("DELETE", f"/{what}", VERSION)
        except ArmFault as fault:
            if fault.status != 404 and not fault.has("JobBeingDeleted", "PoolBeingDeleted"):
                raise


class AccountInventory:
    """What exists of one home in an account. Three lists show it; more is asked of machines that change."""

    def __init__(
        self,
        client: BatchClient,
        boxes: Callable[[], Awaitable[Sequence[KeptMailbox]]],
        prefix: str,
        home: str,
    ) -> None:
        """`boxes`: the mailboxes of all homes, where machines are reached by those."""
        self._client, self._boxes, self._prefix, self._home = client, boxes, prefix, home

    async def look(self) -> Mapping[MachineId, Sighting]:
        client = self._client
        jobs, pools, running, boxes = await asyncio.gather(
            client.jobs(self._prefix), client.pools(), client.running(), self._boxes()
        )
        found: dict[MachineId, Sighting] = {}
        by_id = {str(pool.get("id")): pool for pool in pools}
        for job in jobs:
            tags = metadata_in(job)
            if tags.get(HOME) == self._home and MACHINE in tags:
                machine = MachineId(tags[MACHINE])
                pool = by_id.get(_pool_of(job), {})
                found[machine] = Sighting(machine, job, pool, start=_start_in(tags.get(START, "")))
        for pool in pools:  # a job may go before the pool that was made for it
            tags = metadata_in(pool)
            if tags.get(HOME) == self._home and MACHINE in tags:
                found.setdefault(MachineId(tags[MACHINE]), Sighting(MachineId(tags[MACHINE]), {}, pool))
        for box in boxes:  # it is made before the job, and removed after it
            seen = found.get(box.machine) or Sighting(box.machine, {})
            found[box.machine] = structs.replace(seen, has_box=True)
        closer = await asyncio.gather(*(self._closer(each, running) for each in found.values()))
        return {each.machine: each for each in closer}

    async def _closer(self, seen: Sighting, running: Mapping[str, int]) -> Sighting:
        """Ask for its node and its task, unless it is up and its one node still runs the one task."""
        start = seen.start
        settled = start is not None and bool(start.address) and bool(seen.pool)
        if not seen.job or (seen.state == "active" and settled and running.get(_pool_of(seen.job)) == 1):
            return seen
        task = await self._client.task(str(seen.job["id"]))
        if seen.state != "active":
            code = table(task.get("executionInfo")).get("exitCode")
            ours = not code or code == RESTARTED or code in REFUSALS
            words = "" if ours else await self._client.task_words(str(seen.job["id"]))
            return structs.replace(seen, task=task, words=words)
        nodes = await self._client.nodes(_pool_of(seen.job))
        where = str(table(task.get("nodeInfo")).get("nodeId", ""))
        chosen = [node for node in nodes if node.get("id") == where] or nodes
        node = chosen[0] if chosen else {}
        words = ""
        if str(node.get("state")).lower() == "starttaskfailed":
            words = await self._client.start_words(_pool_of(seen.job), str(node.get("id")))
        return structs.replace(seen, task=task, node=node, words=words)


def _pool_of(job: Json) -> str:
    told = table(job.get("executionInfo")).get("poolId")
    return str(told or table(job.get("poolInfo")).get("poolId") or "")


def _start_in(mark: str) -> NodeStart | None:
    try:
        return msgspec.json.decode(mark, type=decodable(NodeStart)) if mark else None
    except msgspec.MsgspecError:
        return None


# -- what it means -------------------------------------------------------------------------------------


def machine_of(seen: Sighting, now: float, answer_s: float) -> Machine:
    """The machine as `list` shows it. `now` is by Azure's clock. A pilot may be silent for `answer_s`."""
    if seen.has_box and not seen.job and not seen.pool:
        return Machine(seen.machine, "queued", ran_s=0.0, detail="being submitted, or deleted")
    if seen.state != "active":
        return _ended(seen, now)
    start = seen.first_start
    if start is None:
        return _waiting(seen)
    shown = Machine(seen.machine, "pending", start.address, start.node, start=start.start)
    shown = structs.replace(shown, ran_s=max(0.0, now - start.allocated))
    if seen.life_s and now - start.allocated >= seen.life_s:  # its supervisor has ended all that ran there
        return structs.replace(shown, phase="gone", detail="its time is over")
    if not seen.task:  # nothing has changed since it was up
        return structs.replace(shown, phase="up")
    state, node = str(seen.node.get("state", "")).lower(), str(seen.node.get("id", ""))
    if not node or node != start.node or state in LOST or f"{node}.{seen.requeued}" != start.start:
        return structs.replace(shown, phase="evicted", detail=f"Batch: its node was lost ({state or 'gone'})")
    if state == "starttaskfailed":
        return _start_failed(seen, shown)
    if state not in COMING:
        told = "; ".join(_words(each) for each in rows(seen.node.get("errors")))
        return _without_image(
            structs.replace(shown, phase="gone", detail=f"Batch: the node is {state}. {told}")
        )
    if state == "running" and start.address:
        return structs.replace(shown, phase="up")
    begun = seconds_of(table(seen.task.get("executionInfo")).get("startTime"))
    if state == "running" and begun and now - begun > answer_s:
        told = f"Batch: its task has run for {(now - begun) / 60:.0f} min, but {SILENT}"
        return structs.replace(shown, phase="gone", detail=told)
    pulls = state == "waitingforstarttask" and "docker pull" in str(seen.pool.get("startTask"))
    machine = table(seen.pool.get("virtualMachineConfiguration"))
    pulls = pulls or (state == "starting" and "containerConfiguration" in machine)
    return structs.replace(shown, step="pull" if pulls else "", detail=f"Batch: the node is {state}")


def _without_image(shown: Machine) -> Machine:
    """One whose container could not be had is given up with its place, if its registry says so for good."""
    if re.search(FOR_GOOD, shown.detail, re.IGNORECASE):
        told = f"{shown.detail.rstrip('. ')}; {UNPULLABLE}"
        return structs.replace(shown, start="", detail=told)
    return structs.replace(shown, detail=shown.detail.strip())


def _start_failed(seen: Sighting, shown: Machine) -> Machine:
    """Without a start, its offer is given up: a start task that fails would fail on the next node, too. But a
    registry that is away may be there for the next one."""
    code = table(seen.node.get("startTaskInfo")).get("exitCode")
    told = f"Batch: starttaskfailed: {_start_failure(seen.node)}" + (f": {seen.words}" if seen.words else "")
    if code == NO_IMAGE:
        return structs.replace(shown, phase="gone", start="", detail=f"{told}; {UNPULLABLE}")
    if code == NO_PULL:
        return structs.replace(
            shown, phase="gone", detail=f"{told}: an image could not be pulled, tried four times"
        )
    why = "see `start_command` and `images` of the place"
    return structs.replace(shown, phase="gone", start="", detail=f"{told}; {why}")


def _waiting(seen: Sighting) -> Machine:
    errors = rows(seen.pool.get("resizeErrors"))
    if errors and seen.pool.get("allocationState") == "steady":
        remedy = REMEDIES.get(str(errors[0].get("code", "")).lower(), "other `sizes` are tried")
        return Machine(seen.machine, "gone", ran_s=0.0, detail=f"Batch: {_words(errors[0])}; {remedy}")
    wrong = table(table(seen.job.get("executionInfo")).get("schedulingError"))
    if wrong:
        return Machine(seen.machine, "gone", ran_s=0.0, detail=f"Batch: {_words(wrong)}")
    told = str(seen.pool.get("allocationState") or "waits for a node of its pool")
    return Machine(seen.machine, "queued", ran_s=0.0, detail=f"Batch: {told}")


def _ended(seen: Sighting, now: float) -> Machine:
    """A machine whose job is over, or going."""
    start, info = seen.start, table(seen.task.get("executionInfo"))
    begun = start.allocated if start is not None else seconds_of(info.get("startTime"))
    ended = seconds_of(info.get("endTime")) or seconds_of(table(seen.job.get("executionInfo")).get("endTime"))
    ran_s = max(0.0, (ended or now) - begun) if begun else 0.0
    code = info.get("exitCode")
    taken_back = code == RESTARTED or (start is not None and seen.requeued > 0)
    reason = str(table(seen.job.get("executionInfo")).get("terminateReason") or seen.state)
    detail = f"Batch: {reason}" + (f", exit code {code}" if code else "")
    detail += f": {seen.words}" if seen.words else ""
    wrong = table(info.get("failureInfo"))
    if wrong and code is None and not seen.requeued:  # nothing of ours has run
        detail += f": {_words(wrong)}"
    if code in REFUSALS:
        return Machine(seen.machine, "gone", ran_s=ran_s, detail=REFUSALS[code])
    shown = Machine(seen.machine, "evicted" if taken_back else "gone", ran_s=ran_s, detail=detail)
    if start is None and begun:
        node = str(table(seen.task.get("nodeInfo")).get("nodeId", ""))
        start = NodeStart(f"{node}.{seen.requeued}", node, begun)
    if start is None:
        return shown
    shown = structs.replace(shown, address=start.address, node=start.node, start=start.start)
    return _without_image(shown) if wrong and code is None else shown


def _words(error: Json) -> str:
    return f"{str(error.get('message', '')).rstrip('.')} ({error.get('code')})"


def _start_failure(node: Json) -> str:
    info = table(node.get("startTaskInfo"))
    return f"{_words(table(info.get('failureInfo')))}, exit code {info.get('exitCode')}"


def job_ends_at(now: float, queue_s: float, life_s: float) -> float:
    """When all of a job is gone by itself at the latest: it may wait, boot, live, and be ended."""
    return now + queue_s + BOOT_S + life_s + END_S


def ends_after(seen: Sighting, start: NodeStart) -> Json:
    """The limits of a job whose node is had: it ends with the machine's life, not as late as if it had waited
    for as long as it may. Batch counts from the job's creation."""
    created = seconds_of(seen.job.get("creationTime")) or start.allocated
    return constraints(max(0.0, start.allocated - created) + seen.life_s + END_S)
