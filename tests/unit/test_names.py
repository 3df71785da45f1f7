"""Names: injective, stable, and refused with the fix."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from evalfleet.errors import RequestError
from evalfleet.names import (
    MAX_FILE_NAME,
    artefacts_folder,
    attempt_id,
    attempt_number,
    check_run_name,
    default_run_name,
    hint,
    machine_id,
    repeat_id,
    safe_name,
)

NASTY = st.text(st.sampled_from("aA1_.~-%2E/\\ \0\n\u00e9\ud800"), max_size=12) | st.text(max_size=300)


@given(NASTY, NASTY)
@example("%2E", ".")
@example("", "%empty")
@example("a/b", "a%2Fb")
@example("x" * 400 + "1", "x" * 400 + "2")
@example("x" * MAX_FILE_NAME, "x" * (MAX_FILE_NAME + 1))
def test_two_ids_never_share_a_file_name(one: str, other: str) -> None:
    assert (safe_name(one) == safe_name(other)) == (one == other)


@given(NASTY)
def test_a_safe_name_is_one_short_visible_ascii_file_name(id: str) -> None:
    name = safe_name(id)
    assert re.fullmatch(r"[A-Za-z0-9_~%-][A-Za-z0-9_.~%-]*", name)
    assert len(name) <= MAX_FILE_NAME


@given(NASTY)
def test_a_shortened_name_is_not_that_of_any_other_id(id: str) -> None:
    assert safe_name(safe_name(id)) != safe_name(id) or safe_name(id) == id


OURS = [
    "results.json",
    "Results.JSON",
    "worker-1_results.json",
    "report.md",
    "vm_pool_registry.json",
    "controller.log",
]


def test_a_task_called_as_a_file_of_ours_has_a_folder_that_no_other_task_has() -> None:
    tasks = [
        *OURS,
        *(f"%{ord(each[0]):02X}{each[1:]}" for each in OURS),
        "a_1",
        "a_results.json",
        ".results.json",
    ]
    folders = [artefacts_folder(each, f"{each}.0").split("/") for each in tasks]
    assert len({folder.lower() for folder, _ in folders}) == len(tasks)
    assert not {folder.lower() for folder, _ in folders} & {each.lower() for each in OURS}
    assert artefacts_folder("a_1", "a_1.0") == "a_1/a_1.0"
    assert not [
        folder for folder, _ in folders if folder.lower().endswith("_results.json") and folder[0] != "%"
    ]


@pytest.mark.parametrize(
    ("id", "name"),
    [
        ("notepad_1", "notepad_1"),
        ("a~2.0", "a~2.0"),
        ("..", "%2E."),
        (".env", "%2Eenv"),
        ("", "%empty"),
        ("a/b c", "a%2Fb%20c"),
        ("100%", "100%25"),
        ("é", "%C3%A9"),
    ],
)
def test_safe_names_are_stable(id: str, name: str) -> None:
    assert safe_name(id) == name


def test_a_long_name_is_not_cut_inside_an_escape() -> None:
    for pad in range(3):
        head = safe_name("x" * pad + "/" * 200).partition("%~")[0]
        assert re.fullmatch(r"(?:x|%2F)*", head)


@pytest.mark.parametrize("name", ["a", "7", "mybench-20261115-021455", "A.b_c-d", "x" * 60])
def test_run_names_that_are_fine(name: str) -> None:
    assert check_run_name(name) == name


@pytest.mark.parametrize("name", ["", "-a", ".a", "_a", "a b", "a/b", "x" * 61, "é", "a\n", "--help"])
def test_run_names_that_are_refused_with_the_fix(name: str) -> None:
    with pytest.raises(RequestError, match="give --name 1 to 60 letters, digits"):
        check_run_name(name)


@pytest.mark.parametrize("name", ["latest", "fleet.db", "fleet.db-wal", "vm_pool_registry.json", "LATEST"])
def test_run_names_that_are_files_of_ours_are_refused(name: str) -> None:
    with pytest.raises(RequestError, match="give another --name"):
        check_run_name(name)


def test_a_default_run_name_has_the_time_in_utc() -> None:
    assert default_run_name("mybench", 1_794_708_895_999_999) == "mybench-20261115-021455"


@given(NASTY, st.integers(0, 4_000_000_000_000_000))
@example("fleet.db", 0)
def test_a_default_run_name_is_always_valid(benchmark: str, at: int) -> None:
    name = default_run_name(benchmark, at)
    assert check_run_name(name) == name


def test_ids_are_made_of_ids() -> None:
    assert attempt_id("a.b", 2) == "a.b.2"
    assert attempt_number("a.b.2") == 2
    assert repeat_id("a_1", 3) == "a_1~3"
    assert machine_id("run", "0123456789", 7) == "run-012345-7"


def test_a_hint_is_the_nearest_or_all() -> None:
    assert hint("comand", ["command", "files"]) == "did you mean 'command'?"
    assert hint("LOCAL", ["local", "ssh"]) == "did you mean 'local'?"
    assert hint("zzz", ["b", "a"]) == "there are a, b"
    assert hint("zzz", ["a"]) == "there is only a"
    assert hint("zzz", []) == "there are none"
    assert hint("zzz", [f"n{i:02}" for i in range(20)]).endswith("n11 and 8 more")
