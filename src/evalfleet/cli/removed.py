"""Verbs and flags that no longer exist, with the command that replaces each."""

from __future__ import annotations

from collections.abc import Sequence

_DRAIN = "`evalfleet drain RUN MACHINE` gives the machine up, and another one takes its place"
VERBS: dict[str, str] = {
    "du": "use `evalfleet ls --size`",
    "rm": "use `evalfleet gc RUN`",
    "pause": "use `evalfleet set RUN --workers 0`",
    "unpause": "use `evalfleet set RUN --workers N`",
    "replace": _DRAIN,
    "restart": _DRAIN,
}
FLAGS: dict[tuple[str, str], str] = {
    ("reap", "--install"): "call `evalfleet reap` from your own crontab or workflow; see docs/unattended.md",
    ("reap", "--uninstall"): "remove the line that calls `evalfleet reap` with `crontab -e`",
    ("plan", "--review"): "`evalfleet show RUN` prints what a run took and cost",
    ("run", "--workflow"): "copy the workflow in docs/unattended.md",
}


def replacement(verb: str, words: Sequence[str]) -> str | None:
    """Return the line that names the replacement, or None if nothing in the command was removed."""
    if verb in VERBS:
        return f"`evalfleet {verb}` was removed; {VERBS[verb]}"
    for word in words:
        if word == "--":
            return None
        flag = word.partition("=")[0]
        if (verb, flag) in FLAGS:
            return f"`evalfleet {verb} {flag}` was removed; {FLAGS[verb, flag]}"
    return None
