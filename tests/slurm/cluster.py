"""A private Slurm cluster on this computer: Debian's own munged, slurmctld and some slurmd, a node each."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.processes import parent_of
from tests.waiting import slowness, until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "srun", "scancel", "scontrol")
GRACE_S = 25
SBIN = "/usr/sbin:/sbin"
RANGE = 40
"""Ports a cluster has at most."""

CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
InactiveLimit=0
KillWait=5
MinJobAge={min_job_age_s}
SlurmdTimeout={silent_s}
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
{more}
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs={cpus} {node}
PartitionName=main Nodes=n[1-{nodes}] Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=n[1-{nodes}] MaxTime=INFINITE State=UP PriorityTier=10
PartitionName=lenient Nodes=n[1-{nodes}] MaxTime=INFINITE State=UP PriorityTier=1 GraceTime={grace_s}
PartitionName=short Nodes=n[1-{nodes}] MaxTime=10 State=UP PriorityTier=1
"""


def missing() -> str | None:
    """Why no cluster can be had here; None if one can."""
    lacking = [name for name in PROGRAMS if _program(name) is None]
    if lacking:
        return f"{', '.join(lacking)} not installed (Debian's slurm-wlm)"
    return None if os.geteuid() == 0 else "slurmd must be started as root"


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:{SBIN}")


class Cluster:
    """Nodes `n1`, `n2` ... and the partitions `main`, `urgent` (which preempts others), `lenient` (whose jobs
    have some time left when they are preempted) and `short` (ten minutes).

    It has a munge key, ports and state folders of its own, and ends with all that ran on it.
    """

    def __init__(
        self,
        folder: Path,
        nodes: int = 3,
        cpus: int = 2,
        min_job_age_s: int = 300,
        more: str = "",
        node: str = "",
    ) -> None:
        self.folder = folder
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)]
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.config = folder / "slurm.conf"
        self.environ = {"SLURM_CONF": str(self.config)}
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        self.ports = Ports(nodes + 1)
        first, last, port = self.ports.first, self.ports.last - 1, self.ports.last
        self.config.write_text(
            CONFIG.format(
                host=socket.gethostname().partition(".")[0],
                port=port,
                user="root",
                folder=folder,
                nodes=nodes,
                first=first,
                last=last,
                cpus=cpus,
                min_job_age_s=min_job_age_s,
                silent_s=round(6 * slowness()),
                grace_s=GRACE_S,
                more=more,
                node=f"RealMemory=1000 {node}",
            )
        )

    # -- its programs --------------------------------------------------------------------------

    def start(self) -> None:
        if "munged" not in self._running:
            self.start_munge()
        self.start_controller()
        for node in self.nodes:
            self.start_node(node)
        until(self._all_idle, lambda: f"the nodes are up: {self.ask('sinfo', '-N')}")

    def start_munge(self) -> None:
        folder = self.folder
        self._run(
            "munged",
            *("--foreground", "--force", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket"),
            *(f"--pid-file={folder}/munge.pid", f"--log-file={folder}/munge.log"),
            f"--seed-file={folder}/munge.seed",
        )
        until((folder / "munge.socket").exists, lambda: (folder / "munged.out").read_text())

    def _all_idle(self) -> bool:
        return self.ask("sinfo", "-h", "-N", "-p", "main", "-o", "%T").split() == ["idle"] * len(self.nodes)

    def start_controller(self) -> None:
        self._run("slurmctld", "-D", "-f", str(self.config))
        until(lambda: self.try_("scontrol", "ping").returncode == 0, "slurmctld answers")

    def stop_controller(self) -> None:
        self._end("slurmctld", signal.SIGTERM)

    def start_node(self, node: str) -> None:
        (self.folder / f"spool-{node}").mkdir(exist_ok=True)
        self._run("slurmd", "-D", "-N", node, "-f", str(self.config), name=node)

    def kill_node(self, node: str) -> None:
        """As if its power failed: nothing that ran there goes on, and nobody is told."""
        jobs = self.ask("squeue", "-h", f"--nodelist={node}", "--states=RUNNING", "-o", "%i").split()
        self._end(node, signal.SIGKILL)
        titles = tuple(f"slurmstepd: [{job}.".encode() for job in jobs)
        keepers = [pid for pid in self.pids() if _title(pid).startswith(titles)]
        for pid in [*keepers, *_below(keepers)]:  # Slurm's keepers first: they would tell of the jobs' end
            _kill(pid)

    def _run(self, program: str, *args: str, name: str = "") -> None:
        path = _program(program)
        assert path is not None, program
        with (self.folder / f"{name or program}.out").open("ab") as out:
            self._running[name or program] = subprocess.Popen(
                [path, *args],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, **self.environ},
                start_new_session=True,
            )

    def _end(self, name: str, signum: int) -> None:
        process = self._running.pop(name, None)
        if process is not None:
            process.send_signal(signum)
            process.wait(60)

    def stop(self) -> None:
        """End everything, by pid."""
        with ExitStack() as stack:
            for name in ("munged", "slurmctld", *self.nodes):
                stack.callback(self._end, name, signal.SIGKILL)
            if "slurmctld" in self._running and all(node in self._running for node in self.nodes):
                self.cancel_all()
        for pid in self.pids():
            _kill(pid)
        self.ports.free()

    def cancel_all(self) -> None:
        """Cancel all jobs, whoever's they are, and wait until they are over."""
        self.try_("scancel", "--user=root", "--full")
        until(lambda: not self.ask("squeue", "-h", "-o", "%i"), "no job is left")

    # -- what runs there -----------------------------------------------------------------------

    def pids(self) -> list[int]:
        """All processes that were started by this cluster, its own daemons excepted."""
        own = {process.pid for process in self._running.values()}
        mark = f"SLURM_CONF={self.config}".encode()
        found = (int(name) for name in os.listdir("/proc") if name.isdigit())
        return [pid for pid in found if pid not in own and pid != os.getpid() and mark in _environ(pid)]

    # -- its commands --------------------------------------------------------------------------

    def ask(self, *argv: str) -> str:
        done = self.try_(*argv)
        assert done.returncode == 0, f"{argv}: {done.stderr}"
        return done.stdout.strip()

    def try_(self, *argv: str) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, **self.environ}
        return subprocess.run(
            argv, capture_output=True, text=True, timeout=120, env=environ, stdin=subprocess.DEVNULL
        )

    def submit(self, *options: str, command: str = "sleep 600") -> str:
        """A job of somebody else."""
        return self.ask("sbatch", "--parsable", "--output=/dev/null", *options, f"--wrap={command}")

    def states(self) -> dict[str, str]:
        """The state of each job, by its name."""
        lines = self.ask("squeue", "-h", "--states=all", "-o", "%T|%j").splitlines()
        return {name: state for state, _, name in (line.partition("|") for line in lines)}

    def job_of(self, name: str) -> str:
        """The id of the job of this name."""
        lines = self.ask("squeue", "-h", "-o", "%i|%j").splitlines()
        return next(id for id, _, its in (line.partition("|") for line in lines) if its == name)


def _environ(pid: int) -> Sequence[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ()


def _below(pids: Sequence[int]) -> list[int]:
    """All descendants of these processes."""
    parents: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            parent = parent_of(int(name))
        except OSError:
            continue
        parents.setdefault(parent, []).append(int(name))
    found: list[int] = []
    for pid in pids:
        found += parents.get(pid, [])
    return found + _below(found) if found else []


def _title(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


class Ports:
    """Ports that follow one another and that no other cluster of this computer gets, while daemons are down,
    too: whoever has the socket of a range's name has the range. None is one that the system hands out."""

    def __init__(self, count: int) -> None:
        assert count <= RANGE
        while True:
            self.first = 20000 + RANGE * secrets.randbelow(12000 // RANGE)
            self.last = self.first + count - 1
            self._name = socket.socket(socket.AF_UNIX)
            try:
                self._name.bind(f"\0evalfleet-slurm-ports-{self.first}")
                for port in range(self.first, self.last + 1):
                    socket.create_server(("127.0.0.1", port)).close()
            except OSError:
                self.free()
                continue
            return

    def free(self) -> None:
        self._name.close()
