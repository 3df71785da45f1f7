"""Verbs and flags that no longer exist, with the command that replaces each."""

from __future__ import annotations

from collections.abc import Sequence

_DRAIN = "use `evalfleet drain RUN MACHINE`; the machine finishes, and another one takes its place"
_IGNORED = "leave it out, because HAL ignores it"
VERBS: dict[str, str] = {
    "du": "use `evalfleet ls --size`",
    "rm": "use `evalfleet gc RUN`",
    "pause": "use `evalfleet set RUN --workers 0`",
    "unpause": "use `evalfleet set RUN --workers N`",
    "replace": _DRAIN,
    "restart": _DRAIN,
    "sim": "in a checkout, use `python -m sim` (docs/simulator.md)",
    "rerun": "use `evalfleet run --from RUN`, with --task and --only as before",
    "grade": "use `evalfleet resume RUN --only ungraded`, or --regrade to grade again",
    "verify": "use `evalfleet ls --verify`",
    "schema": "use `evalfleet report --schema DOCUMENT`",
    "images": "use `evalfleet machines --images` and --delete-image",
    "completion": 'write `eval "$(register-python-argcomplete evalfleet)"` into your shell\'s start file',
}
POOL_VERBS: dict[str, str] = {
    "resize": "use `evalfleet pool set POOL --workers N`",
    "extend": "use `evalfleet pool set POOL --expires 14d`",
    "reset": "use `evalfleet pool do POOL reset MACHINE`",
    "clean": "use `evalfleet pool do POOL clean`",
    "screenshot": "use `evalfleet pool vnc POOL --save FOLDER`",
}
FLAGS: dict[tuple[str, str], str] = {
    ("reap", "--install"): "call `evalfleet reap` from your own crontab or workflow; see docs/unattended.md",
    ("reap", "--uninstall"): "use `crontab -e` to remove the line that calls `evalfleet reap`",
    ("plan", "--review"): "use `evalfleet show RUN` for the duration and the cost of a run",
    ("hal-eval", "-B"): _IGNORED,
    ("hal-eval", "-I"): _IGNORED,
    ("hal-eval", "--config"): _IGNORED,
    ("hal-eval", "--upload"): "use HAL's own `hal-upload` on the results that a run writes",
    ("hal-eval", "--no-download-environment"): "leave it out; files that were only sent are never downloaded",
    ("hal-eval", "--conda_env_name"): "use `--set agent_python=PATH` with that environment's Python",
    ("hal-eval", "--vm"): "use --on PLACE; `evalfleet places` lists places",
    ("hal-eval", "--ignore_errors"): "use `evalfleet resume RUN --only ungraded`",
    ("hal-eval", "--agent_version"): "use `--set agent_version=TEXT`",
    ("run", "--workflow"): "copy the workflow in docs/unattended.md",
}


def replacement(verb: str, words: Sequence[str]) -> str | None:
    """Return the line that names the replacement, or None if nothing in the command was removed."""
    if verb in VERBS:
        return f"`evalfleet {verb}` was removed; {VERBS[verb]}"
    if verb == "pool" and words and words[0] in POOL_VERBS:
        return f"`evalfleet pool {words[0]}` was removed; {POOL_VERBS[words[0]]}"
    for word in words:
        if word == "--":
            return None
        flag = word.partition("=")[0]
        if (verb, flag) in FLAGS:
            return f"`evalfleet {verb} {flag}` was removed; {FLAGS[verb, flag]}"
    return None
