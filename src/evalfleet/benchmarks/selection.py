"""Which of a benchmark's tasks a run takes. Pure: the same request gives the same tasks everywhere."""

from __future__ import annotations

import fnmatch
import hashlib
import re
from collections import Counter
from collections.abc import Collection, Sequence

import msgspec
from msgspec import Struct

from evalfleet.errors import RequestError
from evalfleet.model import Task, TaskId
from evalfleet.names import hint, repeat_id

MAX_REPEAT = 1000


class Selection(Struct, frozen=True):
    tasks: tuple[Task, ...]
    warnings: tuple[str, ...] = ()


def select(
    tasks: Sequence[Task],
    *,
    first: int | None = None,
    sample: int | None = None,
    seed: int = 0,
    ids: Sequence[str] = (),
    domains: Sequence[str] = (),
    tags: Sequence[str] = (),
    exclude: Sequence[str] = (),
    among: Collection[str] | None = None,
    repeat: int = 1,
    models: Sequence[str] = (),
) -> Selection:
    """The tasks asked for, in file order; of `repeat` K > 1, K passes over them, each `<task>~<k>`.

    With several `models`, each task is there once for each of them, as `<task>@<model>`.

    `ids` and `exclude` are ids, globs and ranges: see `matching`. `domains` narrow what `first` and `sample`
    take from; `ids` stand alone. `exclude`, `tags` and `among`, the tasks of an earlier run, narrow all of
    them: what has none of the tags is left out.
    `sample` is spread over the domains in proportion to their sizes. More than there are: all of them, with a
    warning.
    """
    _check(first, sample, ids, domains, repeat)
    chosen = matching(tasks, ids) if ids else _in_domains(tasks, domains)
    left_out = {task.id for task in matching(tasks, exclude, "--exclude")}
    tagged = _tagged(tasks, tags)
    chosen = [
        task
        for task in chosen
        if task.id not in left_out and task.id in tagged and (among is None or task.id in among)
    ]
    if not chosen and tasks:
        raise RequestError(
            "no task is left to run: --tag, --exclude, --from and --only leave none of those chosen"
        )
    warnings: tuple[str, ...] = ()
    for flag, count in (("--tasks", sample), ("--first", first)):
        if count is not None and count > len(chosen):
            warnings = (f"{flag} {count} is more than there are; all {len(chosen)} tasks run",)
    if sample is not None:
        chosen = _sampled(chosen, sample, seed)
    elif first is not None:
        chosen = chosen[:first]
    return Selection(tuple(_multiplied(chosen, repeat, models)), warnings)


def _check(
    first: int | None, sample: int | None, ids: Sequence[str], domains: Sequence[str], repeat: int
) -> None:
    given = [
        flag
        for flag, value in (("--tasks", sample), ("--first", first), ("--task", ids or None))
        if value is not None
    ]
    if len(given) > 1 or (ids and domains):
        clash = given if len(given) > 1 else ["--task", "--domain"]
        raise RequestError(f"{' and '.join(clash)} cannot be combined; give one of them")
    for flag, count in (("--tasks", sample), ("--first", first)):
        if count is not None and count <= 0:
            raise RequestError(f"{flag} is {count}; give a whole number above 0")
    if not 1 <= repeat <= MAX_REPEAT:
        raise RequestError(f"--repeat is {repeat}; give a whole number from 1 to {MAX_REPEAT}")


_NUMBERED = re.compile(r"(.*?)([0-9]{1,18})", re.DOTALL)


def matching(tasks: Sequence[Task], patterns: Sequence[str], flag: str = "--task") -> list[Task]:
    """The tasks that some pattern is about, in file order. Raises RequestError for one that matches nothing.

    A pattern is the id of a task; or a glob (`web_*`); or a range `FIRST..LAST`: `web_3..9` are the ids with
    such numbers, `web_a..web_f` are two ids and what is between them in the file, and `1..20`, where no id is
    a number, are the first twenty of the file. Either end of a range may be left out.
    """
    known = {task.id: position for position, task in enumerate(tasks)}
    wanted: set[int] = set()
    for pattern in patterns:
        found = [known[TaskId(pattern)]] if pattern in known else _globbed(tasks, pattern)
        if not found and ".." in pattern:
            found = _ranged(tasks, pattern, known)
        if not found:
            what = "is not a task of the benchmark" if not _is_pattern(pattern) else "matches no task"
            raise RequestError(f"{flag} {pattern!r} {what}; {hint(pattern, known)}")
        wanted.update(found)
    return [tasks[position] for position in sorted(wanted)]


def _is_pattern(text: str) -> bool:
    return ".." in text or any(sign in text for sign in "*?[")


def _globbed(tasks: Sequence[Task], pattern: str) -> list[int]:
    if not any(sign in pattern for sign in "*?["):
        return []
    matches = re.compile(fnmatch.translate(pattern)).match
    return [position for position, task in enumerate(tasks) if matches(task.id)]


def _ranged(tasks: Sequence[Task], pattern: str, known: dict[TaskId, int]) -> list[int]:
    first, _, last = pattern.partition("..")
    low, high = _NUMBERED.fullmatch(first), _NUMBERED.fullmatch(last)
    stem = (low or high or ("", ""))[1]
    if high and low and high[1] not in ("", stem):
        low = high = None  # ids of two kinds: from the one to the other
    if (low or not first) and (high or not last) and (low or high):
        least, most = int(low[2]) if low else 0, int(high[2]) if high else 10**18
        numbers = [_NUMBERED.fullmatch(task.id) for task in tasks]
        found = [n for n, it in enumerate(numbers) if it and it[1] == stem and least <= int(it[2]) <= most]
        if found or stem:
            return found
        return [position for position in range(len(tasks)) if least <= position + 1 <= most]
    start = known.get(TaskId(first), None if first else 0)
    end = known.get(TaskId(last), None if last else len(tasks) - 1)
    return [] if start is None or end is None else list(range(start, end + 1))


def _tagged(tasks: Sequence[Task], tags: Sequence[str]) -> set[TaskId]:
    known = {tag for task in tasks for tag in task.tags}
    for tag in tags:
        if tag not in known:
            raise RequestError(f"--tag {tag!r} is on no task of the benchmark; {hint(tag, known)}")
    return {task.id for task in tasks if not tags or not set(tags).isdisjoint(task.tags)}


def _in_domains(tasks: Sequence[Task], domains: Sequence[str]) -> list[Task]:
    known = {task.domain for task in tasks}
    for domain in domains:
        if domain not in known:
            listed = ", ".join(sorted(known)[:50])
            raise RequestError(f"--domain {domain!r} is not a domain of the benchmark; it has {listed}")
    return [task for task in tasks if not domains or task.domain in domains]


def _sampled(tasks: Sequence[Task], count: int, seed: int) -> list[Task]:
    if count >= len(tasks):
        return list(tasks)
    quotas = _quotas(Counter(task.domain for task in tasks), count, seed)
    # Ranked by hash, not by a generator: another Python, and another task in the file, change nothing else.
    taken: Counter[str] = Counter()
    chosen: set[str] = set()
    for task in sorted(tasks, key=lambda task: (_rank(seed, task.id), task.id)):
        if taken[task.domain] < quotas[task.domain]:
            taken[task.domain] += 1
            chosen.add(task.id)
    return [task for task in tasks if task.id in chosen]


def _quotas(sizes: Counter[str], count: int, seed: int) -> dict[str, int]:
    """Largest remainders, ties by the seed: each share is exact up to rounding, and the sum is `count`."""
    total = sizes.total()
    quotas = {domain: count * size // total for domain, size in sizes.items()}
    by_remainder = sorted(sizes, key=lambda domain: (-(count * sizes[domain] % total), _rank(seed, domain)))
    for domain in by_remainder[: count - sum(quotas.values())]:
        quotas[domain] += 1
    return quotas


def _rank(seed: int, name: str) -> bytes:
    return hashlib.sha256(f"{seed}\0{name}".encode("utf-8", "surrogatepass")).digest()


def _multiplied(tasks: Sequence[Task], repeat: int, models: Sequence[str]) -> list[Task]:
    if repeat == 1 and len(models) < 2:
        return list(tasks)
    # Pass by pass: a run that is stopped early has every task as often as the others, give or take one.
    return [
        msgspec.structs.replace(task, id=repeat_id(task.id, k, model), origin=task.id, repeat=k, model=model)
        for k in (range(1, repeat + 1) if repeat > 1 else (0,))
        for task in tasks
        for model in (models if len(models) > 1 else ("",))
    ]
