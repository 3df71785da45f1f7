"""Twenty lab hosts, a run of two hundred tasks on them, and its journal as it grows."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from evalfleet.api.runs import plan_run
from evalfleet.events import Record
from evalfleet.journal import Store
from evalfleet.lab import Lab, NamespaceHost
from evalfleet.model import AttemptId, Broken, MachineId, Offer
from evalfleet.planning.plan import HomeFacts, resolve
from evalfleet.planning.request import RunRequest
from evalfleet.state import AttemptState, MachineState, RunState, apply
from tests.waiting import PATIENCE_S, suspend, until

from . import workload

RUN = "chaos"
ON_LAB = ("--on", "lab", "--workers", "20")
OFFER = Offer("lab", "host")
"""As the place makes it: it says how long a host may be silent."""


def names(hosts: Iterable[NamespaceHost]) -> set[str]:
    return {host.name for host in hosts}


class Controller:
    """One `evalfleet` process in the lab's network."""

    def __init__(self, argv: Sequence[str], cwd: Path, environ: Mapping[str, str], log: Path) -> None:
        self._log = log
        with open(log, "wb") as out:
            self._process = subprocess.Popen(
                argv, cwd=cwd, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )

    @property
    def said(self) -> str:
        return self._log.read_text("utf-8", "replace")

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def signal(self, signum: int) -> None:
        self._process.send_signal(signum)

    def suspend(self) -> None:
        """As if its computer slept."""
        suspend(self._process.pid)

    def kill(self) -> None:
        """As if its computer had lost power."""
        self._process.kill()
        self._process.wait()

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """Its exit code."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the controller did not end: {self.said[-2000:]}") from None


class Arena:
    """A scenario breaks things when the journal says that it is time to; `rng` decides what and when.

    `home` is the controllers' EVALFLEET_HOME.
    """

    def __init__(self, lab: Lab, folder: Path, rng: random.Random) -> None:
        self.lab = lab
        self.hosts = lab.hosts
        self.rng = rng
        self.folder = folder
        self.home = folder / "results"
        self.controllers: list[Controller] = []
        self.settle_s = PATIENCE_S  # sessions on hosts end a moment after the controller
        self.state = RunState()
        self.records: list[Record] = []
        self._store: Store | None = None
        workload.write(folder)
        self._write_place()

    def _write_place(self) -> None:
        client = self.lab.client
        hosts = ", ".join(f'"{host.address}"' for host in self.hosts)
        (self.folder / "evalfleet.toml").write_text(
            f'[places.lab]\nkind = "ssh"\nuser = "{workload.USER}"\nkey = "{client.key_path}"\n'
            f'known_hosts = "{client.known_hosts_path}"\nhosts = [{hosts}]\n'
            # a host that stays away holds up the end of the run no longer than this
            "gone_after_s = 4\nconnect_timeout_s = 5\n"
        )

    # -- controllers -----------------------------------------------------------------------------

    def run(self, **limits: float) -> Controller:
        """`evalfleet run`; with other limits than those that flags give, planned here and taken up."""
        if not limits:
            return self.evalfleet("run", "chaos.toml", *ON_LAB, "--name", RUN)
        store = Store.open(self.home)
        request = RunRequest(benchmark="chaos.toml", on="lab", workers=len(self.hosts), name=RUN)
        environ = {"EVALFLEET_HOME": str(self.home)}
        now = time.time_ns() // 1000
        resolved = resolve(
            request, environ=environ, cwd=self.folder, now=now, facts=lambda: HomeFacts(store.home_id)
        )
        limited = msgspec.structs.replace(resolved.plan.limits, **limits)
        plan_run(replace(resolved, plan=msgspec.structs.replace(resolved.plan, limits=limited)))
        return self.resume()

    def resume(self, *words: str) -> Controller:
        return self.evalfleet("resume", RUN, *words)

    def evalfleet(self, *words: str) -> Controller:
        log = self.folder / f"controller-{len(self.controllers)}.log"
        argv = [*self.lab.prefix, sys.executable, "-m", "evalfleet", *words]
        environ = {**os.environ, "EVALFLEET_HOME": str(self.home)}
        started = Controller(argv, self.folder, environ, log)
        self.controllers.append(started)
        return started

    def finish(self) -> None:
        """Wait for the latest controller: it ends by itself, content, and so does the run."""
        code = self.controllers[-1].wait()
        assert code == 0, f"exit code {code}: {self.controllers[-1].said[-3000:]}"
        self.look()

    def close(self) -> None:
        for controller in self.controllers:
            if controller.lives:
                controller.signal(signal.SIGCONT)
                controller.kill()

    # -- the journal -----------------------------------------------------------------------------

    def look(self) -> RunState:
        """The state by all that is in the journal now."""
        if self._store is None:
            if not (self.home / "fleet.db").exists():
                return self.state
            self._store = Store.open(self.home, create=False, read_only=True)
            if RUN not in {info.name for info in self._store.streams()}:
                self._store = None
                return self.state
        for record in self._store.read(RUN, after=len(self.records)):
            self.records.append(record)
            apply(self.state, record.at, record.event)
        return self.state

    def until(self, happened: Callable[[RunState], object], what: str, timeout_s: float = PATIENCE_S) -> None:
        """Wait until the journal, or what else is looked at, shows it."""

        def has_happened() -> object:
            if happened(self.look()):
                return True
            problem = self._why_wait_no_longer()
            assert not problem or happened(self.look()), f"{problem} before {what}\n{self._said()}"
            return None

        until(has_happened, lambda: f"{what}\n{self._said()}", timeout_s, look_s=0.03)

    def _said(self) -> str:
        return self.controllers[-1].said[-2000:]

    def _why_wait_no_longer(self) -> str:
        if self.state.ended_at is not None:
            return "the run had ended"
        if not any(controller.lives for controller in self.controllers):
            return "no controller was at work"
        return ""

    def until_ended(self, attempts: int) -> None:
        """Wait until so many attempts have ended."""

        def ended(state: RunState) -> bool:
            return len(state.attempts) - state.running >= attempts

        self.until(ended, f"the end of {attempts} attempts")

    def machines_on(self, host: NamespaceHost) -> list[MachineState]:
        return [machine for machine in self.state.machines.values() if machine.address == host.address]

    def until_given_up(self, hosts: Iterable[NamespaceHost]) -> None:
        def given_up(state: RunState) -> bool:
            return all(
                any(m.condemned_at is not None and m.cause for m in self.machines_on(host)) for host in wanted
            )

        wanted = list(hosts)
        self.until(given_up, f"{names(wanted)} to be given up")

    def host_of(self, machine: MachineId) -> NamespaceHost:
        address = self.state.machines[machine].address
        return next(host for host in self.hosts if host.address == address)

    def under_way(self) -> list[AttemptState]:
        """Attempts with large artefacts that have ended, and are being collected."""
        waiting = [a for m in self.state.machines.values() for a in m.uncollected]
        return [a for each in waiting if workload.is_large((a := self.state.attempts[each]).task)]

    def broken(self) -> list[tuple[NamespaceHost, AttemptId, Broken]]:
        """Attempts that broke, and where."""
        found = [(a, a.outcome) for a in self.look().attempts.values() if isinstance(a.outcome, Broken)]
        return [(self.host_of(a.machine), a.id, outcome) for a, outcome in found]

    # -- hosts -----------------------------------------------------------------------------------

    def choose(self, count: int) -> list[NamespaceHost]:
        return self.rng.sample(self.hosts, count)

    def some_time(self) -> None:
        """Wait until the run is well under way: how far is up to the seed."""
        self.until_ended(self.rng.randint(10, 60))

    def hold(self, hosts: Iterable[NamespaceHost]) -> dict[NamespaceHost, AttemptId]:
        """Whatever starts on these hosts waits half way. Returns the attempts once one waits on each."""
        wanted = list(hosts)
        for host in wanted:
            host.run(["touch", workload.HOLD])
        self.until(lambda _: all(self._held(host) for host in wanted), "attempts to wait half way")
        return {host: AttemptId(self._held(host)[-1]) for host in wanted}

    def _held(self, host: NamespaceHost) -> list[str]:
        return host.run(["cat", workload.HELD], check=False).stdout.split()

    def release(self, hosts: Iterable[NamespaceHost]) -> None:
        for host in hosts:
            host.run(["rm", "-f", workload.HOLD])

    def witness(self, victims: Iterable[NamespaceHost]) -> NamespaceHost:
        """A host that is well, and whose attempt waits: the run cannot end before that is released."""
        host = self.rng.choice([host for host in self.hosts if host not in victims])
        self.hold([host])
        return host

    def power_on(self, host: NamespaceHost) -> None:
        host.power_on()
        self.release([host])

    def results_on(self, host: NamespaceHost) -> set[str]:
        """The attempts whose results lie on the host."""
        pattern = f"{workload.HOME}/.evalfleet/*/*/jobs/*/out/result.json"
        found = host.run(["sh", "-c", f"ls -d {pattern}"], check=False).stdout.split()
        return {Path(path).parts[-3] for path in found}

    def left_on(self, host: NamespaceHost) -> list[str]:
        """Processes and files of ours that are there now."""
        processes = [" ".join(process.argv) for process in host.workload()]
        files = host.run(["find", f"{workload.HOME}/.evalfleet"], check=False).stdout.split()
        return processes + files

    def until_clean(self, hosts: Iterable[NamespaceHost]) -> None:
        wanted = list(hosts)
        self.until(lambda _: not any(map(self.left_on, wanted)), f"{names(wanted)} to be cleaned up")

    def pay_debts(self) -> None:
        """What a run could not remove from hosts, the next one of the home does."""
        if not any(map(self.left_on, self.hosts)):
            return
        again = self.evalfleet("run", "after.toml", *ON_LAB, "--name", "after")
        assert again.wait() == 0, again.said

    def starts(self, host: NamespaceHost) -> list[str]:
        """The attempts that ran on the host, as they wrote it down themselves."""
        return host.run(["cat", workload.STARTS], check=False).stdout.split()
