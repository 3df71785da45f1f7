"""A controller is killed at 200 moments in each kind of place: what is left, and costs money, afterwards.

`--place NAME` measures one kind. Slurm is a real one; clouds are their stand-ins.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import msgspec

from evalfleet.api import places
from evalfleet.effects.machines import CALL_MARGIN_S
from evalfleet.errors import PlaceError
from evalfleet.model import Limits, MachineId, Micros, Needs, Offer
from evalfleet.planning import workspace as planning
from evalfleet.planning.plugins import place_kind
from evalfleet.ports import Extendable, Place, PlaceContext, Stoppable

from .hosts import GROUP, azure_credentials, azure_settings
from .result import Aim, Figures, Result, at_most, rounded
from .workspace import Workspace

if TYPE_CHECKING:
    from standins import azure_batch, azure_ml
    from standins.azure import StandIn
    from standins.cloud.faults import Asked
    from standins.cloud.standin import CloudStandIn

SEED = 11
QUICK = (0.0, 0.02)
"""Seconds that a stand-in takes for each step that nothing waits for, from and to."""
REAP_AFTER_S, LOOK_AFTER_S = 60.0, 86_400.0
QUEUE_S = 600.0
LATEST_S = 7200.0
"""After the last expiry; by then the service's own limits have ended everything."""
AZURE_MODULES = ("azure.identity.aio", "azure.mgmt.resource.resources.aio")
POINTS, QUICK_POINTS = 200, 3
TOGETHER = 4
LIMIT_S = 90.0
SWEPT_S = 300.0
"""Seconds after a machine's end for which the budget of a service pays: `Offer.sweep_s`."""
COUNTED = (
    "a process that makes, uses and deletes two machines through the place is killed (kill -9) at a request "
    "chosen by a seed, which is either never carried out or carried out with its answer lost; then the "
    "stand-in's clock moves past the last expiry that was decided, and `reap` runs on a computer without a "
    "home; past_expiry: seconds billed for machines after their expiry and for disks after reap; alone: what "
    "a service's own limits leave without reap"
)
PHASES = ("create", "run", "delete")
UNKNOWN = 255
"""What multiprocessing says of a process if two threads ask at once how it ended: one of them reads it, the
other nothing. Each start of a process asks for all."""
MODULES = ("bench.leak", "aiohttp", "asyncssh")
HOME = "be9c4a11ea4b"
MACHINES = tuple(MachineId(f"pool-{HOME[:6]}-{n}") for n in (1, 2))
LEASE_S = Limits().lease_s


@dataclass(frozen=True)
class Point:
    """Die at the n-th request of a phase; `done`: it is carried out all the same. n = 0: live on."""

    phase: int
    n: int
    done: bool


class LeakyCloud(Protocol):
    """A stand-in of one kind of place, in which a controller dies."""

    @property
    def kind(self) -> str: ...

    @property
    def modules(self) -> Sequence[str]:
        """What a forked process needs beyond `MODULES`: it is loaded before the fork."""
        ...

    @property
    def standin(self) -> CloudStandIn: ...

    def settings(self) -> dict[str, Any]:
        """Of a place that nothing is reached in by SSH."""
        ...

    def environment(self) -> dict[str, str]:
        """Variables that log in to it."""
        ...

    def account(self, expires_at: float, reap: Callable[[], None]) -> Mapping[str, float]:
        """Let time pass, reap, and count what is left and billed, by name."""
        ...


@dataclass(frozen=True)
class Aftermath:
    """What one crash led to. `died_in`: the phase; the number of all, if it lived to its end."""

    died_in: int
    counts: Mapping[str, float]
    problems: int
    requests: tuple[int, ...]


@dataclass(frozen=True)
class Leaks:
    """What all crashes led to."""

    undisturbed: Aftermath
    crashes: Sequence[Aftermath]
    load: float

    def total(self, name: str) -> float:
        return sum(crash.counts[name] for crash in self.crashes)

    def worst(self, name: str) -> float:
        return max(crash.counts[name] for crash in self.crashes)

    def figures(self) -> Figures:
        died = Counter(crash.died_in for crash in self.crashes)
        names = dict(enumerate(PHASES, 1)) | {len(PHASES) + 1: "after_all"}
        return {
            "crash_points": {names[number]: died[number] for number in sorted(died)},
            "requests_of_a_life": dict(zip(PHASES, self.undisturbed.requests, strict=True)),
            "resources_left": self.total("left"),
            "reap_said_no": sum(crash.problems for crash in self.crashes),
            "load_before": self.load,
        }


# -- the clouds ----------------------------------------------------------------------------------


class AzureVms:
    """Azure's virtual machines, which auto-shutdown deallocates."""

    kind = "azure_vm"
    modules = (*AZURE_MODULES, "evalfleet.places.azure")

    def __init__(self) -> None:
        from standins.azure import StandIn, Timing

        self.standin = StandIn(timing=Timing(QUICK, QUICK, (0.05, 0.1), QUICK, QUICK), seed=SEED)

    def settings(self) -> dict[str, Any]:
        # nothing is reached by SSH, nor looked for elsewhere than on this computer
        return {
            **azure_settings(self.standin, self.standin.endpoint),
            "jump": "127.0.0.1:1",
            "answer_s": 0.3,
        }

    def environment(self) -> dict[str, str]:
        return azure_credentials(self.standin, self.standin.endpoint)

    def account(self, expires_at: float, reap: Callable[[], None]) -> Mapping[str, float]:
        azure = self.standin
        azure.jump(max(0.0, expires_at + REAP_AFTER_S - azure.clock.now()))
        reap()
        reaped_at = azure.clock.now()
        azure.jump(LOOK_AFTER_S)
        now, seconds = azure.clock.now(), azure.meters.seconds
        return {
            "left": len(azure.left()),
            "records": _records(azure),
            "vm_s": seconds("vm", now, since=expires_at),
            "disk_s": seconds("disk", now, since=reaped_at),
            "address_s": seconds("address", now, since=reaped_at),
            "waiting_s": seconds("disk", now, since=expires_at) + seconds("address", now, since=expires_at),
        }


def _records(azure: StandIn) -> int:
    from tests.cloud.rest import Rest

    path = f"/resourceGroups/{GROUP}/providers/Microsoft.Resources/deployments"
    told = Rest(azure).get(path)
    return len(told.body["value"]) if told.status == 200 else 0


class ComputeEngine:
    """Compute Engine, where machines end by a limit that Google knows."""

    kind = "gce"
    modules = ("evalfleet.places.gce",)

    def __init__(self) -> None:
        from standins.gce import StandIn, Timing

        timing = Timing(insert=(0.05, 0.1), boot=QUICK, delete=QUICK, power=QUICK, other=QUICK, wait=5.0)
        self.standin = StandIn(timing=timing, seed=SEED)

    def settings(self) -> dict[str, Any]:
        google = self.standin
        return {
            "project": google.project,
            "types": ["e2-standard-4"],
            "zones": ["us-central1-a"],
            "ssh_from": ["*"],
            "owner": "bench",
            "endpoint": google.endpoint,
            "ca": str(google.ca),
            "jump": "127.0.0.1:1",
            "answer_s": 0.3,
        }

    def environment(self) -> dict[str, str]:
        return self.standin.environment

    def account(self, expires_at: float, reap: Callable[[], None]) -> Mapping[str, float]:
        google = self.standin
        lives = sum((instance.ends_at or 0.0) > expires_at for instance in google.instances())
        google.jump(max(0.0, expires_at + REAP_AFTER_S - google.clock.now()))
        reap()
        reaped_at = google.clock.now()
        google.jump(LOOK_AFTER_S)
        now, seconds = google.clock.now(), google.meters.seconds
        return {
            "left": len(google.left()),
            "vm_s": seconds("vm", now, since=expires_at),
            "disk_s": seconds("disk", now, since=reaped_at),
            "address_s": seconds("address", now, since=expires_at),
            "lives": lives,
        }


S = TypeVar("S", bound="azure_batch.StandIn | azure_ml.StandIn")


class Service(Generic[S]):
    """A stand-in of managed compute, whose nodes are what costs money."""

    kind: str
    standin: S

    @property
    def modules(self) -> Sequence[str]:
        return (*AZURE_MODULES, f"evalfleet.places.{self.kind}")

    def own_settings(self) -> dict[str, Any]:
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        standin = self.standin
        common = {"endpoint": standin.endpoint, "ca": str(standin.ca), "owner": "bench"}
        return {**common, "queue_s": QUEUE_S, "poll_s": 0.05, **self.own_settings()}

    def environment(self) -> dict[str, str]:
        return self.standin.service_principal()

    def alone(self) -> int:
        """What nobody has ended: its own limits should have."""
        raise NotImplementedError

    def account(self, expires_at: float, reap: Callable[[], None]) -> Mapping[str, float]:
        standin = self.standin
        standin.jump(max(0.0, expires_at + LATEST_S - standin.clock.now()))
        alone = self.alone()
        late_s = standin.meters.latest_s("vm", standin.clock.now(), expires_at)
        reap()
        standin.jump(60.0)
        return {"alone": alone, "late_s": late_s, "left": len(standin.left())}


class Batch(Service["azure_batch.StandIn"]):
    """Azure Batch, whose nodes are in pools of their own."""

    kind = "azure_batch"

    def __init__(self) -> None:
        from standins.azure_batch import StandIn, Timing

        self.standin = StandIn(timing=Timing(QUICK, QUICK, QUICK), seed=SEED)

    def own_settings(self) -> dict[str, Any]:
        return {"account": f"{self.standin.account}.{self.standin.region}", "ssh_from": ["*"]}

    def alone(self) -> int:
        batch = self.standin
        return batch.do(lambda: len(batch.service.pools))


class BatchByMailbox(Batch):
    """The same, where nothing can connect to nodes: requests to the storage count, too."""

    def own_settings(self) -> dict[str, Any]:
        batch = self.standin
        own = {"management": batch.endpoint, "storage_endpoint": batch.storage_endpoint}
        return {**super().own_settings(), **own, "reach": "mailbox"}


class MachineLearning(Service["azure_ml.StandIn"]):
    """Azure Machine Learning; a cluster without nodes costs nothing."""

    kind = "azure_ml"

    def __init__(self) -> None:
        from standins.azure_ml import StandIn, Timing

        timing = Timing(*[QUICK] * 6)
        self.standin = StandIn(ml_timing=timing, seed=SEED)

    def own_settings(self) -> dict[str, Any]:
        ml = self.standin
        own = {"workspace": ml.workspace, "resource_group": ml.group}
        return {**own, "storage_endpoint": ml.storage_endpoint}

    def alone(self) -> int:
        return len(self.standin.living()) + len(self.standin.meters.running())


class Instances(MachineLearning):
    """Its compute instances, which SSH does not reach here. What is stopped may stay until it is reaped."""

    def own_settings(self) -> dict[str, Any]:
        return {**super().own_settings(), "compute": "instances", "answer_s": 0.1}

    def alone(self) -> int:
        return len(self.standin.meters.running())


CLOUDS: Mapping[str, Callable[[], LeakyCloud]] = {
    "azure_vm": AzureVms,
    "gce": ComputeEngine,
    "azure_batch": Batch,
    "azure_batch_mailbox": BatchByMailbox,
    "azure_ml": MachineLearning,
    "azure_ml_instances": Instances,
}
PLACES = (*CLOUDS, "slurm")


def run(quick: bool, place: str | None = None) -> Result:
    figures: Figures = {"counted": COUNTED}
    aims: dict[str, Aim] = {}
    for name in PLACES if place is None else (place,):
        if name == "slurm":
            from . import leak_slurm

            figures[name], own = leak_slurm.measure(quick)
        else:
            figures[name], own = _summed(measure(CLOUDS[name], quick))
        aims |= {f"{name}.{key}": aim for key, aim in own.items()}
    return Result("leak", figures, aims)


def _summed(leaks: Leaks) -> tuple[Figures, dict[str, Aim]]:
    """Sum up one cloud: figures, and each count that must be 0."""
    figures = leaks.figures()
    aims = {"resources_left": at_most(figures["resources_left"], 0)}
    names = leaks.undisturbed.counts
    for kind in ("vm_s", "disk_s", "address_s"):
        if kind in names:
            figures[f"{kind}_past_expiry"] = rounded(leaks.total(kind))
            aims[f"{kind}_past_expiry"] = at_most(figures[f"{kind}_past_expiry"], 0)
    for kind in ("lives", "alone"):
        if kind in names:
            figures[kind] = leaks.total(kind)
            aims[kind] = at_most(figures[kind], 0)
    if "late_s" in names:
        figures["billed_s_past_expiry"] = rounded(leaks.worst("late_s"))
        aims["billed_s_past_expiry"] = at_most(figures["billed_s_past_expiry"], SWEPT_S)
    return figures, aims


def measure(make: Callable[[], LeakyCloud], quick: bool) -> Leaks:
    """Each crash has a stand-in of its own."""
    undisturbed = _crash(make, Point(0, 0, False))
    chosen = points(QUICK_POINTS if quick else POINTS, undisturbed.requests)
    load = os.getloadavg()[0]
    with ThreadPoolExecutor(TOGETHER) as together:
        return Leaks(undisturbed, list(together.map(lambda point: _crash(make, point), chosen)), load)


def points(count: int, requests: Sequence[int]) -> list[Point]:
    """The phases in turn, so that each gets its share; where in them is chance, from a seed."""
    rng = random.Random(SEED)
    phases = [n % len(PHASES) + 1 for n in range(count)]
    return [Point(phase, rng.randint(1, requests[phase - 1]), rng.random() < 0.5) for phase in phases]


def _crash(make: Callable[[], LeakyCloud], point: Point) -> Aftermath:
    cloud = make()
    with cloud.standin, Workspace() as space:
        return World(cloud, space.folder).crash(point)


class World:
    """One stand-in, one controller that dies, one that cleans up."""

    def __init__(self, cloud: LeakyCloud, folder: Path) -> None:
        self._cloud = cloud
        self._fork = multiprocessing.get_context("forkserver")
        self._fork.set_forkserver_preload([*MODULES, *cloud.modules])
        self._lost, self._desk = folder / "lost", folder / "desk"
        self._lost.mkdir()
        self._desk.mkdir()
        lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in cloud.settings().items())
        (self._desk / "evalfleet.toml").write_text(f'[places.cloud]\nkind = "{cloud.kind}"\n{lines}')
        variables = "".join(f"{key}={value}\n" for key, value in cloud.environment().items())
        (self._desk / ".env").write_text(variables)
        self._problems = 0

    def crash(self, point: Point) -> Aftermath:
        phase, expires_at = self._fork.Value("i", 0), self._fork.Value("d", 0.0)
        cloud = self._cloud
        given = (cloud.kind, cloud.settings(), cloud.environment(), str(self._lost), phase, expires_at)
        process = self._fork.Process(target=live, args=given)
        cut = Cut(phase, point, process)
        cloud.standin.faults.script = cut
        process.start()
        end(process)
        if not cut.struck and process.exitcode not in (0, UNKNOWN):
            raise RuntimeError(f"the controller ended with {process.exitcode}")
        died_in = phase.value if cut.struck else len(PHASES) + 1
        counts = cloud.account(expires_at.value, self._reap)
        return Aftermath(died_in, counts, self._problems, tuple(cut.counts))

    def _reap(self) -> None:
        answer = self._desk / "answer.json"
        now = self._cloud.standin.clock.now()
        process = self._fork.Process(target=clean_up, args=(str(self._desk), now, str(answer)))
        process.start()
        end(process)
        if not answer.is_file():  # which is the last that it does
            raise RuntimeError(f"reap ended with {process.exitcode}")
        told = json.loads(answer.read_text())
        self._problems = sum(bool(problem) for problem in told["problems"].values())


class Cut:
    """A script of faults that kills the process that asks. `counts`: how many requests each phase had."""

    def __init__(self, phase: Synchronized[int], point: Point, process: BaseProcess) -> None:
        self._phase, self._point, self._process = phase, point, process
        self.counts = [0] * len(PHASES)
        self.struck = False

    def __call__(self, call: Asked) -> Any:
        from standins.cloud.faults import Failed, Lost

        point, now_in = self._point, self._phase.value
        if self.struck or not 1 <= now_in <= len(PHASES):
            return None
        self.counts[now_in - 1] += 1
        early = now_in == point.phase and self.counts[now_in - 1] < point.n
        if point.phase == 0 or now_in < point.phase or early:
            return None
        # a phase may have fewer requests than the last time: then it dies as soon as it is over
        self.struck = True
        self._process.kill()
        return Lost() if point.done else Failed()


def end(process: BaseProcess) -> None:
    process.join(LIMIT_S)
    if process.is_alive():
        process.kill()
        process.join()
        raise TimeoutError(f"a process did not end within {LIMIT_S:g} s")


# -- in processes that may be killed ------------------------------------------------------------


class Life:
    """Two machines, from their creation to their deletion. They are records that no SSH reaches.

    `phase`, and `expires_at`, the last expiry decided, are for who watches.
    """

    def __init__(
        self, place: Place, offer: Offer, phase: Synchronized[int], expires_at: Synchronized[float]
    ) -> None:
        self._place = place
        self._offer = offer
        self._phase = phase
        self._expires_at = expires_at

    async def live(self) -> None:
        self._phase.value = 1
        await asyncio.gather(*map(self._create, MACHINES))
        self._phase.value = 2
        await (self._await_start() if self._offer.life.queues else self._use())
        await self._place.list("pool")
        self._phase.value = 3
        await asyncio.gather(*(self._place.delete(machine) for machine in MACHINES))
        while await self._place.list("pool") and self._offer.life.queues:
            pass
        self._phase.value = 4

    async def _use(self) -> None:
        """They are looked at and extended, and one is stopped and started."""
        await self._place.list("pool")
        if self._offer.life.extendable:
            assert isinstance(self._place, Extendable)
            await asyncio.gather(
                *(_tried(self._place.extend(machine, self._lease_s())) for machine in MACHINES)
            )
        assert isinstance(self._place, Stoppable)
        await self._place.stop(MACHINES[0])
        await self._create(MACHINES[0])

    async def _await_start(self) -> None:
        """A service's machines live from their start."""
        while not all(machine.start for machine in await self._place.list("pool")):
            self._expires_at.value = time.time() + LEASE_S

    async def _create(self, machine: MachineId) -> None:
        """A virtual machine is given up, since SSH does not reach it: all is asked for by then."""
        work = self._place.create(machine, self._offer, self._lease_s())
        await (work if self._offer.life.queues else _tried(work))

    def _lease_s(self) -> float:
        """As the engine does it: the expiry is decided first, and the place is given a little less."""
        self._expires_at.value = time.time() + LEASE_S
        return LEASE_S - min(CALL_MARGIN_S, self._offer.life.teardown_s / 4)


async def _tried(work: Awaitable[None]) -> None:
    with suppress(PlaceError):  # nothing answers SSH
        await work


def live(
    kind: str,
    settings: dict[str, Any],
    environ: dict[str, str],
    home: str,
    phase: Synchronized[int],
    expires_at: Synchronized[float],
) -> None:
    """The process that is killed, with a place of this kind."""

    async def main() -> None:
        found = place_kind(kind)
        given = msgspec.convert(settings, found.Settings)
        place = found.make(kind, given, PlaceContext(Path(home), HOME, {}, environ, Path(home)))
        try:
            offer = (await place.offers(Needs()))[0]
            await Life(place, offer, phase, expires_at).live()
        finally:
            await place.close()

    asyncio.run(main())


@dataclass(frozen=True)
class StoppedClock:
    """A clock that stands still."""

    at: Micros

    def now(self) -> Micros:
        return self.at


def clean_up(folder: str, now: float, answer: str) -> None:
    """`evalfleet reap` at a later time, on a computer that has the place in evalfleet.toml and no home."""
    os.chdir(folder)
    os.environ["EVALFLEET_HOME"] = f"{folder}/nowhere"
    workspace = replace(planning.Workspace.here(), clock=StoppedClock(round(now * 1e6)))
    found = asyncio.run(places.machines(workspace))
    problems = asyncio.run(places.reap(workspace, [each for each in found if each.why]))
    Path(answer).write_text(json.dumps({"found": len(found), "problems": problems}))
