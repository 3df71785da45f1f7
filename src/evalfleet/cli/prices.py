"""Show the list prices that estimates, budgets and reports rest on, and of when they are.

By default those of the sizes and regions of your places. `--update` fetches today's from the cloud's public
price list, which needs no account, and keeps them in the home; if that fails, the old ones stay in force.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evalfleet.api.prices import Listed
    from evalfleet.ports import Price


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--update", action="store_true", help="fetch them from the public price list")
    parser.add_argument(
        "--from", metavar="URL", dest="source", help="the price list to fetch from, such as a mirror's"
    )
    parser.add_argument("--all", action="store_true", help="show all that are known")
    parser.add_argument("--json", action="store_true", help="one JSON document, with all that are known")


def main(args: argparse.Namespace) -> int:
    import json
    from datetime import UTC, datetime

    from evalfleet.api import prices
    from evalfleet.errors import RequestError

    if args.source and not args.update:
        raise RequestError("--from says where to fetch prices: say --update, too")
    if args.update:
        prices.update(datetime.now(UTC).date().isoformat(), args.source)
    found = prices.prices()
    if args.json:
        print(json.dumps([_document(each) for each in found]))
    else:
        print("\n\n".join(_text(each, everything=args.all) for each in found))
    return 0


def _document(listed: Listed) -> dict[str, Any]:
    import msgspec

    return {"place": listed.kind, **msgspec.to_builtins(listed.table)}


def _text(listed: Listed, *, everything: bool) -> str:
    from evalfleet.views.text_table import table

    shown = [each for each in listed.table.prices if everything or (each.what, each.region) in listed.wanted]
    rows = [(each.what, each.region, _usd(each), each.spot_usd_per_hour) for each in shown]
    head = f"{listed.kind}: list prices of {listed.table.as_of} ({listed.table.source}), Linux, USD an hour"
    body = table(("what", "region", "regular", "spot"), rows, right=("regular", "spot"))
    guessed = ["", "~ estimated from another region's: `evalfleet prices --update` fetches the list's"]
    return "\n".join([head, "", body, *(guessed if any(each.estimated for each in shown) else [])])


def _usd(price: Price) -> str:
    return f"{'~' if price.estimated else ''}{price.usd_per_hour:g}"
