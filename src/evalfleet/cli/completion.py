"""Completion in shells: a script for each, which asks evalfleet what may follow the words so far."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from evalfleet.errors import RequestError

from . import DEVELOPER_VERBS, VERBS, parser_of
from .pool import VERBS as POOL_VERBS
from .pool import add_verb_arguments

if TYPE_CHECKING:
    from evalfleet.planning.workspace import Workspace

FILES = "/"
"""Says that a file may follow, which the shell knows best."""

BASH = """\
_evalfleet() {
    local IFS=$'\\n' found
    found=($(COMP_WORDBREAKS= evalfleet completion --words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
    if [ "${found[0]}" = / ]; then
        compopt -o filenames 2>/dev/null
        found=($(compgen -f -- "${COMP_WORDS[COMP_CWORD]}"))
    fi
    COMPREPLY=("${found[@]}")
}
complete -F _evalfleet evalfleet
"""
ZSH = """\
#compdef evalfleet
_evalfleet() {
    local -a found
    found=("${(@f)$(evalfleet completion --words "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ $found[1] == / ]]; then _files; else compadd -a found; fi
}
compdef _evalfleet evalfleet
"""
FISH = """\
function __evalfleet
    set -l words (commandline -opc) (commandline -ct)
    set -l found (evalfleet completion --words $words[2..] 2>/dev/null)
    if test "$found[1]" = /
        __fish_complete_path (commandline -ct)
    else
        printf '%s\\n' $found
    end
end
complete -c evalfleet -f -a '(__evalfleet)'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def completion_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", nargs="?", choices=tuple(SCRIPTS), help="bash, zsh or fish")
    parser.add_argument("--words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def completion(args: argparse.Namespace) -> int:
    """Print a script that completes commands, flags, runs, tasks, pools and places in your shell.

    bash: write eval "$(evalfleet completion bash)" into ~/.bashrc
    zsh:  write eval "$(evalfleet completion zsh)" into ~/.zshrc, after compinit
    fish: evalfleet completion fish >~/.config/fish/completions/evalfleet.fish
    """
    if args.words is not None:
        *before, current = args.words or [""]
        for word in _fitting(candidates(before, current), current):
            print(word)
        return 0
    if args.shell is None:
        raise RequestError("completion: for which shell? Write bash, zsh or fish")
    print(SCRIPTS[args.shell], end="")
    return 0


def _fitting(found: Iterable[str], current: str) -> list[str]:
    words = list(dict.fromkeys(found))
    return words if words == [FILES] else [word for word in words if word.startswith(current)]


def candidates(before: Sequence[str], current: str) -> Iterator[str]:
    """What may stand after these words. Nothing that is wrong here may be told: a shell would print it."""
    if not before:
        yield from VERBS
        return
    verb, *given = before
    if verb not in VERBS and verb not in DEVELOPER_VERBS:
        return
    if verb == "pool":
        if not given:
            yield from POOL_VERBS
            return
        if given[0] not in POOL_VERBS:
            return
        parser = argparse.ArgumentParser()
        add_verb_arguments(parser, given.pop(0))
    else:
        parser = parser_of(verb)
    actions: list[argparse.Action] = parser._actions  # pyright: ignore[reportPrivateUsage]
    flags = {name: action for action in actions for name in action.option_strings}
    last = flags.get(given[-1]) if given else None
    if last is not None and last.nargs != 0:
        yield from _values(last, [])
    elif current.startswith("-"):
        yield from flags
    else:
        yield from _positional([action for action in actions if not action.option_strings], flags, given)


def _positional(
    wanted: Sequence[argparse.Action], flags: dict[str, argparse.Action], given: Sequence[str]
) -> Iterator[str]:
    plain: list[str] = []
    value = False
    for word in given:
        if value or word.startswith("-"):
            value = not value and word in flags and flags[word].nargs != 0
        else:
            plain.append(word)
    if not wanted:
        return
    action = wanted[min(len(plain), len(wanted) - 1)]
    if len(plain) < len(wanted) or action.nargs in ("*", "+"):
        yield from _values(action, plain)


def _values(action: argparse.Action, before: Sequence[str]) -> Iterator[str]:
    """What completes a value, by the action's choices, its name or its metavar."""
    if action.choices is not None:
        yield from map(str, action.choices)
        return
    from evalfleet.planning.workspace import Workspace  # commands and flags are completed without it

    workspace = Workspace.here()
    if action.dest == "pool" or (action.metavar == "NAME" and not action.option_strings):
        yield from _streams(workspace, "pool")
    elif action.dest in ("on", "place"):
        from evalfleet.planning.plugins import known

        yield from sorted({*workspace.config.places, *known("place")})
    elif action.metavar == "RUN" and action.dest != "name":
        yield from ("latest", *_streams(workspace, "run"))
    elif action.metavar == "TASK":
        from evalfleet.api.runs import open_run  # it costs more than all else here

        yield from open_run(workspace, before[0] if before else "latest").state().tasks
    elif action.metavar in ("BENCHMARK", "FILE", "PATH", "FOLDER", "DATASET", "RESULTS_DIR"):
        yield FILES


def _streams(workspace: Workspace, kind: str) -> list[str]:
    store = workspace.records_if_any()
    return [] if store is None else [info.name for info in store.streams() if info.kind == kind]
