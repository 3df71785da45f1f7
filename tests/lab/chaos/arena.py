"""Twenty lab hosts, a run of two hundred tasks on them, and its journal as it grows."""

from __future__ import annotations

import random
import signal
import sqlite3
from collections.abc import Iterable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from evalfleet.api.runs import plan_run, resolve_request
from evalfleet.model import AttemptId, Broken, MachineId, Offer
from evalfleet.planning.request import RunRequest
from evalfleet.planning.workspace import Workspace
from evalfleet.state import AttemptState, MachineState, RunState
from lab import Lab, NamespaceHost
from tests.desk import Desk, FollowedRun, Process
from tests.waiting import PATIENCE_S, slowness, until

from . import workload

RUN = "chaos"
ON_LAB = ("--on", "lab", "--workers", "20")
OFFER = Offer("lab", "host")
"""As the place makes it: it says how long a host may be silent."""


def names(hosts: Iterable[NamespaceHost]) -> set[str]:
    return {host.name for host in hosts}


class Arena(FollowedRun):
    """A scenario breaks things when the journal says that it is time to; `rng` decides what and when."""

    def __init__(self, lab: Lab, folder: Path, rng: random.Random) -> None:
        super().__init__(Desk(folder, folder / "results", prefix=lab.prefix), RUN)
        self.lab = lab
        self.hosts = lab.hosts
        self.folder = folder
        self.rng = rng
        self.settle_s = PATIENCE_S  # sessions on hosts end a moment after the controller
        workload.write(folder)
        self._write_place()

    @property
    def home(self) -> Path:
        return self.desk.home

    def _write_place(self) -> None:
        client = self.lab.client
        hosts = ", ".join(f'"{host.address}"' for host in self.hosts)
        (self.folder / "evalfleet.toml").write_text(
            f'[places.lab]\nkind = "ssh"\nuser = "{workload.USER}"\nkey = "{client.key_path}"\n'
            f'known_hosts = "{client.known_hosts_path}"\nhosts = [{hosts}]\n'
            # a host that stays away holds up the end of the run no longer than this
            f"gone_after_s = 4\nconnect_timeout_s = {5 * slowness():.0f}\n"
        )

    # -- controllers -----------------------------------------------------------------------------

    def run(self, **limits: float) -> Process:
        """`evalfleet run`; with other limits than those that flags give, planned here and taken up."""
        if not limits:
            return self.desk.start("run", "chaos.toml", *ON_LAB, "--name", RUN)
        request = RunRequest(benchmark="chaos.toml", on="lab", workers=len(self.hosts), name=RUN)
        workspace = Workspace({"EVALFLEET_HOME": str(self.home)}, self.folder, self.home)
        resolved = resolve_request(workspace, request)
        limited = msgspec.structs.replace(resolved.plan.limits, **limits)
        plan_run(replace(resolved, plan=msgspec.structs.replace(resolved.plan, limits=limited)))
        return self.resume()

    def resume(self, *words: str) -> Process:
        return self.desk.start("resume", RUN, *words)

    def finish(self) -> None:
        """Wait for the latest controller: it ends by itself, content, and so does the run."""
        self.desk.processes[-1].finish()
        self.look()

    def suspend_between_writes(self, controller: Process) -> None:
        """As if its computer slept. One that is stopped while it writes keeps others from writing, too."""

        def stopped() -> bool:
            controller.suspend()
            journal = sqlite3.connect(self.home / "fleet.db", timeout=0.1)
            with closing(journal), suppress(sqlite3.OperationalError):
                journal.execute("BEGIN IMMEDIATE").close()
                return True
            controller.signal(signal.SIGCONT)
            return False

        until(stopped, "a moment in which it does not write")

    # -- the journal -----------------------------------------------------------------------------

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
        again = self.desk.start("run", "after.toml", *ON_LAB, "--name", "after")
        again.finish()

    def starts(self, host: NamespaceHost) -> list[str]:
        """The attempts that ran on the host, as they wrote it down themselves."""
        return host.run(["cat", workload.STARTS], check=False).stdout.split()
