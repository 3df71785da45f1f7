"""openadapt-evals on lab hosts: its own pool, SSH and `docker exec`, in an environment of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from evalfleet.lab import NamespaceHost
from evalfleet.lab.system import LabError
from standins.waa.standin import ENGINE_ROOT, IMAGE
from tests.waa.arena import Arena

from .environments import PACKAGES, NoEnvironment, python_of
from .result import Figures
from .ssh_peers import CAGE
from .waa_arena import arena_of
from .waa_durations import Named
from .workspace import Workspace, environment, wait_until

NAME = "openadapt"
SCRIPT = Path(__file__).with_name("waa_openadapt.py")
LIMIT_S = 300.0
READY_S = 60.0
UP = f"""\
docker pull -q {IMAGE}
mkdir -p /waa-storage && cp -r {{golden}}/. /waa-storage/
docker run -d --name winarena --cap-add NET_ADMIN -e KVM=N -p 5000:5000 -v /waa-storage:/storage {IMAGE} \
-c './entry.sh --prepare-image false --start-client false'"""
# Where the kernel lets the stand-in show no /proc but its host's, pgrep would tell the host's numbers.
PGREP = """\
#!/bin/sh
for each in $(/usr/bin/pgrep "$@"); do
  awk '/^NSpid:/ && NF > 2 { print $NF }' /proc/$each/status 2>/dev/null
done | grep . || exec /usr/bin/pgrep "$@"
"""
# what a client has left so far: when it began, and a line a result
SEEN = (
    f"find {ENGINE_ROOT} -path '*/client/results' -printf 'began %T@\\n' "
    f"-o -path '*/client/results/*/result.txt' -printf 'ended %T@\\n'"
)


@dataclass(frozen=True)
class Seen:
    """Of one host: seconds since the epoch."""

    began: float | None
    ended: tuple[float, ...]


def measured(peer: Callable[[], Figures]) -> Figures:
    """Its figures, or why there are none."""
    try:
        return {"version": PACKAGES[NAME], **peer()}
    except (NoEnvironment, RuntimeError, TimeoutError, OSError, LabError, subprocess.SubprocessError) as err:
        lines = str(err).strip().splitlines()
        return {"error": lines[-1] if lines else type(err).__name__}


def makespan_of_openadapt(named: Sequence[Named], seconds: Sequence[float], machines: int) -> float:
    """From the start of the first client to the last result."""
    with arena_of(named, seconds, machines) as arena, openadapt(arena, len(named)) as (space, process):
        space.finish(process, LIMIT_S)
        seen = [look(host) for host in arena.lab.hosts]
    results = [at for each in seen for at in each.ended]
    if len(results) != len(named):
        raise RuntimeError(f"{len(results)} results instead of {len(named)}")
    return max(results) - min(each.began for each in seen if each.began is not None)


@contextmanager
def openadapt(arena: Arena, tasks: int) -> Iterator[tuple[Workspace, subprocess.Popen[bytes]]]:
    """It runs, on hosts whose Windows answers. Whatever it has started is gone afterwards."""
    python = python_of(NAME)
    _executable(arena.checkout.parent / "opt/stand-in/bin/pgrep", PGREP)
    for host in arena.lab.hosts:
        script = UP.format(golden=arena.golden)
        subprocess.run(
            arena.lab.client.ssh(host, script, user="root"), check=True, capture_output=True, timeout=120
        )
    wait_until(lambda: all(map(_answers, arena.lab.hosts)), READY_S, 0.2)
    with Workspace() as space:
        registry = space.folder / "registry.json"
        registry.write_text(json.dumps(_registry(arena)))
        (space.folder / "bin").mkdir()
        key = f"-i {arena.lab.client.key_path} -o IdentitiesOnly=yes"  # it relies on the user's own
        _executable(space.folder / "bin/ssh", f'#!/bin/sh\nexec {shutil.which("ssh")} -F none {key} "$@"\n')
        words = (str(python), "-P", str(SCRIPT), str(registry), str(tasks))
        # the lab's network has no way out: what a tool would send home stays here
        yield space, _start(space, (*arena.lab.prefix, *CAGE, *words))


def look(host: NamespaceHost) -> Seen:
    lines = [line.split() for line in host.run(["sh", "-c", SEEN]).stdout.splitlines()]
    began = [float(at) for what, at in lines if what == "began"]
    return Seen(min(began, default=None), tuple(float(at) for what, at in lines if what == "ended"))


def _answers(host: NamespaceHost) -> bool:
    asked = ["curl", "-s", "-m", "2", "-o", "/dev/null", "-w", "%{http_code}", "localhost:5000/probe"]
    return host.run(asked, check=False).stdout == "200"


def _registry(arena: Arena) -> Figures:
    """Its own file, as `pool-create` and `pool-wait` leave it."""
    workers = [
        {"name": f"waa-pool-{n:02d}", "ip": host.address, "status": "ready", "waa_ready": True}
        for n, host in enumerate(arena.lab.hosts)
    ]
    words = dict.fromkeys(("created_at", "resource_group", "location", "vm_size"), "lab")
    return {"pool_id": "bench", **words, "workers": workers}


def _executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def _start(space: Workspace, argv: Sequence[str]) -> subprocess.Popen[bytes]:
    path = f"{space.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    with open(space.folder / "output", "ab") as output:
        process = subprocess.Popen(
            argv,
            cwd=space.folder,
            env=environment(HOME=str(space.folder), PATH=path, PYTHONPATH=""),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return space.adopt(process)
