"""What hostile attempts can do to a machine, on each isolation: real processes, and what came of each attack.

A victim runs beside each attack, with a secret of its own. Before and after, everything in the machine's
folder that is not the attacker's own is compared; what the attacker printed and left is searched for the
victim's secret, and its processes are looked for. Attacks are bounded before they start: one that could do
harm outside the machine's folder runs only after it has seen that it is an unprivileged user, and a fork bomb
only in a group whose limit it has read back. So some are not run where attempts are not isolated.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from evalfleet.errors import FleetError
from evalfleet.model import AttemptId, Bundle, Command, Isolation, Job, MachineId, Needs
from evalfleet.places.local import LocalPlace, LocalSettings
from evalfleet.ports import Channel, Fence

from .result import Figures, Result, at_least, at_most

SECRET = "sk-victim-4f1d9c"
KINDS: tuple[Isolation, ...] = ("none", "user")
GUARD = "[ $(id -u) -ge 20000 ] || exit 99; "
"""Before what would do harm as root."""
LIMIT_S = 20.0
CHANGING = ("jobs/attack.0", "trash", "beat.json", "supervisor.", "groups", "forgotten", "spares")
"""Of a machine's folder: the attacker's own, and what changes by itself."""


class Attack(NamedTuple):
    """`M` is the machine's folder, `V` the victim's job, `PID` its process. `alone`: if isolated only."""

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
SLEEP = "sleep 98765"
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
READ_BACK = (
    'l=$(cat $(find /sys/fs/cgroup -maxdepth 4 -path "*$(id -u)/pids.max" | head -1)); '
    '[ "$l" -le 4096 ] || exit 99'
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
    return found + [Attack(what, GUARD + script, alone=True) for what, script in ALONE.items()]


def run(quick: bool) -> Result:
    if os.geteuid() != 0:
        return Result("hostile", {"error": "needs root: attempts become users of their own"}, {})
    chosen = attacks()[::8] if quick else attacks()
    figures: Figures = {"attacks": len(chosen)}
    rows: dict[str, dict[str, str]] = {attack.name: {} for attack in chosen}
    for kind in KINDS:
        counts = {"touched": 0, "shown": 0, "left": 0, "harmed": 0, "not_run": 0}
        for attack in chosen:
            outcome = asyncio.run(_tried(attack, kind))
            rows[attack.name][kind] = outcome
            for word in outcome.split(", "):
                if word in counts:
                    counts[word] += 1
        figures |= {f"{kind}_{word}": count for word, count in counts.items()}
    figures["outcomes"] = rows
    aims = {
        f"user_{word}": at_most(figures[f"user_{word}"], 0) for word in ("touched", "shown", "left", "harmed")
    }
    if not quick:
        aims["attacks"] = at_least(len(chosen), 60)
    return Result("hostile", figures, aims)


async def _tried(attack: Attack, kind: Isolation) -> str:
    """`held`, or what it did: touched (others' files), shown (a secret), left (a process), harmed."""
    if attack.alone and kind != "user":
        return "not_run"
    with tempfile.TemporaryDirectory(prefix="evalfleet-hostile-") as folder:
        place = LocalPlace("local", LocalSettings(), Path(folder))
        (offer,) = await place.offers(Needs())
        machine_id = MachineId("hostile-000000-1")
        await place.create(machine_id, offer, 600.0)
        try:
            (machine,) = await place.list("hostile-000000")
            channel = place.channel(machine, Fence("hostile", 1))
            try:
                return await _attacked(attack, kind, channel, Path(machine.address), Path(folder))
            finally:
                with contextlib.suppress(FleetError):
                    await channel.close()
        finally:
            await place.delete(machine_id)


async def _attacked(attack: Attack, kind: Isolation, channel: Channel, home: Path, folder: Path) -> str:
    (folder / "grade.py").write_text("print(0)\n")
    await channel.prepare(Bundle("b", {"grade.py": str(folder / "grade.py")}))
    script = (
        'echo $$ > "$EVALFLEET_OUT/pid"; echo "$KEY" > "$EVALFLEET_OUT/secret"; echo "$KEY" > secret; '
        'echo "$KEY" > /tmp/secret; echo {} > "$EVALFLEET_OUT/result.json"; echo $KEY; '
        'until [ -e "$EVALFLEET_OUT/go" ]; do sleep 0.05; done'
    ).replace("/tmp/secret", "/tmp/secret" if kind == "user" else '"$EVALFLEET_OUT/tmp"')
    victim = AttemptId("victim.0")
    await channel.start(
        Job(victim, Command(("sh", "-c", script), {"KEY": SECRET}), 120.0, "b", isolation=kind)
    )
    jobs = home / "jobs"
    while not (jobs / "victim.0/out/result.json").exists():
        await asyncio.sleep(0.01)
    pid = (jobs / "victim.0/out/pid").read_text().strip()
    before = _contents(home)
    attacker = AttemptId("attack.0")
    env = {"M": str(home), "V": str(jobs / "victim.0"), "PID": pid}
    await channel.start(
        Job(attacker, Command(("sh", "-c", attack.script), env), LIMIT_S, "b", isolation=kind)
    )
    ended = await channel.ended(attacker)
    found: list[str] = []
    if _contents(home) != before:
        found.append("touched")
    own = b"".join(path.read_bytes() for path in _below(jobs / "attack.0") if _is_plain(path))
    if SECRET.encode() in own:
        found.append("shown")
    if _alive(SLEEP):
        found.append("left")
    if not Path(f"/proc/{pid}").exists() or " (stopped)" in Path(f"/proc/{pid}/status").read_text():
        found.append("harmed")
    if ended.exit_code == 99:
        raise RuntimeError(f"{attack.name}: it was not bounded, and not run")
    (jobs / "victim.0/out/go").touch()
    return ", ".join(found) or "held"


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


def _alive(words: str) -> bool:
    """Does a process with this command line live, also under another name?"""
    wanted = words.split()[1].encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes().rstrip(b"\0").split(b"\0")[-1] == wanted:
                return True
    return False
