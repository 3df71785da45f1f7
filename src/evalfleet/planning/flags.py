"""The flags of `evalfleet run`, each written down once.

From this table come the parser of the command line, the keys of `[defaults]` and `[profiles.NAME]`, the
variables `EVALFLEET_<FLAG>`, the typed options of `evalfleet.run(...)` and their list in the docs. It imports
next to nothing, because `evalfleet run --help` does; for the same reason annotations are not strings here,
which typing would compile one by one, and a flag is no dataclass, which would import `inspect`: 40 ms.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypedDict, get_type_hints

if TYPE_CHECKING:
    from pathlib import Path
else:  # at run time it is only shown, and `pathlib` takes as long to import as all the rest
    from os import PathLike as Path

# fmt: off
Kind = Literal["names", "strings", "count", "workers", "usd", "duration", "share", "allow_broken", "schedule",
               "switch", "line", "table", "path"]
# fmt: on
"""How a value is written; `planning.values` reads each."""

Scope = Literal["anywhere", "files", "one run"]
"""Where else than on the command line a flag may be given. `one run`: nowhere, because it makes no sense for
more than one. `files`: in `[defaults]` and profiles, but not in the environment, where it would collide with
what a task's command is given."""

Group = Literal["where", "which tasks", "what runs", "limits", "how"]


class Flag(NamedTuple):
    """One flag of `evalfleet run`."""

    group: Group
    kind: Kind
    metavar: str
    help: str
    word: str = ""
    """What the flag is called elsewhere than in Python, if that differs: `--task` is `task_ids` there."""
    short: str = ""
    """The only spelling on the command line, instead of `--word`."""
    low: int = 1
    high: int = 10**9
    scope: Scope = "anywhere"

    @property
    def in_files(self) -> bool:
        """May stand in `[defaults]` and `[profiles.NAME]`."""
        return self.scope != "one run"

    @property
    def in_environment(self) -> bool:
        """Has a variable EVALFLEET_<FLAG>."""
        return self.scope == "anywhere"

    @property
    def is_repeated(self) -> bool:
        """May be given several times on the command line."""
        return self.kind in ("strings", "table")


Number = int | float | str
"""As a flag gives it ('2h', '$5', '5%') or as Python does (7200, 5, 0.05)."""
Count = int | str


class RunOptions(TypedDict, total=False):
    """The options of `evalfleet.run`: every flag that says what a run is, as Python gives it."""

    on: Annotated[
        str | Sequence[str],
        Flag(
            "where",
            "names",
            "PLACE[,PLACE...]",
            "where machines come from; of several places, the next is asked when one has none to give or "
            "fails; or the name of a list in [tiers] (default: local)",
        ),
    ]
    mix: Annotated[
        bool,
        Flag(
            "where",
            "switch",
            "",
            "of several places, take the cheapest machines first, not the first place's",
        ),
    ]
    pool: Annotated[
        str, Flag("where", "line", "NAME", "borrow the machines of this pool instead", scope="one run")
    ]
    workers: Annotated[
        Count,
        Flag(
            "where",
            "workers",
            "N",
            "how many machines at once (default: all hosts of a place that lists them, or the pool; else 1); "
            "auto: as few as meet the --deadline, or as many as the --budget pays",
        ),
    ]
    spot: Annotated[
        bool,
        Flag("where", "switch", "", "take cheaper machines that the cloud may take back, where it has some"),
    ]
    right_size: Annotated[
        bool,
        Flag("where", "switch", "", "take machines of the size that tasks of each domain needed before"),
    ]
    keep: Annotated[
        bool,
        Flag("where", "switch", "", "do not delete the machines at the end: they become the pool RUN-pool"),
    ]
    canary: Annotated[
        Count,
        Flag(
            "where",
            "count",
            "N",
            "start with one machine; take the others once N attempts have a score (default: the place's)",
            low=0,
            high=1000,
        ),
    ]
    tasks: Annotated[
        Count,
        Flag(
            "which tasks", "count", "N", "N tasks at random, spread over the domains; the same ones each time"
        ),
    ]
    seed: Annotated[
        Count,
        Flag(
            "which tasks",
            "count",
            "S",
            "with --tasks: another number chooses other tasks (default: 0)",
            low=-(10**17),
            high=10**17,
        ),
    ]
    first: Annotated[Count, Flag("which tasks", "count", "N", "the first N tasks of the file", scope="files")]
    task_ids: Annotated[
        Sequence[str],
        Flag(
            "which tasks",
            "strings",
            "ID",
            "this task, a glob ('web_*') or a range ('web_3..9'); may be repeated",
            word="task",
            scope="files",
        ),
    ]
    exclude: Annotated[
        Sequence[str],
        Flag("which tasks", "strings", "ID", "not this task, glob or range; may be repeated", scope="files"),
    ]
    tasks_file: Annotated[
        str | Path | None,
        Flag("which tasks", "path", "FILE", "tasks, one per line, written as for --task", scope="one run"),
    ]
    from_run: Annotated[
        str,
        Flag(
            "which tasks",
            "line",
            "RUN",
            "only tasks of this earlier run; without BENCHMARK, repeat them as that run ran them",
            word="from",
            scope="one run",
        ),
    ]
    only: Annotated[
        str | Sequence[str],
        Flag(
            "which tasks",
            "names",
            "OUTCOME,...",
            "with --from: only those that are failed, broken, slow, unrun or passed",
            scope="one run",
        ),
    ]
    domains: Annotated[
        Sequence[str],
        Flag(
            "which tasks",
            "strings",
            "D",
            "only tasks of this domain; may be repeated",
            word="domain",
            scope="files",
        ),
    ]
    tags: Annotated[
        Sequence[str],
        Flag(
            "which tasks",
            "strings",
            "TAG",
            "only tasks with this tag; if repeated, tasks with any of the tags",
            word="tag",
            scope="files",
        ),
    ]
    repeat: Annotated[
        Count,
        Flag("which tasks", "count", "K", "run every task K times, as K tasks", high=1000, scope="files"),
    ]
    schedule: Annotated[
        str,
        Flag(
            "which tasks",
            "schedule",
            "POLICY",
            "who gets which task: dynamic (default: whoever is free, the longest known first; also called "
            "longest-first), fifo (whoever is free, in order), round-robin or slices",
        ),
    ]
    model: Annotated[
        str | Sequence[str],
        Flag(
            "what runs",
            "names",
            "M[,M...]",
            "the name of the model under test, passed on to the benchmark; or several",
        ),
    ]
    settings: Annotated[
        Mapping[str, Any],
        Flag(
            "what runs",
            "table",
            "KEY=VALUE",
            "a setting of the benchmark or of the place (`evalfleet places` has those); may be repeated",
            word="set",
            scope="files",
        ),
    ]
    agent: Annotated[
        Mapping[str, Any],
        Flag(
            "what runs",
            "table",
            "KEY=VALUE",
            "an argument for the agent, passed on as it is; may be repeated",
            short="-A",
            scope="files",
        ),
    ]
    oracle: Annotated[
        bool,
        Flag(
            "what runs",
            "switch",
            "",
            "test the benchmark: run its own solutions, which must all succeed, instead of an agent",
            scope="one run",
        ),
    ]
    env_file: Annotated[
        str | Path | None,
        Flag(
            "what runs",
            "path",
            "FILE",
            "read secrets and settings from here; never uploaded",
            scope="one run",
        ),
    ]
    keep_calls: Annotated[
        bool, Flag("what runs", "switch", "", "keep what metered model calls ask and answer, as artefacts")
    ]
    budget: Annotated[
        Number, Flag("limits", "usd", "USD", "stop before machines, and metered models, cost more than this")
    ]
    task_budget: Annotated[
        Number, Flag("limits", "usd", "USD", "the most that the model calls of one attempt may cost")
    ]
    max_tokens: Annotated[
        Count, Flag("limits", "count", "N", "the most tokens that metered models may use", high=10**15)
    ]
    max_duration: Annotated[
        Number, Flag("limits", "duration", "2h", "stop the run after this long; `resume` continues it")
    ]
    deadline: Annotated[
        Number,
        Flag(
            "limits",
            "duration",
            "1h",
            "when the run should be done: you are warned, before it and during it, if it will be late; "
            "nothing is stopped",
        ),
    ]
    task_timeout: Annotated[
        Number,
        Flag(
            "limits",
            "duration",
            "S",
            "end every attempt after this long, whatever the benchmark says (seconds, or 5m)",
        ),
    ]
    attempts: Annotated[
        Count,
        Flag("limits", "count", "N", "attempts per task before it counts as broken (default: 3)", high=100),
    ]
    allow_broken: Annotated[
        Number,
        Flag(
            "limits", "allow_broken", "N|P%", "exit 0 even if up to this many tasks are broken (default: 0)"
        ),
    ]
    fail_under: Annotated[
        Number, Flag("limits", "share", "RATE", "exit 1 if the pass rate is below this, such as 0.4")
    ]
    strict: Annotated[bool, Flag("limits", "switch", "", "count broken tasks as failed in the pass rate")]
    name: Annotated[
        str,
        Flag("how", "line", "RUN", "the run's name (default: made from benchmark and time)", scope="one run"),
    ]
    store: Annotated[
        str,
        Flag(
            "how",
            "line",
            "URL",
            "keep a copy there, for other computers too: gs://, s3:// or az://BUCKET/PREFIX, or a folder",
        ),
    ]
    config: Annotated[
        str | Path | None,
        Flag("how", "path", "FILE", "read this file instead of the nearest evalfleet.toml", scope="one run"),
    ]
    profile: Annotated[
        str,
        Flag("how", "line", "NAME", "take defaults from [profiles.NAME] of evalfleet.toml", scope="one run"),
    ]


@functools.cache
def flags() -> dict[str, Flag]:
    """Python's name of an option -> its flag, in the order of the help."""
    hints = get_type_hints(RunOptions, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items()}


def word_of(option: str) -> str:
    """What an option is called in files and variables, and on the command line with dashes."""
    return flags()[option].word or option


def file_keys() -> frozenset[str]:
    """The keys of `[defaults]` and `[profiles.NAME]`."""
    return frozenset(word_of(name) for name, flag in flags().items() if flag.in_files)


def variables() -> dict[str, str]:
    """The environment's variable -> the key that it stands for."""
    keys = sorted(word_of(name) for name, flag in flags().items() if flag.in_environment)
    return {f"EVALFLEET_{key.upper()}": key for key in keys}
