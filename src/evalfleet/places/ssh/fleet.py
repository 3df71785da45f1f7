"""All hosts of a place, seen from here: who answers and how each has done, what is there, what must go."""

from __future__ import annotations

import asyncio
import logging
import math
import shlex
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeVar
from urllib.parse import unquote

from msgspec import structs

from evalfleet.channels.ssh.target import HostDown, HostKeyUnknown, HostLost, HostRefused, target
from evalfleet.channels.supervisor.machine import LEFT
from evalfleet.errors import PlaceError
from evalfleet.model import Machine, MachineId, Needs

from .examination import NEVER, HostHealth, in_order, missing
from .records import HostLease, Records

if TYPE_CHECKING:
    from evalfleet.channels.ssh.host_home import HostHome, SeenMachine

LONGEST_WAIT_S = 30.0
LOOK_S = 2.0
DEBT_S = 10.0
"""The longest wait, at the end, for hosts that answer again and are being cleaned."""
LAST_ANSWER_S = 3.0
"""So long after the last answer of a host the others are awaited, before we go on without them."""
FRESH_S = 7.0
"""So long a heartbeat, sent every 5 s, proves that its machine is there: its host need not be asked."""
MOST_REMOVALS = 4
"""If a machine's folder is there again after so many removals, somebody makes it again."""
MADE_AGAIN_S = 10.0
"""So long after its last removal a folder that is not there may only not have been made again yet."""
MOST_TOLD, NAME_CAP = 10, 80
NO_ANSWER = (HostDown, HostLost, HostRefused)

T = TypeVar("T")
log = logging.getLogger(__name__)


def by_hand(held: HostLease) -> str:
    """What is left of a machine on its host, and how to finish it."""
    where = target(held.host)
    at = (f"-p {where.port} " if where.port else "") + (f"{where.user}@" if where.user else "") + where.host
    command = f"cd && sudo chattr -R -i {held.left}; sudo rm -rf {held.left}"
    return (
        f"{held.host} keeps ~/{held.left}, which cannot be removed or is made again, and gets no machine "
        f"until it is gone; by hand: ssh {at} {shlex.quote(command)}"
    )


def owed(held: HostLease) -> str:
    """Return what becomes of a machine whose host did not answer when it was deleted."""
    return f"{held.host} did not answer; `evalfleet machines` removes it once it does"


def plain(text: str, cap: int = NAME_CAP) -> str:
    """What a host says, a file's name for one, as a terminal can show it."""
    shown = "".join(letter if letter.isprintable() else f"\\x{ord(letter):02x}" for letter in text[:cap])
    return shown + ("..." if len(text) > cap else "")


MOST_NAMED = 3


def these(hosts: Sequence[str]) -> str:
    """Some hosts in few words."""
    if len(hosts) == 1:
        return hosts[0]
    more = ", ..." if len(hosts) > MOST_NAMED else ""
    return f"{len(hosts)} hosts ({', '.join(hosts[:MOST_NAMED])}{more})"


def trusting(place: str) -> str:
    """What to do about host keys that nobody has confirmed."""
    return (
        f"`evalfleet doctor {place} --trust` shows the fingerprints and, once you agree, writes the keys down"
    )


class HostFleet:
    """All hosts of the place `name`. `contact` is the way to talk to one: what became of it is noted."""

    def __init__(
        self,
        name: str,
        homes: Mapping[str, HostHome],
        records: Records,
        gone_after_s: float,
        set_aside_s: float,
        most: int = 1,
    ) -> None:
        self.name = name
        self.homes = homes
        self._most = most
        self.needs: Needs | None = None
        """What every machine must have; None: nobody has said."""
        self.short: defaultdict[Needs, dict[str, str]] = defaultdict(dict)
        """Which hosts have less than some tasks need, and what they have. They do not grow."""
        self.records = records
        self.standings = {host: HostHealth(order, set_aside_s) for order, host in enumerate(homes)}
        self._gone_after_s = gone_after_s
        self.creating: set[MachineId] = set()
        self._heard: dict[MachineId, float] = {}
        self._removing: set[MachineId] = set()
        self._debts: dict[MachineId, asyncio.Task[None]] = {}
        self._removals: dict[MachineId, int] = {}
        self._left_at: dict[MachineId, float] = {}
        self._looks: dict[str, asyncio.Task[Mapping[MachineId, bool] | None]] = {}
        self._scanning = False
        self._late: set[asyncio.Task[Mapping[MachineId, bool] | None]] = set()

    async def contact(self, host: str, call: Awaitable[T]) -> T:
        standing = self.standings[host]
        try:
            answer = await call
        except HostRefused as err:
            if str(standing.refusal) != str(err) and not self._scanning:
                log.warning("%s", err)
            standing.silent(time.monotonic(), str(err), err)
            raise
        except (HostDown, HostLost) as err:
            standing.silent(time.monotonic(), str(err))
            raise
        standing.answered()
        return answer

    # -- what is there -------------------------------------------------------------------------

    async def look_everywhere(self) -> None:
        """Find out who answers and what of ours is there. What many hosts refuse alike is told once."""
        await self._look_at(self.homes)

    async def _look_at(self, hosts: Iterable[str]) -> None:
        before = self.troubles()
        self._scanning = True
        try:
            await self._answers({host: asyncio.create_task(self._look(host)) for host in hosts})
        finally:
            self._scanning = False
        for trouble in self.troubles():
            if trouble not in before and not self._hopeless():  # else the run ends with all of them
                log.warning("%s", trouble)

    async def _answers(self, looks: Mapping[str, asyncio.Task[Mapping[MachineId, bool] | None]]) -> None:
        """Until all have answered, or none has for a while since the last one: a dead host, on which a
        connection takes long to fail, does not hold up the others. Until it answers it comes last.
        """
        waiting = set(looks.values())
        try:
            while waiting:
                done, waiting = await asyncio.wait(
                    waiting, timeout=LAST_ANSWER_S, return_when=asyncio.FIRST_COMPLETED
                )
                if not done and len(waiting) < len(looks):
                    break
        except asyncio.CancelledError:
            for look in waiting:
                look.cancel()
            raise
        self._late |= waiting
        for host, look in looks.items():
            if look in waiting:
                look.add_done_callback(self._late.discard)
                self.standings[host].late = True
                self.standings[host].problem = f"{host} does not answer: nothing within {LAST_ANSWER_S:g} s"

    async def machines(self) -> dict[MachineId, Machine]:
        """All of this home's. Of a host that does not answer: what we hold there."""
        seen = await asyncio.gather(*(self._seen(host) for host in self.homes))
        found: dict[MachineId, Machine] = {}
        for machine in [machine for machines in seen for machine in machines]:
            held = self.records.get(machine.id)
            if machine.id not in found or (held is not None and held.host == machine.address):
                found[machine.id] = machine
        return found

    async def whereabouts(self, machine: MachineId) -> HostLease | None:
        """Where the machine is, as far as is known; hosts are asked if nothing is."""
        if self.records.get(machine) is None:
            # who did not answer a moment ago is not waited for again
            now = time.monotonic()
            due = [host for host, each in self.standings.items() if now >= each.retry_at and not each.late]
            await self._look_at(due)
        held = self.records.latest(machine)
        return held if held is not None and held.host in self.homes else None

    def made(self, machine: MachineId) -> None:
        """Note that it is there because we want it: removals of an earlier one say nothing about it."""
        self._removals.pop(machine, None)
        self.heard(machine)

    def heard(self, machine: MachineId) -> None:
        """Note that the machine's supervisor spoke."""
        self._heard[machine] = time.monotonic()

    def _known(self, held: HostLease) -> Machine | None:
        """The machine, if there is no need to ask."""
        if held.machine in self.creating:
            return self._machine(held.machine, "pending", held.host)
        fresh = time.monotonic() - self._heard.get(held.machine, -FRESH_S) < FRESH_S
        sure = fresh and not held.deleting and not self.records.expired(held)
        return self._machine(held.machine, "up", held.host) if sure else None

    def _machine(self, machine: MachineId, phase: Literal["pending", "up"], host: str) -> Machine:
        """People know it by its host, and a number where a host has several."""
        name = host if self._most == 1 else f"{host}-{machine.rpartition('-')[2]}"
        return Machine(machine, phase, host, host, name)

    def _host_of(self, name: str) -> str:
        """The host of the machine that people know by this name."""
        return name if self._most == 1 else name.rpartition("-")[0]

    async def _seen(self, host: str) -> list[Machine]:
        known = [self._known(held) for held in self.records.on(host)]
        if known and None not in known:
            return [machine for machine in known if machine is not None]
        asked = time.monotonic() >= self.standings[host].retry_at
        shown = await self._glance(host) if asked else None
        if shown is not None:
            return [self._machine(id, "up" if up else "pending", host) for id, up in shown.items()]
        return [
            self._machine(held.machine, "up", host)
            for held in self.records.on(host)
            if not self.records.over(held) and not self._counts_as_gone(held) and not held.left
        ]

    async def _glance(self, host: str) -> Mapping[MachineId, bool] | None:
        """As `_look`. All others must not wait long for a host that is down, or of which we know what we hold
        there.
        """
        look = self._looks.get(host)
        if look is None:
            look = self._looks[host] = asyncio.create_task(self._look(host))
            look.add_done_callback(lambda _: self._looks.pop(host, None))
        standing = self.standings[host]
        known = any(self.records.on(host)) or standing.down_since is not None or standing.late
        done, _ = await asyncio.wait((look,), timeout=LOOK_S if known else None)
        return look.result() if done else None

    def _counts_as_gone(self, held: HostLease) -> bool:
        """Its host ends it by its expiry, and what is left there is removed when it answers again."""
        return held.deleting and 0 < self.silent_s(held.host) >= self._gone_after_s

    def silent_s(self, host: str) -> float:
        since = self.standings[host].down_since
        return 0.0 if since is None else time.monotonic() - since

    def no_use(self, held: HostLease) -> str | None:
        """Why its host need not be asked again yet; None if it should be."""
        standing = self.standings[held.host]
        waits = time.monotonic() < standing.retry_at or self._counts_as_gone(held)
        return standing.problem if waits else None

    async def _look(self, host: str) -> Mapping[MachineId, bool] | None:
        """Machine -> is it up? None if the host does not answer."""
        try:
            shown = await self.contact(host, self._list(host))
        except NO_ANSWER:
            return None
        remains = {sight.folder for sight in shown if sight.folder.startswith(LEFT)}
        shown = [sight for sight in shown if sight.folder not in remains]
        for sight in shown:  # also what another controller of this home has made
            machine = MachineId(unquote(sight.folder))
            if self.records.get(machine) is None and machine not in self._removing:
                self.records.learn(machine, host, sight.expires_at)
                self._doubt(machine)
        found = {MachineId(unquote(sight.folder)): sight.up for sight in shown}
        for held in self.records.on(host):
            if held.left:
                there = held.left.rpartition("/")[2] in remains or held.machine in found
                if not there and time.monotonic() - self._left_at.get(held.machine, -math.inf) > MADE_AGAIN_S:
                    self.records.drop(held.machine)  # somebody has finished it by hand
                found.pop(held.machine, None)
            elif held.deleting and held.machine not in self._removing:
                self._settle(held, held.machine in found)
        return found

    def _doubt(self, machine: MachineId) -> None:
        """What is there again after its last removal is no machine, or a run would remove it for ever."""
        held = self.records.latest(machine)
        if held is not None and self._removals.get(machine, 0) >= MOST_REMOVALS:
            self.records.leave(held, self.homes[held.host].path_of(machine))

    async def _list(self, host: str) -> list[SeenMachine]:
        shown = await self.homes[host].machines()
        if self._scanning and not shown:  # one that we use already has had enough
            await self.check_needs(host)
        return shown

    async def check_needs(self, host: str) -> None:
        """Connect, and raise HostRefused if the host has less than is needed. Nothing is asked of it."""
        await self.homes[host].host.connect()
        needs = self.needs or Needs()
        if needs != Needs() and (short := missing(await self.homes[host].facts(), needs)):
            raise HostRefused(host, short, "take it out of `hosts`, or lower the benchmark's `needs`")

    async def has(self, host: str, needs: Needs) -> bool:
        """Does the host have what some tasks need beyond the others? One that has not does for those."""
        if needs in (Needs(), self.needs):
            return True
        if short := missing(await self.homes[host].facts(), needs):
            self.short[needs][host] = short
        return not short

    # -- removal -------------------------------------------------------------------------------

    async def remove(self, held: HostLease) -> None:
        """Remove the machine from its host. Raises HostDown, HostLost, HostRefused: then it is a debt."""
        self.records.unwanted(held)
        self._heard.pop(held.machine, None)
        self._removing.add(held.machine)
        try:
            call = self.homes[held.host].ask("remove", held.machine, lent=True)
            answer = await self.contact(held.host, call)
            if answer.error not in ("", "unknown"):
                raise HostLost(f"{held.host}: {answer.detail}")
            self._compare(held, answer.kept)
            self._removals[held.machine] = removals = self._removals.get(held.machine, 0) + 1
            if answer.left or removals >= MOST_REMOVALS:
                self._leave(held, self.homes[held.host].path_of(held.machine, answer.left))
            else:
                self.records.drop(held.machine)
        finally:
            self._removing.discard(held.machine)

    def _leave(self, held: HostLease, left: str) -> None:
        """It counts as gone, as nothing of it runs; its host gets no other machine until the rest is gone."""
        self.records.leave(held, left)
        self._left_at[held.machine] = time.monotonic()
        log.warning("%s: %s", held.machine, by_hand(structs.replace(held, left=left)))

    def _compare(self, held: HostLease, now: Mapping[str, str]) -> None:
        """Tell what a lent host's home has that it had not, or no more: a task may have left it."""
        before = held.kept
        if before and now:
            new = sorted(now.keys() - before.keys())
            gone = sorted(before.keys() - now.keys())
            other = sorted(name for name in before.keys() & now.keys() if before[name] != now[name])
            said = [
                f"{what}: {', '.join(map(plain, names[:MOST_TOLD]))}"
                for what, names in (("new", new), ("changed", other), ("gone", gone))
                if names
            ]
            if said:
                log.warning(
                    "%s: its home is not as it was before %s (%s)", held.host, held.machine, "; ".join(said)
                )

    async def give_up(self, machine: MachineId, problem: str) -> None:
        """A machine that could not be made: its host is not asked again for a while."""
        held = self.records.latest(machine)
        if held is not None:
            await self._pay(held)
            self.standings[held.host].silent(time.monotonic(), problem)

    def _settle(self, held: HostLease, there: bool) -> None:
        """A machine was to go while its host did not answer. Now it does."""
        if not there:
            self.records.drop(held.machine)
            return
        self._debt(held)

    async def pay_debts(self, host: str) -> None:
        """Remove what was to go: it would count as taking the host."""
        for held in self.records.on(host):
            due = held.deleting and not held.left and held.machine not in self._removing
            if held.machine in self._debts or due:
                await asyncio.shield(self._debt(held))

    def _debt(self, held: HostLease) -> asyncio.Task[None]:
        if held.machine not in self._debts:
            task = self._debts[held.machine] = asyncio.create_task(self._pay(held))
            task.add_done_callback(lambda _: self._debts.pop(held.machine, None))
        return self._debts[held.machine]

    async def _pay(self, held: HostLease) -> None:
        try:
            await self.remove(held)
        except NO_ANSWER as err:
            log.info("%s is still to be removed from %s: %s", held.machine, held.host, err)

    # -- choice --------------------------------------------------------------------------------

    def next_host(self, tried: Iterable[str], without: Sequence[str] = ()) -> str | None:
        """The best host that has room for another machine of ours, beside those drained."""
        hopeless = self._hopeless()
        drained = Counter(map(self._host_of, without))
        for host in in_order(self.standings.items(), time.monotonic()):
            if hopeless and self.standings[host].late:
                continue  # it is dead, most likely, and of all others none works
            held = [
                held for held in self.records.on(host) if not held.deleting and not self.records.over(held)
            ]
            uncleared = any(held.left for held in self.records.on(host))
            if host not in tried and not uncleared and len(held) + drained[host] < self._most:
                return host
        return None

    def troubles(self) -> list[str]:
        """What somebody must mend before hosts can be used: a line a trouble, however many have it."""
        alike: dict[tuple[str, str], list[str]] = {}
        for host, standing in self.standings.items():
            refusal = standing.refusal
            if refusal is not None:
                remedy = trusting(self.name) if isinstance(refusal, HostKeyUnknown) else refusal.remedy
                alike.setdefault((refusal.what, remedy), []).append(host)
        return [
            self._one_trouble(hosts[0]) if len(hosts) == 1 else f"{these(hosts)}: {what}; {remedy}"
            for (what, remedy), hosts in alike.items()
        ]

    def _one_trouble(self, host: str) -> str:
        refusal = self.standings[host].refusal
        if not isinstance(refusal, HostKeyUnknown):
            return str(refusal)
        paste = f"or add this line to {refusal.file}: {refusal.line}"
        whose = host if refusal.host == host else f"{refusal.host}, on the way to {host}"
        return f"{whose}: {refusal.what} ({refusal.fingerprint}); {trusting(self.name)}; {paste}"

    def _hopeless(self) -> bool:
        """Does every host that answers need somebody's hand? One that worked before may be silent a while."""
        return any(each.refusal for each in self.standings.values()) and all(
            standing.refusal is not None or self._never_came(host, standing)
            for host, standing in self.standings.items()
        )

    def _never_came(self, host: str, standing: HostHealth) -> bool:
        # what is only to be removed there, or is just being asked for, does not make it one that works
        leases = [each for each in self.records.on(host) if each.machine not in self.creating]
        ours = any(not each.deleting and not self.records.over(each) for each in leases)
        return (standing.late or standing.down_since is not None) and not standing.worked and not ours

    def nowhere(self, needs: Needs) -> PlaceError:
        """Why no host can be had that has what is needed, now or at all."""
        if short := self.short.get(needs):
            lacking = f"{these(list(short))}: less than {needs.in_words()}"
            if len(short) == len(self.homes):
                return PlaceError(f"no host of {self.name} does for some tasks; {lacking}", transient=False)
            return PlaceError(f"no other host of {self.name} is free now; {lacking}", transient=True)
        now = time.monotonic()
        standings = self.standings.values()
        silent = [
            host
            for host, each in self.standings.items()
            if (each.late or each.down_since is not None) and not each.refusal
        ]
        said = [f"{these(silent)}: no answer"] if len(silent) > 1 else []
        said += [self.standings[host].problem for host in silent if len(silent) == 1]
        if self._hopeless():
            return PlaceError("; ".join([*self.troubles(), *said]), transient=False, scope="place")
        at_work = [each for each in standings if each.down_since is None and not each.late]
        said += [each.problem for each in at_work if each.problem][:MOST_NAMED]
        if aside := sum(now < each.aside_until for each in standings):
            said.append(f"{aside} set aside for a while after attempts broke there")
        said += [by_hand(held) for held in self.records.left()][:MOST_NAMED]
        waits = [each.due() - now for each in standings if now < each.due() < NEVER]
        wait_s = min(min(waits), LONGEST_WAIT_S) if waits else None
        free = f"no host of {self.name} is free now"
        return PlaceError("; ".join([free, *self.troubles(), *said]), transient=True, retry_after_s=wait_s)

    async def close(self) -> None:
        if self._debts:
            await asyncio.wait(self._debts.values(), timeout=DEBT_S)
        for task in (*self._debts.values(), *self._looks.values(), *self._late):
            task.cancel()
        await asyncio.gather(*(host_home.host.close() for host_home in self.homes.values()))
