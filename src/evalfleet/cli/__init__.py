"""The command line. A verb is a function, plain or async; its module is loaded when the verb is called."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import re
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from evalfleet.errors import FleetError, RequestError

from .removed import replacement

GROUPS: dict[str, dict[str, str]] = {
    "run": {
        "init": "write a benchmark to begin with, from a dataset",
        "plan": "show how long a run would take and what it would cost, each way to run it",
        "run": "run a benchmark on a fleet of machines, or tasks of an earlier run again",
        "hal-eval": "run a HAL evaluation with HAL's own flags",
        "resume": "continue a run that stopped, run again what broke, grade answers",
        "set": "change the workers, budget or attempts of a live run; 0 workers pause it",
        "end": "end one attempt of a live run",
        "drain": "let a machine, or a whole run, finish what it runs and stop",
        "cancel": "stop a run and clean up after it",
        "demo": "run a real benchmark on this computer, in about a minute",
    },
    "look": {
        "watch": "follow a run, from any terminal",
        "ls": "list the runs of this home, their sizes, or damage to their journals",
        "show": "show how a run, or one of its tasks, went",
        "logs": "print the log of a run, a task or a machine",
        "alerts": "show what needs attention, or send a test alert",
        "report": "write a run's report, or the schema of a document",
        "compare": "compare runs task by task, and say what may be concluded",
        "serve": "serve a dashboard of all runs to a browser",
        "metrics": "serve runs to Prometheus",
        "traces": "send a run to OpenTelemetry",
    },
    "machines": {
        "pool": "keep machines that outlive runs: create, status, ssh, delete, ...",
        "machines": "list all machines and images of evalfleet, or delete an image",
        "reap": "delete expired machines of evalfleet",
    },
    "places": {
        "doctor": "check a place before money is spent",
        "places": "list the places that machines can come from",
        "benchmarks": "list the benchmarks that are installed",
        "prices": "show list prices and their date, or fetch newer ones",
        "cost": "compare what was counted with an exported bill",
    },
    "housekeeping": {
        "gc": "delete runs that are over, or only the files of old ones",
        "export": "write a whole run into one file",
        "import": "turn results of another program into a run",
    },
}
"""The verbs of each group of `evalfleet --help`."""
VERBS: dict[str, str] = {verb: what for group in GROUPS.values() for verb, what in group.items()}
DEVELOPER_VERBS: dict[str, str] = {
    "controller": "run the controller of a detached run (started by run --detach)",
}

MODULES: dict[str, str] = {
    "init": "results",
    "hal-eval": "hal_eval",
    "resume": "run",
    "cancel": "run",
    "demo": "run",
    "set": "steer",
    "end": "steer",
    "drain": "steer",
    "logs": "watch",
    "metrics": "telemetry",
    "traces": "telemetry",
    "ls": "home",
    "gc": "home",
    "export": "results",
    "show": "results",
    "report": "results",
    "compare": "results",
    "import": "results",
    "reap": "machines",
    "doctor": "places",
    "prices": "places",
    "benchmarks": "places",
    "controller": "developer",
}
"""Where a verb is, if not in a module of its name: a function, and one that adds its arguments."""
FUNCTIONS = {"import": "import_results", "set": "set_limits", "hal-eval": "hal_eval"}
"""What Python cannot call by its name."""

USAGE_ERROR = 2
INTERRUPTED = 130


class _StoreOnce(argparse.Action):
    """A flag with one value. Given twice, it is unclear which one is meant."""

    _given_in: argparse.Namespace | None = None

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        if option_string is not None and self._given_in is namespace:
            parser.error(f"{option_string} is given twice; give it once")
        self._given_in = namespace
        setattr(namespace, self.dest, values)


_INVALID_CHOICE = re.compile(r"argument (.+): invalid choice: '(.*)' \(choose from (.*)\)", re.DOTALL)
_INVALID_NUMBER = re.compile(r"argument (.+): invalid (int|float) value: '(.*)'", re.DOTALL)


class _Parser(argparse.ArgumentParser):
    """A parser that says what is wrong in one line, and where to read on."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for name in (None, "store"):
            self.register("action", name, _StoreOnce)

    def parse_known_args(self, *args: Any, **options: Any) -> Any:
        found, strange = super().parse_known_args(*args, **options)
        if strange:
            from evalfleet.names import hint

            flags = re.findall(r"(?<![\w-])--[a-z][\w-]*", self.format_help())
            nearest = hint(strange[0].partition("=")[0], flags)
            nearest = f"; {nearest}" if nearest.startswith("did you mean") else ""
            self.error(f"unknown argument {strange[0]!r}{nearest}")
        return found, strange

    def error(self, message: str) -> None:  # type: ignore[override]
        if found := _INVALID_CHOICE.fullmatch(message):
            from evalfleet.names import hint

            choices = [choice.strip("'") for choice in found[3].split(", ")]
            message = f"{found[1]} is {found[2]!r}; {hint(found[2], choices)}"
        elif found := _INVALID_NUMBER.fullmatch(message):
            number = "whole number" if found[2] == "int" else "number"
            message = f"{found[1]} is {found[3]!r}; write a {number}"
        print(f"evalfleet: {message} (`{self.prog} --help` says more)", file=sys.stderr)
        raise SystemExit(USAGE_ERROR)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. Errors are one line on standard error."""
    try:
        try:
            code = _main(argv)
        finally:
            sys.stdout.flush()  # here, where it can still be told that nobody reads it
    except BrokenPipeError:
        # the reader of our output has gone (`| head`): nothing is wrong, and nothing can be said
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    if argv is None and "obstore" in sys.modules:
        # a thread of its own that asks us for a token while Python ends would end us by SIGABRT
        sys.stderr.flush()
        os._exit(code)
    return code


def _main(argv: Sequence[str] | None) -> int:
    _open_closed_streams()
    if argv is None:  # we are the program: its streams are ours
        _adapt_streams()
    if argv is None and "_ARGCOMPLETE" in os.environ:
        from .completion import complete

        complete()
    words = list(sys.argv[1:] if argv is None else argv)
    if len(words) == 2 and words[0] == "help" and words[1] in VERBS:  # and `run help`
        words = [words[1], "--help"]
    elif words in (["run", "help"], ["plan", "help"], ["pool", "help"]):
        words = [words[0], "--help"]
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0 if words else USAGE_ERROR
    if words[0] in ("-V", "--version"):
        from evalfleet import __version__

        print(f"evalfleet {__version__}")
        return 0
    if argv is None:
        from .terminal import end_on_interrupts_while_loading

        end_on_interrupts_while_loading()
    try:
        return _dispatch(words[0], words[1:])
    except FleetError as err:
        print(f"evalfleet: {err}", file=sys.stderr)
        return err.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        raise
    except OSError as err:
        where = f"{err.filename}: " if err.filename else ""
        print(f"evalfleet: {where}{err.strerror or err}", file=sys.stderr)
        return 1


def _open_closed_streams() -> None:
    """Whoever starts us may have closed them (`>&-`): no file of ours may get their numbers."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(fd, "w" if fd else "r", closefd=False))


def _adapt_streams() -> None:
    """Print characters that the terminal's encoding lacks as escapes, and lines whole.

    With PYTHONUNBUFFERED a line and its end are two writes: lines of the other stream get in between.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            if stream.errors == "strict":
                stream.reconfigure(errors="backslashreplace")
            if stream.write_through:
                stream.reconfigure(write_through=False, line_buffering=True)


def _dispatch(verb: str, words: list[str]) -> int:
    if (line := replacement(verb, words)) is not None:
        raise RequestError(line)
    if verb not in VERBS and verb not in DEVELOPER_VERBS:
        from evalfleet.names import hint

        print(f"evalfleet: there is no command {verb!r}; {hint(verb, VERBS)}", file=sys.stderr)
        return USAGE_ERROR
    args = parser_of(verb).parse_args(words)
    _check_folder()
    code: int | Coroutine[Any, Any, int] = _function(verb)(args)
    if isinstance(code, int):
        return code
    from .terminal import result_of

    return result_of(code)


def _function(verb: str, suffix: str = "") -> Callable[..., Any]:
    module = importlib.import_module(f"evalfleet.cli.{MODULES.get(verb, verb)}")
    function: Callable[..., Any] = getattr(module, FUNCTIONS.get(verb, verb) + suffix)
    return function


def _check_folder() -> None:
    try:
        os.getcwd()
    except OSError as err:
        raise RequestError("the current folder is gone: change to one that exists") from err


def parser_of(verb: str) -> argparse.ArgumentParser:
    """The parser of one verb."""
    parser = _Parser(
        prog=f"evalfleet {verb}",
        description=(_function(verb).__doc__ or "").replace("\n    ", "\n"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_arguments(parser, verb)
    return parser


def add_arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    _function(verb, "_arguments")(parser)


def overview() -> str:
    width = max(map(len, VERBS)) + 2
    lines: list[str] = []
    for group, verbs in GROUPS.items():
        lines += [f"{group}:", *(f"  {verb:<{width}}{what}" for verb, what in verbs.items()), ""]
    return "\n".join(
        (
            "evalfleet: run agent benchmarks on fleets of machines. Every task gets exactly one score,",
            "every machine is deleted, every dollar is accounted for, whatever crashes.",
            "",
            "usage: evalfleet COMMAND ...        (`evalfleet COMMAND --help` says more)",
            "",
            *lines,
            "New here? `evalfleet demo` takes a minute. Results are kept in $EVALFLEET_HOME (default:",
            "benchmark_results/ beside evalfleet.toml, else the nearest one, else here).",
        )
    )
