"""Look at a place before money is spent: each check with what to do about it. Nothing is made.

Without a PLACE, all places of evalfleet.toml are looked at. Exit code 4 if machines cannot be had somewhere.
"""

from __future__ import annotations

import argparse

MARKS = {"good": "ok  ", "warn": "warn", "bad": "BAD "}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "places", metavar="PLACE", nargs="*", help="a place of evalfleet.toml, or an installed one"
    )
    parser.add_argument(
        "--cpus", type=int, default=1, metavar="N", help="what a machine must have (default: 1)"
    )
    parser.add_argument("--memory-gb", type=float, default=0.0, metavar="GB", help="likewise")
    parser.add_argument("--disk-gb", type=float, default=0.0, metavar="GB", help="likewise")
    parser.add_argument(
        "--nested", action="store_true", help="it must be able to run virtual machines itself"
    )
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", dest="settings", help="a setting")
    parser.add_argument("--json", action="store_true", help="one JSON document")


def main(args: argparse.Namespace) -> int:
    import json

    import msgspec

    from evalfleet.api import places
    from evalfleet.model import Needs
    from evalfleet.planning.values import parse_pairs

    needs = Needs(args.cpus, args.memory_gb, args.disk_gb, args.nested)
    found = places.examine(args.places, needs, parse_pairs(args.settings or (), "--set"))
    if args.json:
        print(json.dumps(msgspec.to_builtins(found)))
    for place, checks in () if args.json else found.items():
        print(place)
        for check in checks:
            print(f"  {MARKS[check.verdict]}  {check.name}: {check.found}")
            if check.remedy:
                print(f"        -> {check.remedy}")
    return 4 if any(check.verdict == "bad" for checks in found.values() for check in checks) else 0
