"""What people do by hand with machines of a pool that were set up for a benchmark, by its appliance.

Which appliance that is: the named benchmark's, else that of the benchmark which the machines were prepared
for. A run that borrowed machines may have set them up without anybody having prepared them: then it is the
only installed one that can do what is asked.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

import msgspec

from evalfleet.benchmarks.loaded import Appliance, HostVerb, Screen
from evalfleet.channels import children
from evalfleet.errors import RequestError
from evalfleet.model import Ended, MachineId
from evalfleet.names import hint, safe_name
from evalfleet.planning.plugins import benchmark_kind, known
from evalfleet.planning.sources import benchmark_source
from evalfleet.planning.workspace import Workspace
from evalfleet.state import MachineState

from .pool_machine import ActionResult
from .pools import Pool
from .tunnels import HERE, Tunnel, fetch, open_tunnels

LOOK_S = 20.0
"""How long something that is only looked at may take."""
PICTURE_S = 10.0
MOST_BYTES = 64 << 20
LINKS = ".screens"
PNG = b"\x89PNG\r\n\x1a\n"


class BenchmarkAppliance(NamedTuple):
    """An appliance, and the benchmark whose it is."""

    benchmark: str
    appliance: Appliance

    def absent(self, pool: str) -> str:
        """What is to be said of a machine on which nothing was set up."""
        return f"there is no {self.appliance.what} on it; {self.set_up(pool)} it up"

    def set_up(self, pool: str) -> str:
        return f"`evalfleet pool prepare {pool} {self.benchmark}` sets"


# -- which one -----------------------------------------------------------------------------------


def verb_of(
    pool: Pool, machines: Sequence[MachineState], verb: str, named: str | None = None
) -> tuple[BenchmarkAppliance, HostVerb]:
    """The verb, and whose it is. RequestError if there is none, or it is not clear whose."""
    found = _chosen(pool, machines, named, lambda one: verb in one.verbs, f"verb {verb!r}", verb)
    return found, found.appliance.verbs[verb]


def screen_of(
    pool: Pool, machines: Sequence[MachineState], named: str | None = None
) -> tuple[BenchmarkAppliance, Screen]:
    """The screen, and whose it is. RequestError if the machines have none, or it is not clear whose."""
    found = _chosen(pool, machines, named, lambda one: one.screen is not None, "screen")
    assert found.appliance.screen is not None
    return found, found.appliance.screen


def tunnel_of(pool: Pool, machines: Sequence[MachineState], named: str | None = None) -> tuple[int, int]:
    """The port to open unless told otherwise. Raises RequestError if there is none."""
    what = "port of its own: name one with --port"
    found = _chosen(pool, machines, named, lambda one: one.tunnel is not None, what)
    assert found.appliance.tunnel is not None
    return found.appliance.tunnel


def _chosen(
    pool: Pool,
    machines: Sequence[MachineState],
    named: str | None,
    can: Callable[[Appliance], bool],
    what: str,
    verb: str = "",
) -> BenchmarkAppliance:
    prepared = [named] if named else sorted({machine.prepared for machine in machines} - {""})
    if len(prepared) > 1:
        raise RequestError(
            f"machines of pool {pool.name!r} are prepared for {' and '.join(prepared)}: name one with "
            "--benchmark, or the machines"
        )
    if prepared:
        find = _of_named if named else _of_prepared
        appliance = find(pool.workspace, prepared[0])
        if appliance is None or not can(appliance):
            options = hint(verb, appliance.verbs) if verb and appliance is not None else ""
            other = "" if named else "--benchmark names another"
            raise RequestError("; ".join(filter(None, (f"{prepared[0]} has no {what}", options, other))))
        return BenchmarkAppliance(prepared[0], appliance)
    able = [one for one in _installed() if can(one.appliance)]
    if not able:
        raise RequestError(f"no benchmark that is installed has a {what}")
    if len(able) > 1:
        names = ", ".join(one.benchmark for one in able)
        raise RequestError(
            f"pool {pool.name!r} is not prepared for anything: name one of {names} with --benchmark"
        )
    return able[0]


def _of_named(workspace: Workspace, benchmark: str) -> Appliance | None:
    """The appliance of a benchmark that was named. RequestError if there is no such benchmark."""
    return benchmark_source(benchmark, workspace.config, workspace.cwd).kind.appliance


def _of_prepared(workspace: Workspace, benchmark: str) -> Appliance | None:
    """By the name that was written down; that of a benchmark in a file tells nothing, and needs not."""
    try:
        return _of_named(workspace, benchmark)
    except RequestError:
        return None


def _installed() -> list[BenchmarkAppliance]:
    found: list[BenchmarkAppliance] = []
    for name in sorted(known("benchmark")):
        with suppress(RequestError):  # a plug-in that cannot be imported can do nothing
            if (appliance := benchmark_kind(name).appliance) is not None:
                found.append(BenchmarkAppliance(name, appliance))
    return found


# -- links to screens ----------------------------------------------------------------------------


class ScreenLinks:
    """The links to screens that one process keeps open, in a file that others read.

    The file is locked for as long as they are open, so that nobody shows those of a process that was killed.
    """

    def __init__(self, pool: Pool) -> None:
        self._path = _links_folder(pool) / f"{socket.gethostname()}-{os.getpid()}.json"

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self._path, "wb")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        return self

    def __exit__(self, *_: object) -> None:
        self._path.unlink(missing_ok=True)
        self._file.close()

    def keep(self, tunnels: Sequence[Tunnel]) -> None:
        self._file.write(msgspec.json.encode({tunnel.machine.id: link_to(tunnel) for tunnel in tunnels}))
        self._file.flush()


def link_to(tunnel: Tunnel) -> str:
    return _link(tunnel.here)


def _link(port: int) -> str:
    return f"http://{HERE}:{port}/"


def open_links(pool: Pool) -> dict[MachineId, str]:
    """The links to the screens of a pool's machines that somebody keeps open on this computer."""
    links: dict[MachineId, str] = {}
    for path in sorted(_links_folder(pool).glob(f"{socket.gethostname()}-*.json")):
        with suppress(OSError, msgspec.MsgspecError), open(path, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:  # whoever wrote it lives
                links |= msgspec.json.decode(file.read(), type=dict[MachineId, str])
            else:
                path.unlink(missing_ok=True)
    return links


def usual_links(pool: Pool, machines: Sequence[MachineState]) -> dict[MachineId, str]:
    """Return the links that `pool vnc` opens to screens of these machines if the ports are free.

    Only machines that were prepared for a benchmark with screens have one.
    """
    appliances = {name: _of_prepared(pool.workspace, name) for name in {m.prepared for m in machines} - {""}}
    links: dict[MachineId, str] = {}
    for n, machine in enumerate(machines):
        appliance = appliances.get(machine.prepared)
        if appliance is not None and appliance.screen is not None:
            links[machine.id] = _link(appliance.screen.port + n)
    return links


def _links_folder(pool: Pool) -> Path:
    return pool.store.home / safe_name(pool.name) / LINKS


# -- doing ---------------------------------------------------------------------------------------


async def do(
    pool: Pool, names: Sequence[str], owner: BenchmarkAppliance, verb: HostVerb
) -> list[ActionResult]:
    """Run a verb on machines that nobody else has meanwhile."""
    undone = tuple(verb.says) if verb.undoes else ()
    ends = await pool.execute(names, verb.command, verb.limit_s, undone)
    return [_judged(pool, owner, verb, answer, ended) for answer, ended in ends]


def _judged(
    pool: Pool, owner: BenchmarkAppliance, verb: HostVerb, answer: ActionResult, ended: Ended | None
) -> ActionResult:
    if ended is None or answer.problem:
        return answer
    machine = answer.machine
    code = ended.exit_code if ended.reason == "exited" else None
    if code is not None and code in verb.says:
        return ActionResult(machine, said=verb.says[code].format(machine=machine.name))
    if code == owner.appliance.absent:
        return ActionResult(machine, owner.absent(pool.name))
    return ActionResult(machine, f"{ended.reason.replace('_', ' ')}: {ended.detail.strip()}")


# -- looking: whoever has the machine is not disturbed -------------------------------------------


class Look(NamedTuple):
    """What a command printed. `code` is None if it could not be run, or did not end in time."""

    code: int | None
    output: bytes = b""


async def look(pool: Pool, machine: MachineState, command: Sequence[str], limit_s: float) -> Look:
    """Run a command that changes nothing."""
    try:
        argv = await pool.shell(machine.name, command)
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # away from the terminal: nobody is there to be asked for a passphrase
        )
    except (RequestError, OSError):
        return Look(None)
    try:
        async with asyncio.timeout(limit_s):
            output, _ = await process.communicate()
    except TimeoutError:
        return Look(None)
    finally:
        if process.returncode is None:
            await children.end(process)
    return Look(process.returncode, output)


async def probe(pool: Pool) -> list[ActionResult]:
    """Do the machines answer, and what was set up on them?"""
    answers = await pool.probe()
    installed = _installed()
    return await asyncio.gather(*(_probe(pool, answer, installed) for answer in answers))


async def _probe(pool: Pool, answer: ActionResult, installed: Sequence[BenchmarkAppliance]) -> ActionResult:
    machine = answer.machine
    if answer.problem:
        return answer
    prepared = _of_prepared(pool.workspace, machine.prepared) if machine.prepared else None
    able = [prepared] if machine.prepared else [one.appliance for one in installed]
    for appliance in able:
        if appliance is not None and appliance.probe:
            seen = await look(pool, machine, appliance.probe, LOOK_S)
            if seen.code not in (0, appliance.absent, None):
                return ActionResult(machine, f"{appliance.what} does not answer")
    return answer


async def picture(pool: Pool, machine: MachineState, owner: BenchmarkAppliance) -> tuple[bytes, str]:
    """What its screen shows, as a PNG; or why there is none.

    It comes from the guest's own server; from outside for a guest that hangs, which is when people want to
    see it.
    """
    screen = owner.appliance.screen
    assert screen is not None
    image, problem = await _picture_of_guest(pool, machine, screen)
    if image:
        return image, ""
    seen = await look(pool, machine, screen.picture, 2 * PICTURE_S)
    if seen.code == owner.appliance.absent:
        return b"", owner.absent(pool.name)
    return (seen.output, "") if seen.output.startswith(PNG) else (b"", problem)


async def _picture_of_guest(pool: Pool, machine: MachineState, screen: Screen) -> tuple[bytes, str]:
    problems: list[str] = []
    port = (screen.picture_port + 1, screen.picture_port)
    async with open_tunnels(pool, [machine], [port], problems.append) as (tunnel,):
        try:
            image = await fetch(tunnel, screen.picture_path, PICTURE_S, MOST_BYTES)
        except OSError as err:
            return b"", problems[0] if problems else f"its guest sends no picture: {err}"
    if not image.startswith(PNG):
        return b"", "its guest sends something else than a PNG picture"
    return image, ""
