"""What can be asked of a machine that was set up for WAA, by those who know nothing of its settings."""

from __future__ import annotations

from evalfleet.benchmarks.appliance import Appliance, HostVerb, Screen

from .host.config import CONTAINER, POINTER, PORTS

NO_WINDOWS = 3


def _command(verb: str) -> tuple[str, ...]:
    """A verb of the program that set-up left there; exit code `NO_WINDOWS` where it left none."""
    enter = f'cd "$(cat {POINTER})/program"'
    program = f"{{ {enter}; }} 2>/dev/null || exit {NO_WINDOWS}; exec python3 -S -m waa.host {verb}"
    return ("sh", "-c", program)


WAA_APPLIANCE = Appliance(
    what="Windows",
    absent=NO_WINDOWS,
    verbs={
        "reset": HostVerb(
            does="bring Windows back to its golden state; what is in it now is lost",
            command=_command("reset"),
            limit_s=2 * 3600.0,
            says={0: "{machine}: Windows is as it was installed, and answers"},
        ),
        "clean": HostVerb(
            does="undo what setting up WAA left: its container, image and Windows, some 60 GB. Docker stays, "
            "and golden storage that was there before",
            command=_command("clean"),
            limit_s=3600.0,
            says={0: "{machine} is clean", NO_WINDOWS: "{machine} had nothing of WAA on it"},
            asks="delete Windows and all else of WAA",
            undoes=True,
        ),
    },
    probe=_command("answers"),
    rest=_command("rest"),
    screen=Screen(PORTS["vnc"], PORTS["guest"], "/screenshot", _command("screenshot")),
    tunnel=(PORTS["guest"] + 1, PORTS["guest"]),
    registry={"docker_container": CONTAINER},
    ready_key="waa_ready",
)
