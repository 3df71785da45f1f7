"""Who has which machine of a pool. Taken and given back in transactions: two never have the same one.

A hold is lent to a holder (a run, or the pool itself while its verbs work on the machine) until it is
given back, or `until` is over; one of the pool itself ends with the controller that took it. Its number
grows with every holder, so a machine that has heard of one refuses all that had it before.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence

from msgspec import Struct

from evalfleet.errors import LeaseLost, RequestError
from evalfleet.model import MachineId, Micros

from .database import transaction
from .sqlite import Store

EPOCHS = 1 << 20
"""More than a stream will ever have: a hold's number times this, plus its holder's epoch, is its fence."""
FOR_EVER: Micros = 1 << 62


class Hold(Struct, frozen=True):
    """A claim on a machine of a pool. `borrower` is the holder's own name for it. No holder: it was given
    back."""

    machine: MachineId
    pool: str
    number: int
    holder: str | None
    borrower: MachineId | None
    epoch: int
    until: Micros

    def held(self, now: Micros) -> bool:
        return self.holder is not None and self.until > now

    @property
    def fence(self) -> int:
        return self.number * EPOCHS + self.epoch


class Holds(Struct, frozen=True):
    """The holds on one pool's machines."""

    store: Store
    pool: str

    def all(self) -> dict[MachineId, Hold]:
        with self.store.connected() as conn:
            return _rows(conn, "pool = ?", (self.pool,))

    def of(self, holder: str) -> dict[MachineId, Hold]:
        """By the holder's own names."""
        with self.store.connected() as conn:
            rows = _rows(conn, "pool = ? AND holder = ?", (self.pool, holder))
        return {hold.borrower: hold for hold in rows.values() if hold.borrower is not None}

    def take(
        self,
        machines: Iterable[MachineId],
        holder: str,
        epoch: int,
        borrower: MachineId,
        now: Micros,
        until: Micros,
    ) -> Hold | None:
        """The first of the machines that is free, or the one that the borrower is already. None: no luck.

        Raises LeaseLost when the holder's stream is under another epoch: its controller was replaced.
        """
        with self.store.connected() as conn, transaction(conn):
            _check_epoch(conn, holder, epoch)
            known = _rows(conn, "pool = ?", (self.pool,))
            own = [hold for hold in known.values() if hold.borrower == borrower]
            at_work = None if own else self._at_work(now)
            free = own or [
                known.get(machine) or _never_held(machine, self.pool)
                for machine in machines
                if machine not in known or not self._is_taken(known[machine], at_work, now)
            ]
            if not free:
                return None
            return _give(conn, free[0], holder, epoch, borrower, until, anew=not own)

    def _is_taken(self, hold: Hold, at_work: int | None, now: Micros) -> bool:
        return hold.held(now) and (hold.holder != self.pool or hold.epoch == at_work)

    def _at_work(self, now: Micros) -> int | None:
        """The epoch of the pool's own controller, if one lives: what a dead one held is free."""
        info = self.store.stream(self.pool)
        return info.epoch if self.store.held(info, now) is not None else None

    def being_worked_on(self, now: Micros) -> bool:
        """Has a verb of the pool any of its machines now?"""
        at_work = self._at_work(now)
        mine = (hold for hold in self.all().values() if hold.holder == self.pool)
        return any(self._is_taken(hold, at_work, now) for hold in mine)

    def take_all(self, machines: Sequence[MachineId], epoch: int, now: Micros) -> None:
        """For the pool itself, all or none. Raises RequestError, which names who has one."""
        with self.store.connected() as conn, transaction(conn):
            _check_epoch(conn, self.pool, epoch)
            known = _rows(conn, "pool = ?", (self.pool,))
            for machine in machines:
                hold = known.get(machine) or _never_held(machine, self.pool)
                if hold.held(now) and hold.holder != self.pool:
                    raise RequestError(
                        f"{machine} is held by run {hold.holder!r}: wait until it ends, or stop it with "
                        f"`evalfleet cancel {hold.holder}`"
                    )
                _give(conn, hold, self.pool, epoch, machine, FOR_EVER, anew=True)

    def extend(self, borrower: MachineId, until: Micros) -> bool:
        """False if there is no such hold."""
        statement = "UPDATE hold SET until = ? WHERE borrower = ? AND pool = ?"
        with self.store.connected() as conn:
            return conn.execute(statement, (until, borrower, self.pool)).rowcount == 1

    def give_back(self, borrowers: Iterable[MachineId], holder: str, epoch: int) -> None:
        """Raises LeaseLost when the holder's controller was replaced: the newer one may use them."""
        statement = "UPDATE hold SET holder = NULL, borrower = NULL WHERE borrower = ? AND pool = ?"
        with self.store.connected() as conn, transaction(conn):
            _check_epoch(conn, holder, epoch)
            conn.executemany(statement, [(borrower, self.pool) for borrower in borrowers])


def _never_held(machine: MachineId, pool: str) -> Hold:
    return Hold(machine, pool, 0, None, None, 0, 0)


def _rows(conn: sqlite3.Connection, where: str, values: tuple[str, ...]) -> dict[MachineId, Hold]:
    if conn.execute("PRAGMA user_version").fetchone() == (1,):
        return {}  # an older home, open for reading only: it has no pools
    columns = "machine, pool, number, holder, borrower, epoch, until"
    rows = conn.execute(f"SELECT {columns} FROM hold WHERE {where} ORDER BY machine", values)
    return {row[0]: Hold(*row) for row in rows}


def _give(
    conn: sqlite3.Connection,
    hold: Hold,
    holder: str,
    epoch: int,
    borrower: MachineId,
    until: Micros,
    *,
    anew: bool,
) -> Hold:
    given = Hold(hold.machine, hold.pool, hold.number + anew, holder, borrower, epoch, until)
    conn.execute(
        "INSERT OR REPLACE INTO hold (machine, pool, number, holder, borrower, epoch, until) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        (given.machine, given.pool, given.number, given.holder, given.borrower, given.epoch, given.until),
    )
    return given


def _check_epoch(conn: sqlite3.Connection, stream: str, epoch: int) -> None:
    if conn.execute("SELECT epoch FROM stream WHERE name = ?", (stream,)).fetchone() != (epoch,):
        raise LeaseLost(f"another controller took over {stream!r}: this one takes and gives back no machine")
