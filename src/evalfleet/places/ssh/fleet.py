"""All hosts of a place, seen from here: who answers and how each has done, what is there, what must go."""

from __future__ import annotations

import asyncio
import logging
import shlex
import time
from collections.abc import Awaitable, Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import unquote

from msgspec import structs

from evalfleet.channels.ssh.target import HostDown, HostLost, HostRefused, target
from evalfleet.channels.supervisor.machine import LEFT
from evalfleet.errors import PlaceError
from evalfleet.model import Machine, MachineId

from .records import HostLease, Records

if TYPE_CHECKING:
    from evalfleet.channels.ssh.host_home import HostHome

SHORTEST_S = 2.0
LONGEST_S = 60.0
LONGEST_ASIDE_S = 1800.0
BAD_STREAK = 3
MOST_REFUSALS = 6
"""A host that refuses us so many times in a row, over a minute, needs somebody's hand; it is left alone."""
NEVER = float("inf")


class HostHealth:
    """One host's. `down_since` is when it first did not answer, of late; `refusal` needs somebody's hand.

    `set_aside_s`: for how long it is set aside when it did badly; each time twice as long.
    """

    def __init__(self, order: int, set_aside_s: float) -> None:
        self.order = order
        self.refusal = ""
        self.problem = ""
        self.down_since: float | None = None
        self.retry_at = 0.0
        self.aside_until = 0.0
        self.aside = 0
        self._delay_s = SHORTEST_S
        self._set_aside_s = set_aside_s
        self._bad = 0
        self._refusals = 0

    # -- does it answer? ---------------------------------------------------------------------------

    def answered(self) -> None:
        self.down_since = None
        self._refusals = 0
        self.refusal = self.problem = ""
        self.retry_at = 0.0
        self._delay_s = SHORTEST_S

    def silent(self, now: float, problem: str, refusal: bool = False) -> None:
        """It did not answer, or refused us: it is not asked again for a while, each time longer."""
        self.problem = problem
        self.refusal = problem if refusal else ""
        if self.down_since is None:
            self.down_since = now
        self._refusals = self._refusals + 1 if refusal else 0
        self.retry_at = now + self._delay_s if self._refusals < MOST_REFUSALS else NEVER
        self._delay_s = min(self._delay_s * 2, LONGEST_S)

    # -- does it do well? --------------------------------------------------------------------------

    def did(self, well: bool) -> None:
        self._bad = 0 if well else self._bad + 1
        if well:
            self.aside = 0

    def given_up(self, now: float) -> bool:
        """A machine on it was deleted. True: it did badly, so it is set aside for a while."""
        if self._bad < BAD_STREAK and self.down_since is None:
            return False
        self._bad = 0
        self.aside += 1
        self.aside_until = now + min(self._set_aside_s * 2 ** (self.aside - 1), LONGEST_ASIDE_S)
        return True

    def usable(self, now: float) -> bool:
        return now >= self.retry_at and now >= self.aside_until

    def due(self) -> float:
        return max(self.retry_at, self.aside_until)


def in_order(standings: Iterable[tuple[str, HostHealth]], now: float) -> list[str]:
    """Hosts to try, best first: those that did well, then those that were in trouble and are due again."""
    usable = [
        (each.aside > 0, each.down_since is not None, each.order, name)
        for name, each in standings
        if each.usable(now)
    ]
    return [name for _, _, _, name in sorted(usable)]


LONGEST_WAIT_S = 30.0
LOOK_S = 2.0
FRESH_S = 7.0
"""So long a heartbeat, sent every 5 s, proves that its machine is there: its host need not be asked."""
MOST_REMOVALS = 4
"""If a machine's folder is there again after so many removals, somebody makes it again."""
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


def plain(name: str) -> str:
    """A file name of a host's, as a terminal can show it."""
    shown = "".join(letter if letter.isprintable() else f"\\x{ord(letter):02x}" for letter in name[:NAME_CAP])
    return shown + ("..." if len(name) > NAME_CAP else "")


class HostFleet:
    """`contact` is the way to talk to a host: what became of it is noted."""

    def __init__(
        self, homes: Mapping[str, HostHome], records: Records, gone_after_s: float, set_aside_s: float
    ) -> None:
        self.homes = homes
        self.records = records
        self.standings = {host: HostHealth(order, set_aside_s) for order, host in enumerate(homes)}
        self._gone_after_s = gone_after_s
        self.creating: set[MachineId] = set()
        self._heard: dict[MachineId, float] = {}
        self._removing: set[MachineId] = set()
        self._debts: dict[MachineId, asyncio.Task[None]] = {}
        self._removals: dict[MachineId, int] = {}
        self._looks: dict[str, asyncio.Task[Mapping[MachineId, bool] | None]] = {}

    async def contact(self, host: str, call: Awaitable[T]) -> T:
        standing = self.standings[host]
        try:
            answer = await call
        except HostRefused as err:
            if standing.refusal != str(err):
                log.warning("%s", err)
            standing.silent(time.monotonic(), str(err), refusal=True)
            if standing.retry_at == NEVER:
                log.warning("%s is set aside for good, after %d tries: %s", host, MOST_REFUSALS, err)
            raise
        except (HostDown, HostLost) as err:
            standing.silent(time.monotonic(), str(err))
            raise
        standing.answered()
        return answer

    # -- what is there -------------------------------------------------------------------------

    async def look_everywhere(self) -> None:
        await asyncio.gather(*(self._look(host) for host in self.homes))

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
            await self.look_everywhere()
        held = self.records.latest(machine)
        return held if held is not None and held.host in self.homes else None

    def heard(self, machine: MachineId) -> None:
        """Its supervisor spoke."""
        self._heard[machine] = time.monotonic()

    def _known(self, held: HostLease) -> Machine | None:
        """The machine, if there is no need to ask."""
        if held.machine in self.creating:
            return Machine(held.machine, "pending", held.host, held.host)
        fresh = time.monotonic() - self._heard.get(held.machine, -FRESH_S) < FRESH_S
        sure = fresh and not held.deleting and not self.records.expired(held)
        return Machine(held.machine, "up", held.host, held.host) if sure else None

    async def _seen(self, host: str) -> list[Machine]:
        known = [self._known(held) for held in self.records.on(host)]
        if known and None not in known:
            return [machine for machine in known if machine is not None]
        asked = time.monotonic() >= self.standings[host].retry_at
        shown = await self._glance(host) if asked else None
        if shown is not None:
            return [Machine(id, "up" if up else "pending", host, host) for id, up in shown.items()]
        return [
            Machine(held.machine, "up", host, host)
            for held in self.records.on(host)
            if not self.records.over(held) and not self._counts_as_gone(held) and not held.left
        ]

    async def _glance(self, host: str) -> Mapping[MachineId, bool] | None:
        """As `_look`. All others must not wait long for a host of which we know what we hold there."""
        look = self._looks.get(host)
        if look is None:
            look = self._looks[host] = asyncio.create_task(self._look(host))
            look.add_done_callback(lambda _: self._looks.pop(host, None))
        known = any(self.records.on(host))
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
            shown = await self.contact(host, self.homes[host].machines())
        except NO_ANSWER:
            return None
        remains = {sight.folder for sight in shown if sight.folder.startswith(LEFT)}
        shown = [sight for sight in shown if sight.folder not in remains]
        for sight in shown:  # also what another controller of this home has made
            machine = MachineId(unquote(sight.folder))
            if self.records.get(machine) is None and machine not in self._removing:
                self.records.learn(machine, host, sight.expires_at)
        found = {MachineId(unquote(sight.folder)): sight.up for sight in shown}
        for held in self.records.on(host):
            if held.left:
                if held.left.rpartition("/")[2] not in remains and held.machine not in found:
                    self.records.drop(held.machine)  # somebody has finished it by hand
                found.pop(held.machine, None)
            elif held.deleting and held.machine not in self._removing:
                self._settle(held, held.machine in found)
        return found

    # -- removal -------------------------------------------------------------------------------

    async def remove(self, held: HostLease) -> None:
        """Raises HostDown, HostLost, HostRefused: then it is a debt."""
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

    def next_host(self, tried: Iterable[str], most: int) -> str | None:
        """The best host that has room for another machine of ours."""
        for host in in_order(self.standings.items(), time.monotonic()):
            held = [
                held for held in self.records.on(host) if not held.deleting and not self.records.over(held)
            ]
            drained = any(held.left for held in self.records.on(host))
            if host not in tried and not drained and len(held) < most:
                return host
        return None

    def nowhere(self, name: str) -> PlaceError:
        """Why there is none."""
        now = time.monotonic()
        standings = self.standings.values()
        refusals = [each.refusal for each in standings if each.refusal]
        if len(refusals) == len(standings):
            return PlaceError("; ".join(refusals[:3]), transient=False, scope="place")
        up = sum(each.down_since is None for each in standings)
        aside = sum(now < each.aside_until for each in standings)
        said = [f"{up} of {len(standings)} hosts of {name} reachable, all taken"]
        if aside:
            said.append(f"{aside} set aside for a while after attempts broke there")
        said += [by_hand(held) for held in self.records.left()][:3]
        said += sorted({each.problem for each in standings if each.problem})[:3]
        waits = [each.due() - now for each in standings if now < each.due() < NEVER]
        wait_s = min(min(waits), LONGEST_WAIT_S) if waits else None
        return PlaceError("; ".join(said), transient=True, retry_after_s=wait_s)

    async def close(self) -> None:
        for task in (*self._debts.values(), *self._looks.values()):
            task.cancel()
        await asyncio.gather(*(host_home.host.close() for host_home in self.homes.values()))
