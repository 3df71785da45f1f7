"""Check that the journal is as it was written: every event of one run, or of all runs and pools.

Exit code 0: all is well. 1: something was changed, removed or swapped; the line says which event.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="?", help="this run or pool; default: all of this home")
    parser.add_argument("--json", action="store_true", help="one JSON document")


def main(args: argparse.Namespace) -> int:
    import json
    import sys

    from evalfleet.api import runs

    checked = runs.verify(args.run)
    damaged = [each for each in checked if each["problem"]]
    if args.json:
        print(json.dumps(checked))
    else:
        for each in checked:
            print(f"{each['name']}: {_words(each)}")
        for each in damaged:
            print(f"evalfleet: {each['problem']}", file=sys.stderr)
    return 1 if damaged else 0


def _words(checked: dict[str, object]) -> str:
    if checked["problem"]:
        return "DAMAGED"
    text = f"{checked['events']:,} events are as they were written"
    if checked["not_covered"]:
        text += f"; of these, {checked['not_covered']:,} are not covered: they are older than the checksums"
    return text
