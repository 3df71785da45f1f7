"""The shape of this repository: how large its parts are, how much they explain, what knows what."""

from __future__ import annotations

import ast
import io
import re
import statistics
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .result import Aim, Figures, Result, at_most, rounded

PACKAGE = Path(__file__).parents[1] / "src" / "evalfleet"
FILES_AIM, TWICE_AIM, PROTOCOLS_AIM, OUTSIDE_AIM, P95_AIM, LONGEST_AIM = 240, 10, 8, 1, 30, 70
WAA = re.compile(r"\bwaa\b|winarena|windows ?agent ?arena")  # all in lower case
AZURE = re.compile(r"azure")
# Windows Agent Arena's own client speaks to Azure's models, and its page tells of Azure's sizes.
AZURE_TOO = ("places/azure_batch", "places/azure_ml", "benchmarks/waa")
LATER: dict[str, tuple[str, ...]] = {
    "gce": ("places/gce",),
    "slurm": ("places/slurm",),
    "azure_batch": ("places/azure_batch",),
    "azure_ml": ("places/azure_ml", "places/azure/blobs.py", "places/azure/uploads.py"),
    "mailboxes": (
        *("channels/mailbox.py", "channels/mailboxes.py", "channels/mail_channel.py"),
        *("channels/folder_mail.py", "channels/s3_mailboxes.py"),
        *("channels/supervisor/mailbox.py", "channels/supervisor/pilot.py", "places/azure/mailboxes.py"),
    ),
    "hal": ("benchmarks/hal", "cli/hal_eval.py"),
    "dashboard": ("web", "views/dashboard", "cli/serve.py"),
    "copies of runs": ("mirror",),
    "model calls": (
        *("channels/meter", "channels/supervisor/meter_process.py", "planning/models.py", "sim/models.py"),
        *("policy/allowances.py", "views/model_costs.py", "api/owners.py"),
    ),
    "isolation": (
        *(
            "channels/supervisor/isolation.py",
            "channels/supervisor/keeper.py",
            "channels/supervisor/seals.py",
        ),
        "channels/supervisor/graded_files.py",
    ),
    "damage that is noticed": ("journal/checksums.py",),
    "Windows installed, layered and watched": (
        *("benchmarks/waa/host/iso.py", "benchmarks/waa/host/qcow2.py", "benchmarks/waa/host/vm.py"),
        *("benchmarks/waa/host/results.py", "benchmarks/waa/task_log.py", "benchmarks/waa/golden_files.py"),
    ),
    "hosts that are examined": ("places/ssh/examination.py", "channels/supervisor/facts.py"),
    "watching and steering": (
        *(
            "views/alerts.py",
            "views/alert_watch.py",
            "views/progress.py",
            "views/metrics.py",
            "views/spans.py",
        ),
        *("api/telemetry.py", "api/run_changes.py", "state/run_changes.py", "effects/steps.py"),
        *("benchmarks/steps.py", "cli/alerts.py", "cli/telemetry.py", "cli/steer.py"),
        *("api/live_log.py", "channels/follow.py", "channels/supervisor/follow.py"),
    ),
    "plans of time and money": (
        *(
            "api/planner.py",
            "api/plan_review.py",
            "api/experience.py",
            "api/reconcile.py",
            "api/bills.py",
            "sim/montecarlo.py",
        ),
        *("sim/chances.py", "sim/forecast.py", "api/plan_table.py", "api/right_size.py", "policy/hedge.py"),
        *("policy/pace.py", "schedules", "cli/plan.py", "cli/cost.py", "places/azure/bills.py"),
    ),
    "tiers of places": ("policy/tiers.py", "state/circuits.py"),
    "containers, datasets and new benchmarks": (
        *("benchmarks/containers.py", "benchmarks/datasets.py", "benchmarks/start.py"),
    ),
    "comparing, sharing and rerunning": (
        *("views/compare.py", "views/ci.py", "api/archive.py", "api/rerun.py", "planning/provenance.py"),
        *(
            "planning/new_files.py",
            "api/python.py",
            "cli/completion.py",
            "cli/unattended.py",
            "views/tasks.py",
        ),
    ),
}
"""What was added after the aim for files was set (by commit 73ef4a7), and where it is: files, or rooms."""


class Function(NamedTuple):
    """A function, or a method."""

    name: str
    lines: int


class Class(NamedTuple):
    """A class. An optional one is a protocol that a plug-in may follow or not: isinstance tells."""

    name: str
    optional: bool
    names: set[str]
    """Those that it gives to methods and values."""
    bases: list[str]


class Module(NamedTuple):
    """One file, read. Its syntax tree is not kept: those of all files slow down the garbage collector."""

    path: Path  # below the package
    source: str
    functions: list[Function]
    classes: list[Class]


def run(quick: bool) -> Result:
    modules = list(read(PACKAGE / "policy" if quick else PACKAGE))
    aimed_at = figures_with_aims(modules)
    return Result("shape", other_figures(modules) | aimed_at, aims(aimed_at))


def aims(figures: Figures) -> dict[str, Aim]:
    return {
        "files_that_are_not_later": at_most(figures["files_that_are_not_later"], FILES_AIM),
        "class_names_used_twice": at_most(figures["class_names_used_twice"], TWICE_AIM),
        "optional_protocols": at_most(figures["optional_protocols"], PROTOCOLS_AIM),
        "optional_protocols_of_one": at_most(len(figures["optional_protocols_of_one"]), 0),
        "files_outside_that_name_waa": at_most(len(figures["files_outside_that_name_waa"]), OUTSIDE_AIM),
        "files_outside_that_name_azure": at_most(len(figures["files_outside_that_name_azure"]), OUTSIDE_AIM),
        "function_lines_p95": at_most(figures["function_lines_p95"], P95_AIM),
        "function_lines_longest": at_most(figures["function_lines_longest"], LONGEST_AIM),
    }


def read(package: Path) -> Iterator[Module]:
    for path in sorted(package.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        functions: list[Function] = []
        classes: list[Class] = []
        for node in definitions(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                classes.append(_class(node))
            else:
                functions.append(Function(node.name, (node.end_lineno or node.lineno) - node.lineno + 1))
        yield Module(path.relative_to(package), source, functions, classes)


def definitions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """All below a node. Only statements can hold them, which are few among the nodes of a file."""
    for block in ("body", "orelse", "handlers", "finalbody", "cases"):
        inner = getattr(node, block, ())
        for statement in inner if isinstance(inner, list) else ():
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield statement
            yield from definitions(statement)


def _class(node: ast.ClassDef) -> Class:
    optional = any(
        isinstance(mark, ast.Name) and mark.id == "runtime_checkable" for mark in node.decorator_list
    )
    names = {part.name for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)}
    for part in node.body:
        targets = part.targets if isinstance(part, ast.Assign) else [getattr(part, "target", None)]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
    return Class(node.name, optional, names, [base.id for base in bases if isinstance(base, ast.Name)])


def figures_with_aims(modules: list[Module]) -> Figures:
    lengths = sorted(function.lines for module in modules for function in module.functions)
    protocols = [each.name for module in modules for each in module.classes if each.optional]
    return {
        "files_that_are_not_later": len(modules) - sum(files_by_addition(modules).values()),
        "function_lines_p95": lengths[int(0.95 * len(lengths))],
        "function_lines_longest": lengths[-1],
        "class_names_used_twice": len(twice(modules)),
        "optional_protocols": len(protocols),
        "optional_protocols_of_one": [name for name in protocols if len(followers(modules, name)) < 2],
        "files_outside_that_name_waa": outside(modules, "benchmarks/waa", WAA),
        "files_outside_that_name_azure": outside(modules, "places/azure", AZURE, *AZURE_TOO),
    }


def other_figures(modules: list[Module]) -> Figures:
    lines = [module.source.count("\n") for module in modules]
    total = sum(lines)
    return {
        "files": len(modules),
        "files_added_later": files_by_addition(modules),
        "lines": total,
        "file_lines_mean": round(total / len(modules)),
        "file_lines_median": round(statistics.median(lines)),
        "file_lines_largest": max(lines),
        "functions_per_thousand_lines": rounded(
            1000 * sum(len(module.functions) for module in modules) / total, 3
        ),
        "comments_per_hundred_lines": rounded(100 * sum(map(comments, modules)) / total, 3),
        "private_functions_with_one_caller_percent": rounded(100 * one_caller(modules), 3),
        "top_level_rooms": len({module.path.parts[0] for module in modules}),
    }


def files_by_addition(modules: list[Module]) -> dict[str, int]:
    """How many files each later addition has; none belongs to two."""
    paths = [module.path.as_posix() for module in modules]
    return {
        addition: sum(any(is_in(path, part) for part in parts) for path in paths)
        for addition, parts in LATER.items()
    }


def is_in(path: str, part: str) -> bool:
    """Whether a file is this one, or in this room: pathlib takes a second to tell it of all."""
    return path == part or path.startswith(f"{part}/")


def comments(module: Module) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(module.source).readline)
    return sum(token.type == tokenize.COMMENT for token in tokens)


def twice(modules: list[Module]) -> list[str]:
    """Names of classes that are defined in more than one file."""
    counts = Counter(name for module in modules for name in {node.name for node in module.classes})
    return sorted(name for name, count in counts.items() if count > 1)


def one_caller(modules: list[Module]) -> float:
    """The share of functions that are private and mentioned once beside their definition."""
    alone = total = 0
    for module in modules:
        mentioned = Counter(re.findall(r"\w+", module.source))
        for node in module.functions:
            private = node.name.startswith("_") and not node.name.endswith("__")
            total += 1
            alone += private and mentioned[node.name] == 2
    return alone / total


def followers(modules: list[Module], protocol: str) -> list[str]:
    """Classes that have all names of a protocol, their own or a base's."""
    classes = {each.name: each for module in modules for each in module.classes}

    def names(name: str) -> set[str]:
        if (found := classes.get(name)) is None:
            return set()
        return found.names.union(*map(names, found.bases))

    wanted = names(protocol)
    return sorted(name for name in classes if name != protocol and wanted <= names(name))


def outside(modules: list[Module], room: str, word: re.Pattern[str], *exempt: str) -> list[str]:
    """Files that name something although they are neither in its room nor exempt."""
    return [
        str(module.path)
        for module in modules
        if not any(is_in(module.path.as_posix(), folder) for folder in (room, *exempt))
        and word.search(module.source.lower())
    ]
