"""Open a shell on a machine of a pool, or run a command there. Its exit code is the command's."""

from __future__ import annotations

import argparse
import os

from .arguments import add_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    parser.add_argument("machine", metavar="MACHINE", nargs="?", help="its name or id; needless for one")
    parser.add_argument("command", metavar="COMMAND", nargs=argparse.REMAINDER, help="after --")


def main(args: argparse.Namespace) -> int:
    from evalfleet import keeping
    from evalfleet.errors import RequestError

    pool = keeping.open_pool(args.name)
    names = [machine.name for machine in pool.view().machines]
    machine, command = args.machine, args.command
    if machine is None and len(names) != 1:
        raise RequestError(f"say which machine of pool {pool.name!r}: {', '.join(names) or 'it has none'}")
    argv = pool.shell(machine or names[0], command[1:] if command[:1] == ["--"] else command)
    os.execvp(argv[0], list(argv))
