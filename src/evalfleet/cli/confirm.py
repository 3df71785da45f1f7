"""Asking before something is deleted."""

from __future__ import annotations

import sys


def agreed(what: str) -> bool:
    """Only `yes` is yes. Where nobody can answer, nothing is deleted."""
    if not sys.stdin.isatty():
        print(f"evalfleet: this would {what}: say --yes", file=sys.stderr)
        return False
    try:
        said = input(f"This will {what}. Type yes to go on: ").strip() == "yes"
    except EOFError:
        said = False
    if not said:
        print("evalfleet: nothing was deleted", file=sys.stderr)
    return said
