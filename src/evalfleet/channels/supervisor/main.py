"""The program: a supervisor for a directory, or a verb asked over SSH."""

from __future__ import annotations

import sys


def main(argv: list[str]) -> int:
    if "/" not in argv[1]:
        from .verbs import verb  # a supervisor needs none of it

        return verb(argv[1])
    from .starting import start

    problem = start(argv[1])
    if problem:
        sys.stderr.write(problem + "\n")
    return 1 if problem else 0
