"""What a job that only looks around tells of a cluster's nodes, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from evalfleet.channels.link import UNREADABLE, plain
from evalfleet.model import decodable
from evalfleet.ports import Check

from .commands import refusal
from .login import Spoken
from .settings import SlurmSettings
from .sight import CLOCKS_S

TRY_S = 30.0
"""So long doctor waits for a node."""
TRY_AGAIN = "try again later; a run would wait in the queue"
SHARE = "name a `folder` on a file system that the nodes share and that has links and locks"
PROBE = (
    "import json,os,platform,sys,time;"
    "print(json.dumps({'python':sys.version.split()[0],'old':sys.version_info<(3,8),'node':platform.node(),"
    "'at':time.time(),'sees':os.path.exists(sys.argv[1])}))"
)
"""The program of the job: one line, for any Python 3."""
NO_NODE = re.compile(r"unable to allocate resources.*(busy|not available|immediate)|immediate", re.IGNORECASE)
NO_PROGRAM = re.compile(r"no such file or directory|command not found|execve", re.IGNORECASE)
NO_STEPS = re.compile(
    r"denied|not permitted|forbidden|disabled|not allowed|unable to create step", re.IGNORECASE
)
BY_MAILBOX = 'if steps are forbidden there, set `reach = "mailbox"` of the place'


class NodeFacts(Struct, frozen=True):
    """What the probe prints."""

    python: str
    old: bool
    node: str
    at: float
    sees: bool
    why: str = ""
    """Why it does not see it."""


def with_hint(said: str) -> str:
    """What srun says, and the way around it if it may not be used."""
    return f"{said}; {BY_MAILBOX}" if NO_STEPS.search(said) else said


def probed(
    settings: SlurmSettings, spoken: Spoken, now: float, shared: str, remedy: str = SHARE
) -> Sequence[Check]:
    """What the job says. `now`: the login node's time when it was asked; `shared`: what nodes must see."""
    said = plain(" ".join(spoken.errors.decode("utf-8", "replace").split()), 300)
    line = spoken.out.strip().rpartition(b"\n")[2]
    if spoken.code or not line:
        return (_not_probed(settings, said or "srun says nothing"),)
    try:
        facts = msgspec.json.decode(line, type=decodable(NodeFacts))
    except UNREADABLE:
        return (Check("nodes", "bad", f"{settings.python} there says {line[:80]!r}", "set `python`"),)
    node, python = plain(facts.node, 80), plain(facts.python, 80)
    checks = [Check("steps", "good", f"srun reaches {node}")]
    if facts.old:
        newer = "evalfleet needs 3.8 or later there: set `python` of the place"
        checks.append(Check("python", "bad", f"{settings.python} of {node} is {python}", newer))
    else:
        checks.append(Check("python", "good", f"{settings.python} of {node} is {python}"))
    if facts.sees:
        checks.append(Check("shared", "good", f"{node} sees {shared}"))
    else:
        why = plain(facts.why, 200) or "it is not shared"
        checks.append(Check("shared", "bad", f"{node} does not see {shared}: {why}", remedy))
    apart_s = facts.at - now
    if not -CLOCKS_S <= apart_s <= 2 * TRY_S + CLOCKS_S:  # the job may have waited for a node
        found = f"the clock of {node} is {abs(apart_s):.0f} s {'ahead' if apart_s > 0 else 'behind'}"
        set_it = "times are counted by Slurm's own clock; ask the cluster's administrators to set it"
        checks.append(Check("clocks", "warn", found, set_it))
    return checks


def _not_probed(settings: SlurmSettings, said: str) -> Check:
    said = said.removeprefix("srun: ").removeprefix("error: ")
    if NO_NODE.search(said):
        return Check("nodes", "warn", f"no node was free within {TRY_S:.0f} s", TRY_AGAIN)
    if settings.python in said and NO_PROGRAM.search(said):
        remedy = "set `python` of the place to a Python 3.8 or later that nodes have"
        return Check("python", "bad", f"nodes have no {settings.python}: {said}", remedy)
    if NO_STEPS.search(said):
        if settings.reach == "mailbox" or settings.mailbox:
            return Check("steps", "good", "forbidden, and not needed: machines are reached by a mailbox")
        return Check("steps", "bad", said, BY_MAILBOX)
    return Check("nodes", "bad", str(refusal("srun", said)), "see what `srun hostname` says there")
