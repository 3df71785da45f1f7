"""From `run` to the refusal: twelve hosts, one of them dead and eleven with keys that nobody confirmed."""

from __future__ import annotations

import time

from evalfleet.views.summary import REFUSED

from .hosts import PLACE, cannot, lab_of, write_place
from .result import Aim, Figures, Result, at_least, below, rounded
from .workspace import EVALFLEET, Workspace

HOSTS, QUICK_HOSTS = 12, 3
AIM_S, AIM_LINES = 15.0, 20
LIMIT_S = 120.0
COUNTED = (
    "from the start of the command to its end, and all lines that it prints; without --workers, all hosts "
    "are asked for; everything else is as users have it"
)


def run(quick: bool) -> Result:
    if (error := cannot("first-contact")) is not None:
        return Result("first-contact", dict(error), {})
    hosts = QUICK_HOSTS if quick else HOSTS
    with lab_of(hosts) as lab, Workspace() as space:
        lab.hosts[-1].power_off()
        lab.client.known_hosts_path.write_text("")
        write_place(space.folder, lab)
        benchmark = space.benchmark(["true"], [{"id": f"t_{n}"} for n in range(hosts)])
        began = time.monotonic()
        process = space.start(*lab.prefix, *EVALFLEET, "run", str(benchmark), "--on", PLACE)
        code = process.wait(LIMIT_S)
        seconds = time.monotonic() - began
        said = space.output()
    figures: Figures = {"hosts": hosts, "exit_code": code, "longest_line": max(map(len, said.splitlines()))}
    aims: dict[str, Aim] = {
        "seconds": below(rounded(seconds), AIM_S),
        "lines": below(len(said.splitlines()), AIM_LINES),
        "refused": at_least(int(code == REFUSED), 1),
        "says_what_to_do": at_least(int(f"evalfleet doctor {PLACE} --trust" in said), 1),
    }
    return Result("first-contact", {**figures, "counted": COUNTED}, aims)
