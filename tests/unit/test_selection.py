"""Which tasks a run takes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalfleet.benchmarks.selection import select
from evalfleet.errors import RequestError
from evalfleet.model import Task, TaskId


def tasks(**sizes: int) -> list[Task]:
    return [Task(TaskId(f"{domain}_{n}"), domain) for domain, size in sizes.items() for n in range(size)]


def ids(chosen: tuple[Task, ...]) -> list[str]:
    return [task.id for task in chosen]


ALL = tasks(a=60, b=30, c=10)


def test_without_a_request_all_tasks_run_in_file_order() -> None:
    assert select(ALL).tasks == tuple(ALL)


def test_first_takes_file_order() -> None:
    assert ids(select(ALL, first=3).tasks) == ["a_0", "a_1", "a_2"]


def test_a_sample_is_spread_over_the_domains_in_proportion_and_kept_in_file_order() -> None:
    chosen = select(ALL, sample=10).tasks
    assert Counter(task.domain for task in chosen) == {"a": 6, "b": 3, "c": 1}
    assert list(chosen) == [task for task in ALL if task in chosen]


def test_a_sample_is_the_same_everywhere_and_another_with_another_seed() -> None:
    assert ids(select(ALL, sample=4, seed=7).tasks) == ids(select(ALL, sample=4, seed=7).tasks)
    # As it was when this was written: a change would change everyone's samples.
    assert ids(select(tasks(a=4, b=4), sample=4, seed=0).tasks) == ["a_0", "a_1", "b_1", "b_3"]
    assert select(ALL, sample=20, seed=1) != select(ALL, sample=20, seed=2)


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 9), min_size=1), st.data())
def test_a_sample_has_its_size_and_shares_exact_up_to_rounding(
    sizes: dict[str, int], data: st.DataObject
) -> None:
    everything = tasks(**sizes)
    count = data.draw(st.integers(1, len(everything)))
    chosen = select(everything, sample=count, seed=data.draw(st.integers())).tasks
    assert len(set(ids(chosen))) == len(chosen) == count
    for domain, taken in Counter(task.domain for task in chosen).items():
        assert abs(taken - count * sizes[domain] / len(everything)) < 1


@pytest.mark.parametrize("flag", ["sample", "first"])
def test_more_than_there_are_is_all_and_said(flag: str) -> None:
    selection = select(ALL, first=101 if flag == "first" else None, sample=101 if flag == "sample" else None)
    assert selection.tasks == tuple(ALL)
    name = "--first" if flag == "first" else "--tasks"
    assert selection.warnings == (f"{name} 101 is more than there are; all 100 tasks run",)


def test_ids_are_taken_once_in_file_order() -> None:
    assert ids(select(ALL, ids=["b_1", "a_3", "b_1"]).tasks) == ["a_3", "b_1"]


def test_domains_narrow_and_combine_with_samples_and_repeats() -> None:
    chosen = select(ALL, domains=["c", "b"], sample=4, repeat=2).tasks
    assert Counter(task.domain for task in chosen) == {"b": 6, "c": 2}
    assert len(select(ALL, domains=["c"]).tasks) == 10


def test_tags_narrow_whatever_else_was_asked_for() -> None:
    tagged = [
        Task(TaskId(f"a_{n}"), "a", tags=(("quick",) if n % 2 else ()) + (("new",) if n > 6 else ()))
        for n in range(10)
    ]
    assert ids(select(tagged, tags=["quick"]).tasks) == ["a_1", "a_3", "a_5", "a_7", "a_9"]
    assert ids(select(tagged, tags=["quick", "new"], first=5).tasks) == ["a_1", "a_3", "a_5", "a_7", "a_8"]
    assert ids(select(tagged, tags=["new"], ids=["a_1..8"]).tasks) == ["a_7", "a_8"]
    with pytest.raises(RequestError, match="--tag 'qick' is on no task of the benchmark; did you mean"):
        select(tagged, tags=["qick"])
    with pytest.raises(RequestError, match="no task is left to run"):
        select(tagged, tags=["new"], ids=["a_1"])


def test_repeats_are_passes_with_numbered_ids() -> None:
    chosen = select(tasks(a=2), repeat=2).tasks
    assert ids(chosen) == ["a_0~1", "a_1~1", "a_0~2", "a_1~2"]
    assert {task.domain for task in chosen} == {"a"}
    assert ids(select(tasks(a=1), repeat=1).tasks) == ["a_0"]


@pytest.mark.parametrize("count", [0, -1])
def test_counts_that_are_not_above_zero_are_refused(count: int) -> None:
    with pytest.raises(RequestError, match=f"--tasks is {count}; give a whole number above 0"):
        select(ALL, sample=count)
    with pytest.raises(RequestError, match=f"--first is {count}; give a whole number above 0"):
        select(ALL, first=count)
    with pytest.raises(RequestError, match=f"--repeat is {count}; give a whole number from 1 to 1000"):
        select(ALL, repeat=count)


def test_an_unknown_id_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        RequestError, match=r"--task 'c-9' is not a task of the benchmark; did you mean .*'c_9'"
    ):
        select(ALL, ids=["c-9"])


def test_an_unknown_domain_is_refused_with_all() -> None:
    with pytest.raises(RequestError, match="--domain 'x' is not a domain of the benchmark; it has a, b, c"):
        select(ALL, domains=["a", "x"])


def test_ways_to_choose_exclude_each_other() -> None:
    with pytest.raises(RequestError, match="--tasks and --first cannot be combined; give one of them"):
        select(ALL, sample=1, first=1)
    with pytest.raises(RequestError, match="--first and --task cannot be combined"):
        select(ALL, first=1, ids=["a_1"])
    with pytest.raises(RequestError, match="--task and --domain cannot be combined"):
        select(ALL, domains=["a"], ids=["a_1"])


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("b_3", ["b_3"]),
        ("c_*", [f"c_{n}" for n in range(10)]),
        ("[ab]_?", [f"{d}_{n}" for d in "ab" for n in range(10)]),
        ("a_8..11", ["a_8", "a_9", "a_10", "a_11"]),
        ("a_58..a_99", ["a_58", "a_59"]),
        ("c_8..", ["c_8", "c_9"]),
        ("..c_1", ["c_0", "c_1"]),
        ("a_59..b_1", ["a_59", "b_0", "b_1"]),
        ("1..2", ["a_0", "a_1"]),
        ("..1", ["a_0"]),
        ("100..", ["c_9"]),
    ],
)
def test_a_task_may_be_a_glob_or_a_range(pattern: str, expected: list[str]) -> None:
    assert ids(select(ALL, ids=[pattern]).tasks) == expected


def test_a_range_of_numbers_means_ids_where_ids_are_numbers() -> None:
    numbered = [Task(TaskId(str(n))) for n in (10, 7, 8, 9)]
    assert ids(select(numbered, ids=["8..9"]).tasks) == ["8", "9"]


def test_an_id_that_looks_like_a_pattern_is_itself() -> None:
    odd = [Task(TaskId(id)) for id in ("a*", "ab", "1..2", "x[1]")]
    for id in ("a*", "1..2", "x[1]"):
        assert ids(select(odd, ids=[id]).tasks) == [id]


@pytest.mark.parametrize("pattern", ["z_*", "a_70..80", "b_1..a_1", "z_1..z_2", "no..where"])
def test_a_pattern_that_matches_nothing_is_refused(pattern: str) -> None:
    with pytest.raises(RequestError, match=r"--task .* matches no task"):
        select(ALL, ids=[pattern])


def test_what_is_excluded_and_what_an_earlier_run_did_not_have_is_not_chosen_from() -> None:
    assert ids(select(ALL, domains=["c"], exclude=["c_2..7", "c_0"]).tasks) == ["c_1", "c_8", "c_9"]
    assert ids(select(ALL, exclude=["a_*", "b_*"], first=2).tasks) == ["c_0", "c_1"]
    assert ids(select(ALL, among={"a_3", "c_1", "c_2"}, exclude=["c_2"]).tasks) == ["a_3", "c_1"]
    with pytest.raises(RequestError, match="--exclude 'zz' is not a task"):
        select(ALL, exclude=["zz"])
    with pytest.raises(RequestError, match="no task is left"):
        select(ALL, ids=["a_1"], exclude=["a_*"])


def test_a_repeat_knows_its_task_and_its_number() -> None:
    chosen = select(tasks(a=1), repeat=2).tasks
    assert [(task.id, task.origin, task.repeat) for task in chosen] == [
        ("a_0~1", "a_0", 1),
        ("a_0~2", "a_0", 2),
    ]


def test_models_and_repeats_multiply_tasks_pass_by_pass() -> None:
    chosen = select(tasks(a=2), repeat=2, models=["m", "n/1"]).tasks
    assert ids(chosen)[:5] == ["a_0@m~1", "a_0@n/1~1", "a_1@m~1", "a_1@n/1~1", "a_0@m~2"]
    assert {(task.origin, task.model, task.repeat) for task in chosen} == {
        (id, model, k) for id in ("a_0", "a_1") for model in ("m", "n/1") for k in (1, 2)
    }
    assert ids(select(tasks(a=1), models=["m", "n"]).tasks) == ["a_0@m", "a_0@n"]
    assert select(ALL, models=["m"]).tasks == tuple(ALL)
