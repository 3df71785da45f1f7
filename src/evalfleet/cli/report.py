"""Write a run's report: md to read, csv to compute with, json for programs."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="?", help="default: the latest")
    parser.add_argument("--format", choices=("md", "json", "csv"), default="md", help="default: md")
    parser.add_argument("-o", metavar="PATH", dest="path", help="write here instead of standard output")


def main(args: argparse.Namespace) -> int:
    from pathlib import Path

    from evalfleet.api import runs
    from evalfleet.errors import RequestError
    from evalfleet.views.report import report

    text = report(runs.open(args.run).results(), args.format)
    if args.path is None:
        print(text)
        return 0
    try:
        Path(args.path).write_text(text, encoding="utf-8")
    except OSError as err:
        raise RequestError(f"cannot write {args.path}: {err.strerror}") from err
    print(f"report written to {args.path}")
    return 0
