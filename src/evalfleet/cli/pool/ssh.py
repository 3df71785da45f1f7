"""Open a shell on a machine of a pool, or run a command there. Its exit code is the command's."""

from __future__ import annotations

import argparse
import os


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # in one, and by hand: argparse would drop the `--` that tells a command from a machine
    parser.usage = "evalfleet pool ssh [-h] NAME [MACHINE] [[--] COMMAND ...]"
    parser.add_argument(
        "words",
        metavar="NAME [MACHINE] [[--] COMMAND ...]",
        nargs=argparse.REMAINDER,
        help="the pool; a machine's name or id, needless for a pool of one; what to run there",
    )


def main(args: argparse.Namespace) -> int:
    from evalfleet.api import pools
    from evalfleet.errors import RequestError

    if not args.words:
        raise RequestError("say which pool; `evalfleet pool ls` shows all")
    pool = pools.open_pool(args.words[0])
    names = [machine.name for machine in pool.view().machines]
    machine, command = _split(args.words[1:])
    if machine is None and len(names) != 1:
        raise RequestError(f"say which machine of pool {pool.name!r}: {', '.join(names) or 'it has none'}")
    argv = pool.shell(machine or names[0], command)
    os.execvp(argv[0], list(argv))


def _split(words: list[str]) -> tuple[str | None, list[str]]:
    """The machine, if one is named, and the command."""
    machine = words[0] if words and words[0] != "--" else None
    command = words if machine is None else words[1:]
    return machine, command[1:] if command[:1] == ["--"] else command
