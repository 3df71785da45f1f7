"""Which of a benchmark's tasks a run takes. Pure: the same request gives the same tasks everywhere."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from evalfleet.errors import RequestError
from evalfleet.model import Task
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
    repeat: int = 1,
) -> Selection:
    """The tasks asked for, in file order; of `repeat` K > 1, K passes over them, each `<task>~<k>`.

    `domains` narrow what `first` and `sample` take from; `ids` stand alone. `sample` is spread over the
    domains in proportion to their sizes. More than there are: all of them, with a warning.
    """
    _check(first, sample, ids, domains, repeat)
    chosen = _named(tasks, ids) if ids else _in_domains(tasks, domains)
    warnings: tuple[str, ...] = ()
    for flag, count in (("--tasks", sample), ("--first", first)):
        if count is not None and count > len(chosen):
            warnings = (f"{flag} {count} is more than there are; all {len(chosen)} tasks run",)
    if sample is not None:
        chosen = _sampled(chosen, sample, seed)
    elif first is not None:
        chosen = chosen[:first]
    return Selection(tuple(_repeated(chosen, repeat)), warnings)


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


def _named(tasks: Sequence[Task], ids: Sequence[str]) -> list[Task]:
    known = {task.id for task in tasks}
    for id in ids:
        if id not in known:
            raise RequestError(f"--task {id!r} is not a task of the benchmark; {hint(id, known)}")
    wanted = set(ids)
    return [task for task in tasks if task.id in wanted]


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


def _repeated(tasks: Sequence[Task], repeat: int) -> list[Task]:
    if repeat == 1:
        return list(tasks)
    # Pass by pass: a run that is stopped early has every task as often as the others, give or take one.
    return [
        msgspec.structs.replace(task, id=repeat_id(task.id, k))
        for k in range(1, repeat + 1)
        for task in tasks
    ]
