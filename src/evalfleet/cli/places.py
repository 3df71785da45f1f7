"""What can be run, and where: places, benchmarks, doctor, prices."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from .pool import add_settings

if TYPE_CHECKING:
    from evalfleet.api.places import Listed
    from evalfleet.planning.plugins import PlugIn
    from evalfleet.planning.workspace import Workspace
    from evalfleet.ports import Check, HostKey, Price


def places_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def places(args: argparse.Namespace) -> int:
    """List the places that are installed, with their settings."""
    from evalfleet.planning import plugins

    return _print_plugins(plugins.places(), as_json=args.json)


def benchmarks_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def benchmarks(args: argparse.Namespace) -> int:
    """List the benchmarks that are installed, with their settings."""
    from evalfleet.planning import plugins

    return _print_plugins(plugins.benchmarks(), as_json=args.json)


def _print_plugins(plugins: Sequence[PlugIn], *, as_json: bool) -> int:
    if as_json:
        print(json.dumps(msgspec.to_builtins(plugins)))
        return 0
    for plugin in plugins:
        print(f"{plugin.name}  {plugin.problem or plugin.summary}")
        width = max((len(setting.name) for setting in plugin.settings), default=0)
        for setting in plugin.settings:
            default = "required" if setting.default is None else f"default {setting.default}"
            told = "; ".join(filter(None, (f"{_words(setting.type)}, {default}", setting.doc)))
            print(f"    {setting.name:<{width}}  {told}")
    return 0


WORDS = {
    "str": "text",
    "int": "whole number",
    "float": "number",
    "bool": "true or false",
    "tuple[str, ...]": "list",
    "str | None": "text",
    "int | None": "whole number",
}


def _words(type_: str) -> str:
    """A Python type as people who write `--set` know it."""
    type_ = re.sub(r"^Optional\[(.*)\]$", r"\1", type_)
    type_ = re.sub(r"^Annotated\[(\w+), .*\]$", r"\1", type_)
    if type_.startswith("Literal["):
        return "one of " + type_.removeprefix("Literal[").rstrip("]").replace("'", "").replace(", ", "|")
    return "table" if type_.startswith("Mapping[") else WORDS.get(type_, type_)


MARKS = {"good": "ok  ", "warn": "warn", "bad": "BAD "}


def doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "places", metavar="PLACE", nargs="*", help="a place of evalfleet.toml, or an installed one"
    )
    parser.add_argument(
        "--cpus", type=int, default=1, metavar="N", help="how many CPUs a machine must have (default: 1)"
    )
    parser.add_argument("--memory-gb", type=float, default=0.0, metavar="GB", help="memory that it must have")
    parser.add_argument("--disk-gb", type=float, default=0.0, metavar="GB", help="disk that it must have")
    parser.add_argument(
        "--nested", action="store_true", help="it must be able to run virtual machines itself"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="how many machines are wanted at once (default: 1)",
    )
    parser.add_argument(
        "--gpus", type=int, default=0, metavar="N", help="how many GPUs a machine must have (default: 0)"
    )
    add_settings(parser)
    parser.add_argument(
        "--trust",
        action="store_true",
        help="first show the keys of hosts that are unknown, ask, and write them to the place's known hosts",
    )
    parser.add_argument("--yes", action="store_true", help="do not ask: all keys that hosts show are right")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


async def doctor(args: argparse.Namespace) -> int:
    """Check a place before money is spent, and say what to do about each finding. Nothing is created.

    Without a PLACE, all places of evalfleet.toml are checked. Each host of a place that lists hosts is
    reached, all at once; on a cluster, a job of a few seconds looks around. A default `store` gets one empty
    object, which is removed. The exit code is 4 if a place has no machines
    available, or a host or the store has a fault.
    """
    import json

    import msgspec

    from evalfleet.api import places
    from evalfleet.model import Needs
    from evalfleet.planning.values import parse_pairs
    from evalfleet.planning.workspace import Workspace

    needs = Needs(args.cpus, args.memory_gb, args.disk_gb, args.nested, args.gpus)
    settings = parse_pairs(args.settings or (), "--set")
    workspace = Workspace.here()
    if args.trust and not await _trust(workspace, args, settings):
        return 4
    found = await places.examine(workspace, args.places, needs, settings, args.workers)
    if args.json:
        print(json.dumps(msgspec.to_builtins(found)))
    for place, checks in () if args.json else found.items():
        print(place)
        hosts = [check for check in checks if check.facts]
        if hosts:
            print(_hosts(hosts))
        for check in checks:
            if not check.facts:
                print(f"  {MARKS[check.verdict]}  {check.name}: {check.found}")
                if check.remedy:
                    print(f"        -> {check.remedy}")
    return 4 if any(check.verdict == "bad" for checks in found.values() for check in checks) else 0


def _hosts(checks: Sequence[Check]) -> str:
    """Hosts as a table, and below it what is wrong with some of them, once for all that have it."""
    from evalfleet.views.format import plural, table

    columns = [name for name in checks[0].facts if name != "fingerprint"]
    rows = [(MARKS[check.verdict].strip(), *(check.facts[name] for name in columns)) for check in checks]
    lines = ["  " + line for line in table(("", *columns), rows).splitlines()]
    alike: dict[tuple[str, str], list[str]] = {}
    for check in checks:
        if check.verdict != "good":
            alike.setdefault((check.found, check.remedy), []).append(check.name)
    for (found, remedy), hosts in alike.items():
        who = hosts[0] if len(hosts) == 1 else plural(len(hosts), "host")
        lines.append(f"  {who}: {found}")
        lines += [f"        -> {remedy}"] if remedy else []
    return "\n".join(lines)


async def _trust(workspace: Workspace, args: argparse.Namespace, settings: Mapping[str, str]) -> bool:
    """Make the keys of unknown hosts known, place by place. False: somebody said no."""
    from evalfleet.api import places
    from evalfleet.errors import RequestError
    from evalfleet.views.format import plural, table

    from .terminal import confirmed

    if not args.places:
        raise RequestError("--trust is for hosts that you know: name the PLACE")
    if args.json and not args.yes:
        raise RequestError("--trust asks; with --json say --yes, too, if all keys that hosts show are right")

    def agreed(keys: Sequence[HostKey]) -> bool:
        print(table(("host", "fingerprint"), [(key.host, key.fingerprint) for key in keys]), file=sys.stderr)
        files = ", ".join(dict.fromkeys(key.file for key in keys))
        question = (
            f"Compare them with what the hosts' owners say. Write {plural(len(keys), 'key')} to {files}?"
        )
        return args.yes or confirmed(question)

    for name in args.places:
        trusted = await places.trust(workspace, name, settings, agreed)
        if trusted < 0:
            print("evalfleet: no key was written down", file=sys.stderr)
            return False
        told = f"{plural(trusted, 'host key')} written down" if trusted else "no host shows an unknown key"
        print(f"evalfleet: {name}: {told}", file=sys.stderr)
    return True


def prices_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", nargs="?", metavar="KIND", help="only of this kind of place, such as gce")
    parser.add_argument("--update", action="store_true", help="fetch them from the cloud's price list")
    parser.add_argument(
        "--from", metavar="URL", dest="source", help="the price list to fetch from, such as a mirror's"
    )
    parser.add_argument("--all", action="store_true", help="show all that are known")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document, with all that are known"
    )


async def prices(args: argparse.Namespace) -> int:
    """Show the list prices that estimates, budgets and reports are based on, and their date.

    By default those of the sizes and regions of your places. `--update` fetches today's from the price lists
    of their clouds and keeps them in the home; if that fails, the old ones stay in force. Some
    lists are public, others are read with the login of the place.
    """
    import json

    from evalfleet.api import places
    from evalfleet.api.documents import prices_documents
    from evalfleet.errors import RequestError
    from evalfleet.planning.workspace import Workspace

    if args.source and not args.update:
        raise RequestError("--from says where to fetch prices: say --update, too")
    workspace = Workspace.here()
    if args.update:
        await places.update_prices(workspace, args.kind, args.source)
    found = places.prices(workspace, args.kind)
    if args.json:
        print(json.dumps([document for each in found for document in prices_documents(each)]))
    else:
        print("\n\n".join(_text(each, everything=args.all) for each in found))
    return 0


def _text(listed: Listed, *, everything: bool) -> str:
    from evalfleet.views.format import table

    shown = [each for each in listed.table.prices if everything or (each.what, each.region) in listed.wanted]
    rows = [(each.what, each.region, _usd(each), each.spot_usd_per_hour) for each in shown]
    kinds, as_of = ", ".join(listed.kinds), f"{listed.table.as_of} ({listed.table.source})"
    head = f"{kinds}: list prices of {as_of}, Linux, USD an hour"
    body = table(("what", "region", "regular", "spot"), rows, right=("regular", "spot"))
    guessed = ["", "~ estimated from another region's: `evalfleet prices --update` fetches the list's"]
    return "\n".join([head, "", body, *(guessed if any(each.estimated for each in shown) else [])])


def _usd(price: Price) -> str:
    return f"{'~' if price.estimated else ''}{price.usd_per_hour:g}"
