"""What hostile attempts can do to a machine, on each isolation: real processes, and what came of each attack.

Attempts that attack their machine: a victim runs beside each, with a secret of its own. Before and after,
everything in the machine's folder that is not the attacker's own is compared; what the attacker printed and
left is searched for the victim's secret, and its processes are looked for. Attacks are bounded before they
start: one that could do harm outside the machine's folder runs only after it has seen that it is an
unprivileged user or the first process of a container, and a fork bomb only in a group whose limit it has read
back. So some are not run where attempts are not isolated. Each has a deadline; what takes longer is `stuck`.
Containers are those of a real podman, where there is one.

Tasks that want another try: a run whose tasks may have one attempt each, and what came of them.

Then everything that a host can send is fuzzed for ten minutes. tests/integration/test_hostile_machine.py has
what machines do to their controller.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from evalfleet.benchmarks.containers import ContainerSettings, image_step, in_container
from evalfleet.channels.supervisor.files import read_file
from evalfleet.errors import FleetError
from evalfleet.model import AttemptId, Bundle, Command, Isolation, Job, MachineId, Needs
from evalfleet.places.local import LocalPlace, LocalSettings
from evalfleet.ports import Channel, Fence
from standins.podman import LIMITS, lacking, podman_with

from . import fuzz
from .result import Figures, Result, at_least, at_most, rounded

SECRET = "sk-victim-4f1d9c"
KINDS: tuple[Isolation, ...] = ("none", "user", "container")
GUARD = "[ $(id -u) -ge 20000 ] || [ $$ = 1 ] || exit 99; "
"""Before what would do harm as root."""
LIMIT_S = 20.0
DEADLINE_S = 120.0
"""Of one attack with its machine, from the request to its deletion, on a busy computer."""
AT_ONCE = 3
TRIES = 3
CHANGING = ("jobs/attack.0", "trash", "beat.json", "supervisor.", "groups", "forgotten")
"""Of a machine's folder: the attacker's own, and what changes by itself."""


class Attack(NamedTuple):
    """`M` is the machine's folder, `V` the victim's job, `PID` its process, `NAP` a time to sleep.

    `alone`: if isolated only.
    """

    name: str
    script: str
    alone: bool = False


TARGETS = {
    "the victim's result": "$V/out/result.json",
    "the victim's log": "$V/log",
    "the victim's exit code": "$V/exit",
    "the victim's pid": "$V/pid",
    "the victim's job.json": "$V/job.json",
    "the benchmark's file": "$M/bundles/b/grade.py",
    "a module beside it": "$M/bundles/b/json.py",
    "our record of the files": "$M/seals/b",
    "the machine's expiry": "$M/expiry",
    "the machine's epoch": "$M/epoch",
    "the machine's key": "$M/key",
    "the mark of deletion": "$M/deleting",
}
WAYS = {
    "overwrite": 'echo forged > "{0}"',
    "delete": 'rm -f "{0}"',
    "replace by a link": 'ln -sfn /dev/null "{0}"',
    "rename over": 'echo forged > "$EVALFLEET_OUT/f"; mv -f "$EVALFLEET_OUT/f" "{0}"',
}
READS = {
    "environment": 'cat "/proc/$PID/environ"',
    "memory": 'head -c 1 "/proc/$PID/mem"; cat "/proc/$PID/maps"; cat "/proc/$PID/auxv"',
    "working directory": 'cat "/proc/$PID/cwd/"* "/proc/$PID/root$V/work/"*',
    "descriptors": 'cat "/proc/$PID/fd/"*',
    "artefacts": 'cat "$V/out/"*',
    "log": 'cat "$V/log"',
    "every file": 'grep -r sk-victim "$M"',
    "private tmp": 'cat /tmp/secret "$V/tmp/"*',
    "a link to them": 'ln -s "$V/out/secret" "$EVALFLEET_OUT/s"; cat "$EVALFLEET_OUT/s"',
    "a hard link to them": 'ln "$V/out/secret" "$EVALFLEET_OUT/h"; cat "$EVALFLEET_OUT/h"',
}
SLEEP = "sleep $NAP"
LEFT = {
    "a background process": f"{SLEEP} &",
    "a session of its own": f"setsid {SLEEP} &",
    "a double fork": f"(setsid sh -c '{SLEEP} &' &)",
    "an emptied environment": f"(setsid env -i {SLEEP} &)",
    "ignored signals": f"(setsid sh -c 'trap \"\" TERM HUP INT; {SLEEP}' &)",
    "nohup": f"nohup {SLEEP} >/dev/null 2>&1 &",
    "a process that respawns": f"(setsid sh -c 'for i in 1 2 3 4 5; do {SLEEP}; done' &)",
    "a stopped process": f"(setsid sh -c 'kill -STOP $$; {SLEEP}' &) ; (setsid {SLEEP} &)",
    "a swarm": f"for i in $(seq 20); do (setsid env -i {SLEEP} &); done",
    "a changed name": f"(setsid bash -c 'exec -a sshd {SLEEP}' &)",
}
CONNECT = "import socket; socket.socket(1).connect('supervisor.sock')"
SPEAK = """cd "$M" && python3 -c '
import json, socket, sys
s = socket.socket(1); s.connect("supervisor.sock")
for message in json.loads(sys.argv[1].replace("KEY", sys.argv[2])):
    s.sendall(json.dumps(message).encode() + b"\\n")
print(s.recv(65536)); print(s.recv(65536))
' '{0}' {1}"""
HIGH = '[{"op": "hello", "n": 1, "key": "KEY", "run": "hostile", "epoch": 999999999, "protocols": [1]}]'
EXPIRE = '[{"op": "expire", "n": 1, "key": "KEY", "seconds": 999999999}]'
SPOKEN = {
    "hello as a newer controller, without the key": (HIGH, '""'),
    "hello as a newer controller, with a guessed key": (HIGH, "$(printf %064d 1)"),
    "hello as a newer controller, with the key": (HIGH, '"$(cat key)"'),
    "move the dead-man switch without the key": (EXPIRE, '""'),
    "move the dead-man switch with the key": (EXPIRE, '"$(cat key)"'),
}
READ_BACK = (
    'l=$(cat $(find /sys/fs/cgroup -maxdepth 4 "(" -path "*$(id -u)/pids.max" -o -path "*/cgroup/pids.max" '
    '-o -path "*/cgroup/pids/pids.max" ")" | head -1)); [ "$l" -le 4096 ] || exit 99'
)
ALONE = {
    "kill everything": "kill -9 -1",
    "kill the victim": "kill -9 $PID",
    "kill the victim's group": "kill -9 -$PID",
    "kill whoever started it": "kill -9 $PPID",
    "stop the victim": "kill -STOP $PID",
    "become root by sudo": "sudo -n true && echo forged > $M/epoch; su -c true root </dev/null",
    "a set-uid shell": 'cp /bin/sh "$EVALFLEET_OUT/sh"; chmod 6755 "$EVALFLEET_OUT/sh"',
    "remount the files": 'mount -o remount,rw "$M/bundles/b"; umount "$M/bundles/b"; umount -l /tmp',
    "leave its group": "for g in $(find /sys/fs/cgroup -name cgroup.procs | head -50); do echo $$ > $g; done",
    "raise its limits": "for g in $(find /sys/fs/cgroup -name pids.max | head -50); do echo max > $g; done",
    "remove the machine": 'rm -rf "$M"',
    "speak to the supervisor": f'cd "$M" && python3 -c "{CONNECT}" && echo forged > $M/epoch',
    "trace the victim": 'python3 -c "import ctypes; print(ctypes.CDLL(None).ptrace(16, $PID, 0, 0))"',
    "enter the victim's namespace": "nsenter -t $PID -m cat $V/out/secret",
    "a user namespace": "unshare -Urm sh -c 'mount --bind /etc /mnt; cat /proc/'$PID'/environ'",
    "write its exit code early": 'echo 0 > "$EVALFLEET_OUT/../exit"; exit 7',
    "set the clock back": "date -s '2 hours ago'; date -s @0; hwclock --set --date '2000-01-01'",
    "take what waits for the next job": (
        'for d in "$M"/spares/*; do echo forged > "$d/work/x"; rm -rf "$d"; done; '
        "for p in $(pgrep -U 0 -f supervisor); do kill -9 $p; cat /proc/$p/environ; done"
    ),
    "a fork bomb": f"{READ_BACK}; for i in $(seq 300); do {SLEEP} & done",
}


def attacks() -> list[Attack]:
    found = [
        Attack(f"{way}: {what}", script.format(path))
        for what, path in TARGETS.items()
        for way, script in WAYS.items()
    ]
    found += [Attack(f"read the victim's {what}", script) for what, script in READS.items()]
    found += [Attack(f"leave {what}", script) for what, script in LEFT.items()]
    found += [
        Attack(what, SPEAK.replace("{0}", said).replace("{1}", key)) for what, (said, key) in SPOKEN.items()
    ]
    return found + [Attack(what, GUARD + script, alone=True) for what, script in ALONE.items()]


def run(quick: bool) -> Result:
    if os.geteuid() != 0:
        return Result("hostile", {"error": "needs root: attempts become users of their own"}, {})
    begun = time.monotonic()
    chosen = attacks()[::8] if quick else attacks()
    figures: Figures = {}
    rows: dict[str, dict[str, str]] = {}
    cannot = "not in a quick look" if quick else lacking(PROGRAMS)
    kinds: list[Isolation] = [kind for kind in KINDS if kind != "container" or not cannot]
    for kind in kinds:
        with contextlib.ExitStack() as stack:
            if kind == "container":
                podman = stack.enter_context(podman_with(PROGRAMS))
                ENGINE.args = (*LIMITS, *podman.grouped)
                path = os.environ["PATH"]
                stack.callback(os.environ.__setitem__, "PATH", path)
                os.environ["PATH"] = f"{podman.folder}/bin:{path}"
            outcomes = asyncio.run(_all_tried(chosen, kind))
            if not quick:
                outcomes |= _rerolled(kind)
        for name, outcome in outcomes.items():
            rows.setdefault(name, {})[kind] = outcome
        figures |= {f"{kind}_{word}": _count(word, outcomes) for word in (*WORDS, "not_run")}
    figures |= {"attacks": len(rows), "seconds": rounded(time.monotonic() - begun), "outcomes": rows}
    if cannot:
        figures["container_not_tried"] = cannot
    apart = [kind for kind in kinds if kind != "none"]
    aims = {
        f"{kind}_{word}": at_most(figures[f"{kind}_{word}"], 0)
        for kind in apart
        for word in (*WORDS, "not_run")
    }
    aims |= {f"none_{word}": at_most(figures[f"none_{word}"], 0) for word in ("rerolled", "remained")}
    if not quick:
        aims["attacks"] = at_least(len(rows), 60)
    fuzzed = fuzz.run(quick)
    figures["fuzz"] = fuzzed.figures
    return Result("hostile", figures, aims | {f"fuzz.{name}": aim for name, aim in fuzzed.aims.items()})


PROGRAMS = (
    *("sh", "bash", "cat", "sleep", "ls", "id", "touch", "sort", "tr", "rm", "ln"),
    *("mv", "cp", "chmod", "grep", "head", "find", "seq", "nohup", "env", "setsid", "kill"),
    *("mkfifo", "mount", "umount", "unshare", "nsenter", "date"),
)
"""Of this computer, which attacks in containers have."""


class Engine:
    """How attempts in containers are run here: further arguments of the engine's."""

    args: tuple[str, ...] = ()

    def settings(self) -> ContainerSettings:
        return ContainerSettings(engine="podman", network="none", pids=512, args=self.args)

    def command(self, kind: Isolation, script: str, env: dict[str, str]) -> Command:
        command = Command(("sh", "-c", script), env)
        return in_container(command, IMAGE, self.settings()) if kind == "container" else command


IMAGE = "localhost/tiny"
ENGINE = Engine()

WORDS = ("touched", "shown", "left", "remained", "harmed", "rerolled", "stuck")
"""What an attack may do: to others' files, show a secret, leave a process (`remained`: also after its machine
is deleted), harm the victim or the controller, get another try, or never end."""


def _count(word: str, outcomes: dict[str, str]) -> int:
    return sum(word in outcome.split(", ") for outcome in outcomes.values())


# -- attempts that attack their machine ----------------------------------------------------------------


async def _all_tried(chosen: list[Attack], kind: Isolation) -> dict[str, str]:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(number: int, attack: Attack) -> str:
        async with gate:
            return await _tried(attack, kind, f"98765.{number}")

    outcomes = await asyncio.gather(*(one(n, attack) for n, attack in enumerate(chosen, 1)))
    return {attack.name: outcome for attack, outcome in zip(chosen, outcomes, strict=True)}


class NotBegun(Exception):
    """The machine or the victim failed before the attack began: that is none of its doing."""


async def _tried(attack: Attack, kind: Isolation, nap: str) -> str:
    """`held`, or what it did."""
    if attack.alone and kind == "none":
        return "not_run"
    for _ in range(TRIES):
        with contextlib.suppress(NotBegun):
            return await _tried_once(attack, kind, nap)
    return "not_run"


async def _tried_once(attack: Attack, kind: Isolation, nap: str) -> str:
    found: list[str] = []
    not_begun: NotBegun | None = None
    with tempfile.TemporaryDirectory(prefix="evalfleet-hostile-", ignore_cleanup_errors=True) as folder:
        place = LocalPlace("local", LocalSettings(), Path(folder))
        machine_id = MachineId("hostile-000000-1")
        try:
            async with asyncio.timeout(DEADLINE_S):
                (offer,) = await place.offers(Needs())
                await place.create(machine_id, offer, 600.0)
                (machine,) = await place.list("hostile-000000")
                channel = place.channel(machine, Fence("hostile", 1, 20.0))
                try:
                    found = await _attacked(attack, kind, channel, Path(machine.address), Path(folder), nap)
                finally:
                    with contextlib.suppress(FleetError):
                        await channel.close()
        except TimeoutError:
            found.append("stuck")
        except NotBegun as err:
            not_begun = err
        except FleetError:
            found.append("harmed")  # its machine is lost
        try:
            async with asyncio.timeout(DEADLINE_S):
                await place.delete(machine_id)
        except (TimeoutError, FleetError):
            found.append("remained")
    if not_begun is not None:
        raise not_begun
    if _alive(nap):
        found.append("remained")
    return ", ".join(dict.fromkeys(found)) or "held"


async def _attacked(
    attack: Attack, kind: Isolation, channel: Channel, home: Path, folder: Path, nap: str
) -> list[str]:
    try:
        pid = await _victim(kind, channel, home, folder, nap)
    except FleetError as err:
        raise NotBegun from err
    jobs = home / "jobs"
    before = _contents(home)
    attacker = AttemptId("attack.0")
    env = {"M": str(home), "V": str(jobs / "victim.0"), "PID": pid, "NAP": nap}
    await channel.start(Job(attacker, ENGINE.command(kind, attack.script, env), LIMIT_S, "b", isolation=kind))
    ended = await channel.ended(attacker)
    found: list[str] = []
    if _contents(home) != before:
        found.append("touched")
    own = b"".join(path.read_bytes() for path in _below(jobs / "attack.0") if _is_plain(path))
    if SECRET.encode() in own:
        found.append("shown")
    if _alive(nap):
        found.append("left")
    if not Path(f"/proc/{pid}").exists() or " (stopped)" in Path(f"/proc/{pid}/status").read_text():
        found.append("harmed")
    if ended.exit_code == 99:
        found = ["not_run"]  # it saw that it was not bounded
    (jobs / "victim.0/out/go").touch()
    return found


async def _victim(kind: Isolation, channel: Channel, home: Path, folder: Path, nap: str) -> str:
    """The pid of a neighbour that runs and has a secret."""
    (folder / "grade.py").write_text("print(0)\n")
    steps = (image_step(ENGINE.settings(), [IMAGE]),) if kind == "container" else ()
    await channel.prepare(Bundle("b", {"grade.py": str(folder / "grade.py")}, steps))
    script = (
        'echo $$ > "$EVALFLEET_OUT/pid"; echo "$KEY" > "$EVALFLEET_OUT/secret"; echo "$KEY" > secret; '
        'echo "$KEY" > /tmp/secret; echo {} > "$EVALFLEET_OUT/result.json"; echo $KEY; '
        'until [ -e "$EVALFLEET_OUT/go" ]; do sleep 0.05; done'
    ).replace("/tmp/secret", '"$EVALFLEET_OUT/tmp"' if kind == "none" else "/tmp/secret")
    victim = AttemptId("victim.0")
    command = ENGINE.command(kind, script, {"KEY": SECRET, "VICTIM": nap})
    await channel.start(Job(victim, command, 120.0, "b", isolation=kind))
    jobs = home / "jobs"
    while SECRET.encode() not in (read_file(str(jobs / "victim.0/log")) or b""):  # what it writes last
        await asyncio.sleep(0.01)
    pid = (jobs / "victim.0/out/pid").read_text().strip()
    if kind == "container":
        pid = _pid_in_container(f"VICTIM={nap}")
    return pid


def _pid_in_container(variable: str) -> str:
    """Of the first process there that has a variable, as this computer counts."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            inside = os.readlink(path / "ns/pid") != os.readlink("/proc/self/ns/pid")
            if inside and variable.encode() in (path / "environ").read_bytes().split(b"\0"):
                return path.name
    raise RuntimeError("the victim's container has no process")


def _is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and path.name != "job.json"


def _contents(home: Path) -> dict[str, Any]:
    """What every file is that is neither the attacker's nor changes by itself."""
    found: dict[str, Any] = {}
    for path in _below(home):
        name = str(path.relative_to(home))
        if name.startswith(CHANGING):
            continue
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def _below(top: Path) -> list[Path]:
    """All files and links; folders may go meanwhile."""
    return sorted(
        Path(folder, name) for folder, folders, files in os.walk(top) for name in (*folders, *files)
    )


def _alive(nap: str) -> bool:
    """Does a process live that sleeps so long, also under another name?"""
    wanted = nap.encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes().rstrip(b"\0").split(b"\0")[-1] == wanted:
                return True
    return False


# -- tasks that want another try -----------------------------------------------------------------------

REROLLS = {
    "kill the wrapper": "kill -9 $PPID",
    "kill its whole group": "kill -9 0",
    "say that set-up broke": 'echo \'{"broken": "setup"}\' > $EVALFLEET_OUT/result.json',
    "say that its machine is lost": 'echo \'{"broken": "machine_lost"}\' > $EVALFLEET_OUT/result.json',
    "say that it was evicted": "echo evicted > $EVALFLEET_OUT/../why; kill -9 $PPID",
    "exit as a wrapper that failed": "rm -f $EVALFLEET_OUT/../exit; exit 125",
    "remove what records it": "rm -f $EVALFLEET_OUT/../pid $EVALFLEET_OUT/../job.json; exit 3",
    "remove its folder": 'rm -rf "$EVALFLEET_OUT/.."; exit 3',
    "a result that cannot be read": "mkfifo $EVALFLEET_OUT/result.json",
    "a result without end": "head -c 3000000 /dev/zero > $EVALFLEET_OUT/result.json",
}
"""With `none` the wrapper is the attempt's own user's; none of them does harm to others."""


def _rerolled(kind: Isolation) -> dict[str, str]:
    names = {f"want another try: {what}": f"t{n}" for n, what in enumerate(REROLLS)}
    with tempfile.TemporaryDirectory(prefix="evalfleet-hostile-", ignore_cleanup_errors=True) as top:
        tasks = [{"id": f"t{n}", "params": {"do": do}} for n, do in enumerate(REROLLS.values())]
        Path(top, "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
        Path(top, "b.toml").write_text(
            'name = "b"\ntasks = "tasks.jsonl"\ncommand = ["sh", "-c", "{params.do}"]\ntimeout_s = 30\n'
            + (_keys_of_containers() if kind == "container" else "")
        )
        words = ["run", "./b.toml", "--on", "local", "--attempts", "1", "--name", "r", "--canary", "0"]
        words += ["--set", f"isolation={kind}"]
        environ = {key: value for key, value in os.environ.items() if not key.startswith("EVALFLEET_")}
        environ["EVALFLEET_HOME"] = f"{top}/home"
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [sys.executable, "-m", "evalfleet", *words],
                cwd=top,
                env=environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=DEADLINE_S * 3,
                check=False,
            )
        try:
            told = json.loads(Path(top, "home/r/results.json").read_text())["tasks"]
        except (OSError, ValueError):
            return dict.fromkeys(names, "stuck")
    attempts = {entry["task_id"]: (entry["attempts"], entry["status"]) for entry in told}
    return {name: _tries(*attempts[task]) for name, task in names.items()}


def _keys_of_containers() -> str:
    settings = {"engine": "podman", "network": "none", "args": list(ENGINE.args)}
    words = ", ".join(f"{key} = {json.dumps(value)}" for key, value in settings.items())
    return f"image = {json.dumps(IMAGE)}\ncontainer = {{{words}}}\n"


def _tries(count: int, status: str) -> str:
    if count > 1:
        return "rerolled"
    return "held" if status in ("scored", "broken", "passed", "failed", "success") else f"stuck, {status}"
