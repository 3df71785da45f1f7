"""Results of runs: show, report, compare, export, import."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from .terminal import has_colours, result_of

if TYPE_CHECKING:
    from evalfleet.api.run import Run


def show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", metavar="RUN", nargs="?", help="its name, or the beginning of it (default: the latest)"
    )
    parser.add_argument("task", metavar="TASK", nargs="?", help="this task, with all its attempts")
    for outcome in ("failed", "broken"):
        parser.add_argument(
            f"--{outcome}",
            dest="only",
            action="append_const",
            const=outcome,
            help=f"only tasks that {'failed' if outcome == 'failed' else 'are broken'}",
        )
    parser.add_argument("--domain", metavar="D", action="append", help="only tasks of this domain")
    parser.add_argument("--tag", metavar="TAG", action="append", help="only tasks with this tag")
    parser.add_argument(
        "--sort",
        choices=SORTS,
        help="in this order (default: outcome, failures first); longest, worst or most expensive first",
    )
    parser.add_argument("--steps", action="store_true", help="the steps of the task's newest attempt")
    parser.add_argument(
        "--screenshot", metavar="FILE", help="write the task's newest screenshot there, also while it runs"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def _show_steps(run: Run, name: str | None, args: argparse.Namespace) -> int:
    import json

    from evalfleet.errors import RequestError
    from evalfleet.files import replace
    from evalfleet.views.progress import steps_table

    if name is None:
        raise RequestError("steps and screenshots are a task's: name one after RUN")
    if args.screenshot:
        shown, data = run.screenshot(name)
        replace(Path(args.screenshot), data)
        print(
            json.dumps({"screenshot": shown, "file": args.screenshot, "bytes": len(data)})
            if args.json
            else f"{shown} of {name}: {args.screenshot}"
        )
        return 0
    rows = run.steps(name)
    print(json.dumps(rows) if args.json else steps_table(rows) if rows else f"{name} has made no step yet")
    return 0


SORTS = ("outcome", "task", "domain", "duration", "score", "attempts", "cost")


def show(args: argparse.Namespace) -> int:
    """Show how a run went: outcome, attempts, causes, machines, cost; or one task with all its attempts.

    A task that was run several times is shown by all its repeats. With --failed, --broken, --domain, --tag
    or --sort: those tasks alone, in that order. Steps and screenshots are there if the benchmark says where
    its steps are; those of an attempt that runs come from its machine.
    """
    import json

    from evalfleet.api import runs
    from evalfleet.clock import WallClock
    from evalfleet.errors import RequestError
    from evalfleet.names import hint
    from evalfleet.planning.workspace import Workspace
    from evalfleet.views.show import show_run, show_task, show_tasks
    from evalfleet.views.stats import at_risk
    from evalfleet.views.tasks import by_outcome, in_order

    run, name = runs.open_run_or_task(Workspace.here(), args.run, args.task)
    if name is not None and (args.only or args.domain or args.tag or args.sort):
        raise RequestError("one task has no order and no outcome to choose by: leave the flags out, or TASK")
    if args.steps or args.screenshot:
        return _show_steps(run, name, args)
    repeated = name is not None and name not in run.state().tasks and name in run.origins()
    if name is not None and not repeated:
        detail = run.task(name)
        print(json.dumps(detail) if args.json else show_task(detail, colours=has_colours()))
        return 0
    results = run.results()
    if repeated:
        results["tasks"] = [task for task in results["tasks"] if task["origin"] == name]
    if repeated or args.only or args.domain or args.tag or args.sort:
        tags = {tag for task in results["tasks"] for tag in task["tags"]}
        for what, asked, known in (("domain", args.domain, results["by_domain"]), ("tag", args.tag, tags)):
            if strange := [name for name in asked or () if name not in known]:
                raise RequestError(
                    f"run {run.name!r} has no {what} {strange[0]!r}; {hint(strange[0], known)}"
                )
        chosen = by_outcome(results["tasks"], args.only or ())
        chosen = [task for task in chosen if not args.domain or task["domain"] in args.domain]
        chosen = [task for task in chosen if not args.tag or not set(args.tag).isdisjoint(task["tags"])]
        results["tasks"] = in_order(chosen, args.sort or "outcome")
        print(
            json.dumps(results)
            if args.json
            else show_tasks(results, results["tasks"], sort=args.sort, colours=has_colours())
        )
    else:
        print(
            json.dumps(results)
            if args.json
            else show_run(results, colours=has_colours(), steps=not run.is_of_another_home)
        )
        if not args.json and (state := run.state()).ended_at is None:
            for told in at_risk(state, WallClock().now()):
                print(f"at risk: {told}")
    return 0


def report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", metavar="RUN", nargs="?", help="its name, or the beginning of it (default: the latest)"
    )
    parser.add_argument(
        "--format",
        metavar="FORMAT",
        help="md (default), json, csv, junit, github; html: one file to send, with replays; site: the same "
        "as a folder; or a benchmark: a folder for its own tools",
    )
    parser.add_argument(
        "-o",
        metavar="PATH",
        dest="path",
        help="write here (-: to standard output, the default); html: not to RUN.html",
    )
    parser.add_argument("--json", action="store_true", help="the same as --format json")
    parser.add_argument(
        "--screens",
        metavar="WHICH",
        help="html, site: screenshots: none, last (of each task; default of html), all (of site)",
    )
    parser.add_argument(
        "--most-mb",
        metavar="MB",
        type=float,
        help="html: at most so large (default 25)",
    )
    parser.add_argument(
        "--schema",
        metavar="DOCUMENT",
        nargs="?",
        const="",
        help="instead: print the JSON schema of a document that programs read (default: list them)",
    )


def report(args: argparse.Namespace) -> int:
    """Write a run's report: md to read, csv to compute with, json for programs, junit for CI.

    github prints annotations of a workflow, and adds the md report to the job's summary. html is the
    dashboard of the run in one file: it opens from disk, without a network.
    """
    from pathlib import Path

    if args.schema is not None:
        return _print_schema(args.schema, as_json=args.json)

    from evalfleet.api import runs
    from evalfleet.errors import RequestError
    from evalfleet.planning.workspace import Workspace
    from evalfleet.views.report import FORMATS, report

    run = runs.open_run(Workspace.here(), args.run)
    if args.json and args.format not in (None, "json"):
        raise RequestError(f"--json is --format json: leave it out, or --format {args.format}")
    format = args.format or ("json" if args.json else "md")
    if args.path == "-" and format not in FORMATS:
        raise RequestError(
            f"-o -: the {format} report is files: name a file or folder, or choose --format md"
        )
    if format in ("html", "site"):
        from evalfleet.web.export import write_report

        writing = write_report(Workspace.here(), run.name, format, args.path, args.screens, args.most_mb)
        print(result_of(writing))
        return 0
    if args.screens is not None or args.most_mb is not None:
        raise RequestError("--screens and --most-mb are for --format html and site")
    if format not in FORMATS:
        print("\n".join(run.export(format, Path(args.path or f"{run.name}-{format}"))))
        return 0
    results = run.results()
    text = report(results, format)
    if format == "github" and (job_summary := os.environ.get("GITHUB_STEP_SUMMARY")):
        with Path(job_summary).open("a", encoding="utf-8") as file:
            file.write(report(results, "md"))
    if args.path in (None, "-"):
        print(text)
        return 0
    try:
        Path(args.path).write_text(text, encoding="utf-8")
    except OSError as err:
        raise RequestError(f"cannot write {args.path}: {err.strerror}") from err
    print(f"report written to {args.path}")
    return 0


def _print_schema(document: str, *, as_json: bool) -> int:
    """Print one schema, or the list of all documents. Keys may be added to a document, and never go."""
    import json

    from evalfleet.api import documents
    from evalfleet.views.format import pairs

    if document:
        print(json.dumps(documents.schema(document), indent=2))
    elif as_json:
        listed = [{"document": name, "where": where} for name, (_, where) in documents.DOCUMENTS.items()]
        print(json.dumps(listed))
    else:
        print(pairs([(name, where) for name, (_, where) in documents.DOCUMENTS.items()]))
    return 0


def compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", help="each of the others is compared with the first"
    )
    parser.add_argument(
        "--json", action="store_true", help="print a JSON list with a document for each of the other runs"
    )


def compare(args: argparse.Namespace) -> int:
    """Compare runs task by task: how often each passes, and whether the difference is more than noise.

    A single RUN in which several models ran is compared model by model. Only tasks that both have scored
    count. What is not alike beside model and agent (tasks, files, limits, versions) is told first.
    """
    import json

    from evalfleet.api.runs import compare_runs
    from evalfleet.planning.workspace import Workspace
    from evalfleet.views.compare import comparison_text

    found = compare_runs(Workspace.here(), args.runs)
    print(json.dumps(found) if args.json else "\n\n\n".join(map(comparison_text, found)))
    return 0


def export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", metavar="RUN", nargs="?", help="its name, or the beginning of it (default: the latest)"
    )
    parser.add_argument("-o", metavar="FILE", dest="path", type=Path, help="default: RUN.evalfleet.tar.gz")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def export(args: argparse.Namespace) -> int:
    """Write a whole run into one file: its journal, its results and the files of all attempts.

    `evalfleet import FILE` makes the same run of it in another home.
    """
    import json

    from evalfleet.api import runs
    from evalfleet.api.archive import export_run
    from evalfleet.planning.workspace import Workspace

    run = runs.open_run(Workspace.here(), args.run)
    path = args.path or Path(f"{run.name}.evalfleet.tar.gz")
    export_run(Workspace.here(), run.name, path)
    size = path.stat().st_size
    if args.json:
        print(json.dumps({"run": run.name, "path": str(path.absolute()), "bytes": size}))
    else:
        print(f"{run.name} is written to {path} ({size / 1e6:,.1f} MB)")
    return 0


def import_results_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "benchmark",
        metavar="FILE|BENCHMARK",
        help="a file that `evalfleet export` wrote; or the benchmark whose results they are (a wrong name is "
        "answered with a list)",
    )
    parser.add_argument(
        "results", metavar="RESULTS_DIR", nargs="*", type=Path, help="where its results are; may be several"
    )
    parser.add_argument("--name", metavar="RUN", help="what to call the run (default: made from the time)")
    parser.add_argument("--trial", metavar="T", help="this trial only, where there are several")
    parser.add_argument(
        "--keep", choices=("first", "newest"), help="which score counts when a task has more than one"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document, as `show` does")


def import_results(args: argparse.Namespace) -> int:
    """Turn a file that `export` wrote, or results of another program, into a run.

    RESULTS_DIR is a folder in which a benchmark's own program left its results, of any number of workers. A
    task without a result becomes broken, with its cause, and not a zero. The files are copied; nothing is
    changed there.
    """
    import json

    from evalfleet.api.archive import import_run
    from evalfleet.api.imports import import_results
    from evalfleet.errors import RequestError
    from evalfleet.planning.workspace import Workspace
    from evalfleet.views.show import show_run

    if args.results:
        run = import_results(
            Workspace.here(), args.benchmark, args.results, name=args.name, trial=args.trial, keep=args.keep
        )
    elif Path(args.benchmark).is_file():
        run = import_run(Workspace.here(), Path(args.benchmark), name=args.name)
    else:
        raise RequestError(
            f"{args.benchmark} is no file: name one that `evalfleet export` wrote, or say where the results "
            "of that benchmark are"
        )
    results = run.results()
    shown = show_run(results, colours=has_colours(), steps=not run.is_of_another_home)
    print(json.dumps(results) if args.json else shown)
    return 0


def init_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "dataset",
        metavar="DATASET",
        nargs="?",
        help="a .jsonl, .json, .csv or .tsv file with one task per row (default: three sums)",
    )
    parser.add_argument("--name", metavar="NAME", help="the benchmark's name (default: the dataset's)")
    parser.add_argument("--into", metavar="FOLDER", help="write here (default: a new folder of that name)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def init(args: argparse.Namespace) -> int:
    """Write a benchmark that runs at once: its file, an agent that answers nothing yet, and its grader.

    Which of the dataset's fields is the id, the domain and the answer is guessed, said, and written into the
    file, where it can be changed. Nothing that is there is overwritten.
    """
    import json

    from evalfleet.api import documents
    from evalfleet.benchmarks.start import SCHEMA_FILE, make_start
    from evalfleet.errors import RequestError
    from evalfleet.toml_tables import expand
    from evalfleet.views.format import pairs
    from evalfleet.views.summary import called

    start = make_start(expand(args.dataset) if args.dataset else None, args.name or "")
    folder = expand(args.into) if args.into else Path(start.name)
    schema_text = json.dumps(documents.schema("benchmark"), indent=2) + "\n"
    files = {**start.files, SCHEMA_FILE: schema_text.encode()}
    # the dataset itself may be there: the benchmark is then made around it
    taken = [
        name
        for name, content in files.items()
        if (folder / name).exists() and not _holds(folder / name, content)
    ]
    if taken:
        raise RequestError(f"{folder / taken[0]} is there already; choose another folder with --into")
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    if args.json:
        benchmark = str(folder / f"{start.name}.toml")
        written = [str(folder / name) for name in files]
        print(json.dumps({"benchmark": benchmark, "files": written, "fields": dict(start.fields)}))
        return 0
    words = {"#": "the number of the row", "": "none was found"}
    print(pairs([(what, words.get(field, field)) for what, field in start.fields.items()]))
    print(f"written: {', '.join(str(folder / name) for name in files)}")
    oracle = " --oracle" if start.fields["answer"] else ""  # else its grader accepts anything
    print(f"next: {called()} run {shlex.quote(str(folder / start.name))}.toml{oracle}")
    return 0


def _holds(path: Path, content: bytes) -> bool:
    return path.is_file() and path.read_bytes() == content
