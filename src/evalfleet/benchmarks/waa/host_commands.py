"""What can be asked of a machine that was set up, by those who know nothing of its settings."""

from __future__ import annotations

from .host.config import POINTER, PORTS

GUEST_TUNNEL = (PORTS["guest"] + 1, PORTS["guest"])
VNC_TUNNEL = (PORTS["vnc"], PORTS["vnc"])
"""The first port to try on the user's computer, and the machine's."""
NO_WINDOWS = 3
RESET_S = 2 * 3600.0
CLEAN_S = 3600.0


def verb(name: str) -> tuple[str, ...]:
    """Runs a verb of the program that set-up left there; exit code `NO_WINDOWS` where it left none."""
    enter = f'cd "$(cat {POINTER})/program"'
    return (
        "sh",
        "-c",
        f"{{ {enter}; }} 2>/dev/null || exit {NO_WINDOWS}; exec python3 -S -m waa.host {name}",
    )
