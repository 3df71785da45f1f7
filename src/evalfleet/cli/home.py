"""The runs of this home: ls, gc."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evalfleet.views.documents import VerifiedStream
    from evalfleet.views.results import RunSummary


def ls_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--benchmark", metavar="NAME", help="only runs of this benchmark")
    parser.add_argument("--model", metavar="NAME", help="only runs with this model")
    parser.add_argument(
        "--status",
        choices=("running", "left", "done", "stopped", "failed", "damaged"),
        help="only runs in this state; left: not ended, and no controller works on it",
    )
    parser.add_argument("--since", metavar="7d", help="only runs that were started within this time")
    parser.add_argument("--size", action="store_true", help="show the disk space of all runs, largest first")
    parser.add_argument(
        "--verify",
        metavar="RUN",
        nargs="?",
        const="",
        help="check the journal of this run or pool (default: all journals); exit code 1 if one is damaged",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def ls(args: argparse.Namespace) -> int:
    """List the runs of this home, newest first."""
    import msgspec

    from evalfleet.api import home
    from evalfleet.errors import RequestError
    from evalfleet.planning.values import parse_duration
    from evalfleet.planning.workspace import Workspace
    from evalfleet.views.format import table

    from .terminal import has_colours

    whole = "--size" if args.size else "--verify"
    if args.size or args.verify is not None:
        others = (args.benchmark, args.model, args.status, args.since, args.size and args.verify is not None)
        if any(others):
            raise RequestError(f"{whole} covers whole runs; combine it only with --json")
        if args.size:
            return _print_sizes(as_json=args.json)
        return _verify(args.verify or None, as_json=args.json)
    since_s = None if args.since is None else parse_duration(args.since, "--since")
    wanted = {"benchmark": args.benchmark, "model": args.model, "status": args.status}
    runs = home.list_runs(Workspace.here(), since_s=since_s, **wanted)
    if args.json:
        print(msgspec.json.encode(runs).decode())
    elif runs:
        style = _style if has_colours() else None
        print(table(_HEADER, [_cells(run) for run in runs], style=style, optional=_OPTIONAL))
    elif since_s or any(wanted.values()):
        print("no runs like that: `evalfleet ls` shows all")
    else:
        home_here = Workspace.here().home
        print(f"no runs in {home_here}: start one with `evalfleet run BENCHMARK`, or try `evalfleet demo`")
    return 0


_HEADER = (
    *("run", "benchmark", "status", "tasks", "scored", "broken", "unrun", "pass", "started"),
    *("took", "cost", "model"),
)
_OPTIONAL = ("started", "model", "unrun", "benchmark", "tasks")


def _cells(run: RunSummary) -> tuple[str, ...]:
    from evalfleet.views.format import duration, local_time, usd

    success = "-" if run.success_rate is None else f"{run.success_rate:.1%}"
    counts = (str(count) for count in (run.total_tasks, run.scored, run.broken, run.unrun))
    took = "-" if run.duration_seconds is None else duration(run.duration_seconds)
    cost = usd((run.machines_usd or 0.0) + (run.models_usd or 0.0))
    started = local_time(run.started_at) or "-"
    return (run.run, run.benchmark, run.status, *counts, success, started, took, cost, run.model or "-")


def _style(column: str, text: str) -> str:
    if column == "status":
        return {"running": "busy", "done": "good", "failed": "bad", "damaged": "bad"}.get(text, "warn")
    if column == "pass":
        return {"100.0%": "good", "0.0%": "bad"}.get(text, "")
    return "warn" if column == "broken" and text != "0" else ""


def _verify(name: str | None, *, as_json: bool) -> int:
    """Check every event of one run or pool, or of all of them. Returns the exit code."""
    import json
    import sys

    from evalfleet.api import home
    from evalfleet.planning.workspace import Workspace

    streams = home.verify(Workspace.here(), name)
    damaged = [stream for stream in streams if stream["problem"]]
    if as_json:
        print(json.dumps(streams))
    else:
        for stream in streams:
            print(f"{stream['name']}: {_verdict(stream)}")
        for stream in damaged:
            print(f"evalfleet: {stream['problem']}", file=sys.stderr)
    return 1 if damaged else 0


def _verdict(checked: VerifiedStream) -> str:
    if checked["problem"]:
        return "DAMAGED"
    text = f"{checked['events']:,} events are as they were written"
    if checked["not_covered"]:
        text += f"; of these, {checked['not_covered']:,} are not covered: they are older than the checksums"
    return text


def _print_sizes(*, as_json: bool) -> int:
    import msgspec

    from evalfleet.api import home
    from evalfleet.planning.workspace import Workspace
    from evalfleet.views.format import table

    found = home.usage(Workspace.here())
    if as_json:
        print(msgspec.json.encode(found).decode())
        return 0
    rows = [
        (each.run or "(all else)", each.status or "-", _mb(each.files), _mb(each.journal)) for each in found
    ]
    rows.append(("total", "", _mb(sum(each.files + each.journal for each in found)), ""))
    print(table(("run", "status", "files", "journal"), rows, right=("files", "journal")))
    return 0


def _mb(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


def _remove_named(args: argparse.Namespace) -> int:
    from evalfleet.api import home
    from evalfleet.planning.workspace import Workspace
    from evalfleet.views.format import plural

    from .terminal import agreed

    for run in args.runs:
        Workspace.here().store().stream(run)  # raises RequestError if there is none
    if not args.yes and not agreed(f"delete {plural(len(args.runs), 'run')} with all results"):
        return 1
    deleted: list[str] = []
    try:
        for run in args.runs:
            home.remove(Workspace.here(), run)
            deleted.append(run)
            if not args.json:
                print(f"{run} is deleted")
    finally:  # one that cannot be deleted is no reason not to tell which were
        if args.json:
            print(_deleted(deleted))
    return 0


def _deleted(runs: Sequence[str], *, files_only: bool = False, dry_run: bool = False) -> str:
    import json

    return json.dumps({"runs": runs, "files_only": files_only, "dry_run": dry_run})


def gc_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="*", help="delete these runs; `evalfleet ls` shows all")
    parser.add_argument("--older", metavar="30d", help="delete the runs that ended longer ago than this")
    parser.add_argument(
        "--keep-scores", action="store_true", help="delete only the files of their attempts; results stay"
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def gc(args: argparse.Namespace) -> int:
    """Delete runs that are over: their scores, their journals and all files of their attempts.

    With --older and --keep-scores only the files of attempts are deleted. Answers that are not graded yet
    keep their files.
    """
    from evalfleet.api import home
    from evalfleet.errors import RequestError
    from evalfleet.planning.values import parse_duration
    from evalfleet.planning.workspace import Workspace
    from evalfleet.views.format import plural

    from .terminal import agreed

    if bool(args.runs) == (args.older is not None):
        raise RequestError("name the runs to delete, or pass --older 30d for all old ones")
    if args.runs:
        if args.keep_scores or args.dry_run:
            raise RequestError("--keep-scores and --dry-run need --older")
        return _remove_named(args)
    workspace = Workspace.here()
    old = home.outdated(workspace, parse_duration(args.older, "--older"))
    if args.keep_scores:
        old = [run for run in old if not run.answered and home.has_artefacts(workspace, run.run)]
    what = f"delete {'the files of ' if args.keep_scores else ''}{plural(len(old), 'run')}"
    names = [run.run for run in old]
    if (not old or args.dry_run) and args.json:
        print(_deleted(names, files_only=args.keep_scores, dry_run=args.dry_run))
        return 0
    if not old or args.dry_run:
        print(f"this would {what}: {', '.join(names)}" if old else "nothing is that old")
        return 0
    if not args.yes and not agreed(what):
        return 1
    for name in names:
        (home.drop_artefacts if args.keep_scores else home.remove)(workspace, name)
        if not args.json:
            print(f"{name}: {'its files are' if args.keep_scores else 'it is'} deleted")
    home.compact(workspace)
    if args.json:
        print(_deleted(names, files_only=args.keep_scores))
    return 0
