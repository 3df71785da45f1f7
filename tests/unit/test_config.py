"""evalfleet.toml, .env files, the home, and which of several values counts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalfleet.errors import RequestError
from evalfleet.model import Verdict
from evalfleet.planning.config import (
    Config,
    environment_warnings,
    find_config,
    home_of,
    load_config,
    read_env_file,
)
from evalfleet.planning.flags import file_keys
from evalfleet.planning.request import Flags, RunRequest, settle
from evalfleet.planning.values import (
    parse_allow_broken,
    parse_duration,
    parse_names,
    parse_pairs,
    parse_share,
    parse_usd,
)


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def config_of(tmp_path: Path, text: str) -> Config:
    return load_config(written(tmp_path / "evalfleet.toml", text), tmp_path)


# Finding.


def test_the_nearest_file_up_the_tree_is_found(tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    assert find_config(deep) is None
    outer = written(tmp_path / "evalfleet.toml", "")
    assert find_config(deep) == outer
    inner = written(tmp_path / "a" / "evalfleet.toml", "")
    assert find_config(deep) == inner


def test_the_home(tmp_path: Path) -> None:
    deep = tmp_path / "a"
    deep.mkdir()
    assert home_of({}, deep) == deep / "benchmark_results"
    written(tmp_path / "evalfleet.toml", "")
    assert home_of({}, deep) == tmp_path / "benchmark_results"
    written(tmp_path / ".env", "EVALFLEET_HOME=runs")
    assert home_of({}, deep) == tmp_path / "runs"
    assert home_of({"EVALFLEET_HOME": "mine"}, deep) == deep / "mine"
    assert home_of({"EVALFLEET_HOME": "/abs"}, deep) == Path("/abs")


# The file.


def test_a_config_keeps_its_sections(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        '[defaults]\nworkers = 2\nmax-duration = "2h"\n[profiles.ci]\nkeep = true\n'
        '[places.lab]\nkind = "ssh"\n[benchmarks.b]\npath = "b.toml"\n',
    )
    assert config.base == tmp_path
    assert config.defaults == {"workers": 2, "max_duration": "2h"}
    assert config.profiles == {"ci": {"keep": True}}
    assert config.places == {"lab": {"kind": "ssh"}}
    assert config.benchmarks == {"b": {"path": "b.toml"}}
    assert load_config(None, tmp_path) == Config(base=tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[place.a]\n", "@: key 'place' is unknown; did you mean 'places'?"),
        ("[defaults]\nworker = 1", "@: [defaults]: key 'worker' is unknown; did you mean 'workers'?"),
        ("[profiles.ci]\nmodle = 1", "@: [profiles.ci]: key 'modle' is unknown; did you mean 'model'?"),
        ("defaults = 3", "@: [defaults] must be a table; write its keys under a line [defaults]"),
        ("[places]\nlab = 3", "@: [places.lab] must be a table; write its keys under a line [places.lab]"),
        (
            '[places."a,b"]\n',
            "@: [places.a,b]: the name 'a,b' cannot be used; write letters, digits, '.', '_' "
            "or '-', the first a letter or digit",
        ),
        ("[places\n", "@:1: not valid TOML: expected ']' at the end of a table declaration"),
    ],
)
def test_a_wrong_config_is_refused_with_its_place_and_the_fix(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(RequestError) as caught:
        config_of(tmp_path, text)
    assert str(caught.value).replace(str(tmp_path / "evalfleet.toml"), "@") == message


# .env files.


def test_env_files_are_read_as_people_write_them(tmp_path: Path) -> None:
    path = written(
        tmp_path / ".env",
        "# comment\n\nA=1\nexport B = two words \nC='single # \\n $X' # note\n"
        'D="a\\tb \\"q\\" \\\\ \\z"\nE=\nF=x#y #z\nG=#none\r\nH="a=b"\nA=2\n',
    )
    assert read_env_file(path) == {
        "A": "2",
        "B": "two words",
        "C": "single # \\n $X",
        "D": 'a\tb "q" \\ \\z',
        "E": "",
        "F": "x#y",
        "G": "",
        "H": "a=b",
    }


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("sk-hunter2", "not KEY=VALUE; write a name, '=' and its value on one line"),
        ("hunter2 x=1", "not KEY=VALUE; write a name, '=' and its value on one line"),
        ("=hunter2", "not KEY=VALUE; write a name, '=' and its value on one line"),
        ("1A=hunter2", "not KEY=VALUE; write a name, '=' and its value on one line"),
        ('A="hunter2', "quotes not closed, or text after them; close them on this line"),
        ("A='hunter2' x", "quotes not closed, or text after them; close them on this line"),
        ('A="hunter2\\"', "quotes not closed, or text after them; close them on this line"),
        ("A=hunter2\0", "has a NUL character; take it out"),
    ],
)
def test_a_wrong_env_line_is_told_by_its_number_and_never_shown(tmp_path: Path, line: str, what: str) -> None:
    path = written(tmp_path / "my.env", f"OK=1\n\n{line}\n")
    with pytest.raises(RequestError) as caught:
        read_env_file(path)
    assert str(caught.value) == f"{path}:3: {what}"
    assert "hunter2" not in str(caught.value)


@given(st.text(st.sampled_from("A=\"'\\ #\n$x1"), max_size=30))
def test_no_env_file_does_worse_than_a_request_error(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.env"
    path.write_text(text)
    with contextlib.suppress(RequestError):
        read_env_file(path)


def test_misspelt_variables_are_told() -> None:
    environ = {"EVALFLEET_WORKER": "3", "EVALFLEET_OUT": "x", "EVALFLEET_HOME": "y", "EVALFLEET_MODEL": "m"}
    told = environment_warnings({**environ, "EVALFLEET_DSN": "z", "OTHER": "1"})
    assert told == ["variable EVALFLEET_WORKER is ignored; did you mean 'workers'?"]


# Values.


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2h", 7200),
        ("90m", 5400),
        ("45s", 45),
        ("1h30m", 5400),
        ("3600", 3600),
        (60, 60),
        ("1.5h", 5400),
        ("2d", 172800),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text, "--max-duration") == seconds


@pytest.mark.parametrize(
    "text", ["", "0", "-5", "h", "2 hours", "30m1h", "1h1h", "nan", "inf", "1e9", True, "9999d"]
)
def test_wrong_durations(text: object) -> None:
    with pytest.raises(
        RequestError, match=r"--max-duration is .*; write a duration above 0 such as 45s, 90m"
    ):
        parse_duration(text, "--max-duration")


@pytest.mark.parametrize(("text", "usd"), [("$5", 5), ("5", 5), (5, 5), (2.5, 2.5), ("$0.50", 0.5)])
def test_money(text: object, usd: float) -> None:
    assert parse_usd(text, "--budget") == usd


@pytest.mark.parametrize("text", ["", "$", "0", "-1", "5 EUR", "nan", float("inf"), float("nan"), True])
def test_wrong_money(text: object) -> None:
    with pytest.raises(RequestError, match=r"--budget is .*; write dollars above 0 such as 5, 2.50 or"):
        parse_usd(text, "--budget")


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("3", Verdict(allow_broken=3)),
        (0, Verdict()),
        ("5%", Verdict(allow_broken=0.05, allow_broken_is_share=True)),
        ("0%", Verdict(allow_broken_is_share=True)),
    ],
)
def test_how_many_may_be_broken(text: object, verdict: Verdict) -> None:
    assert parse_allow_broken(text, "--allow-broken") == verdict


@pytest.mark.parametrize("text", ["", "-1", "1.5", 0.5, "101%", "%", "many", "²"])
def test_wrong_counts_of_broken(text: object) -> None:
    with pytest.raises(
        RequestError, match=r"--allow-broken is .*; write a whole number of tasks such as 3, or"
    ):
        parse_allow_broken(text, "--allow-broken")


def test_rates() -> None:
    assert parse_share("0.4", "--fail-under") == parse_share("40%", "--fail-under") == 0.4
    for wrong in ("40", "1.01", "-1", "140%", "", "nan"):
        with pytest.raises(
            RequestError, match=r"--fail-under is .*; write a rate from 0 to 1, or a percentage"
        ):
            parse_share(wrong, "--fail-under")


def test_names_and_pairs() -> None:
    assert parse_names("a, b,,a", "--on") == ("a", "b")
    assert parse_names(["a", "b"], "--on") == ("a", "b")
    assert parse_pairs(["a=1", "b=x=y", "a=2"], "--set") == {"a": "2", "b": "x=y"}
    with pytest.raises(RequestError, match="--set must be followed by KEY=VALUE") as caught:
        parse_pairs(["hunter2"], "--set")
    assert "hunter2" not in str(caught.value)


# Which counts.

LAYERED = '[defaults]\nworkers = 1\nmodel = "d"\nattempts = 9\n[profiles.p]\nworkers = 2\nmodel = "p"\n'


def test_flags_then_environment_then_profile_then_defaults_then_built_in(tmp_path: Path) -> None:
    config = config_of(tmp_path, LAYERED)
    environ = {"EVALFLEET_WORKERS": "3", "EVALFLEET_MODEL": ""}

    def workers(request: RunRequest, env: dict[str, str], profile: str) -> int | str | None:
        return settle(request, {**env, "EVALFLEET_PROFILE": profile}, config).workers

    assert workers(RunRequest(benchmark="b", workers=4), environ, "p") == 4
    assert workers(RunRequest(benchmark="b"), environ, "p") == 3
    assert workers(RunRequest(benchmark="b"), {}, "p") == 2
    assert workers(RunRequest(benchmark="b"), {}, "") == 1
    flags = settle(RunRequest(benchmark="b", profile="p"), environ, config)
    assert (flags.model, flags.attempts, flags.on) == (("p",), 9, ("local",))
    assert settle(RunRequest(benchmark="b"), {}, Config(base=tmp_path)) == Flags()


def test_tables_are_joined_and_a_nearer_choice_of_tasks_replaces_a_farther_one(tmp_path: Path) -> None:
    config = config_of(tmp_path, "[defaults]\ntasks = 5\nset = {a = 1, b = true}\nagent = {x = 1.5}\n")
    request = RunRequest(benchmark="b", first=2, settings={"a": "2"}, domains=["d"])
    flags = settle(request, {}, config)
    assert (flags.first, flags.tasks, flags.domain) == (2, None, ("d",))
    assert flags.set == {"a": "2", "b": "true"}
    assert flags.agent == {"x": "1.5"}


def test_ids_may_hold_commas(tmp_path: Path) -> None:
    flags = settle(RunRequest(benchmark="b", task_ids=["a,b"]), {}, Config(base=tmp_path))
    assert flags.task == ("a,b",)


@pytest.mark.parametrize(
    ("text", "request_of", "environ", "message"),
    [
        (
            "",
            lambda: RunRequest(benchmark="b", workers=0),
            {},
            "--workers is 0; write a whole number from 1 to 10000",
        ),
        (
            "",
            lambda: RunRequest(benchmark="b", max_duration="soon"),
            {},
            "--max-duration is 'soon'; write a duration above 0 such as 45s, 90m, 1h30m or 3600 (seconds)",
        ),
        (
            "",
            lambda: RunRequest(benchmark="b"),
            {"EVALFLEET_WORKERS": "many"},
            "EVALFLEET_WORKERS is 'many'; write a whole number from 1 to 10000, or auto",
        ),
        (
            "",
            lambda: RunRequest(benchmark="b", attempts="2.5"),
            {},
            "--attempts is '2.5'; write a whole number from 1 to 100",
        ),
        (
            '[defaults]\nschedule = "fast"',
            lambda: RunRequest(benchmark="b"),
            {},
            "@: [defaults] key 'schedule' is 'fast'; "
            "write one of dynamic, fifo, longest-first, round-robin, slices",
        ),
        (
            "[defaults]\nset = 3",
            lambda: RunRequest(benchmark="b"),
            {},
            "@: [defaults] key 'set' is 3; write a table such as {temperature = 0}",
        ),
        (
            "[defaults]\nset = {a = []}",
            lambda: RunRequest(benchmark="b"),
            {},
            "@: [defaults] key 'set'.a is []; write a string, a number, true or false",
        ),
        (
            "[defaults]\nmodel = 3",
            lambda: RunRequest(benchmark="b"),
            {},
            "@: [defaults] key 'model' is 3; write names such as 'a,b' or a list of them",
        ),
        (
            "[defaults]\non = 3",
            lambda: RunRequest(benchmark="b"),
            {},
            "@: [defaults] key 'on' is 3; write names such as 'a,b' or a list of them",
        ),
        (
            "[defaults]\nkeep = 3",
            lambda: RunRequest(benchmark="b"),
            {},
            "@: [defaults] key 'keep' is 3; write true or false",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_who_gave_it(
    tmp_path: Path, text: str, request_of: Callable[[], RunRequest], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(RequestError) as caught:
        settle(request_of(), environ, config_of(tmp_path, text))
    assert str(caught.value).replace(str(tmp_path / "evalfleet.toml"), "@") == message


def test_an_unknown_profile_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"evalfleet\.toml: profile 'q1' is unknown; there is only p"):
        settle(RunRequest(benchmark="b", profile="q1"), {}, config_of(tmp_path, LAYERED))
    with pytest.raises(RequestError, match=r"no evalfleet\.toml: profile 'q' is unknown; there are none"):
        settle(RunRequest(benchmark="b", profile="q"), {}, Config(base=tmp_path))


def test_every_key_of_the_file_is_a_flag_that_can_be_settled(tmp_path: Path) -> None:
    assert set(Flags.__struct_fields__) == file_keys()
    sample: dict[str, Any] = {"set": {}, "agent": {}, "schedule": "slices", "keep": False, "fail_under": 1}
    for key in file_keys():
        settle(RunRequest(benchmark="b"), {}, Config(base=tmp_path, defaults={key: sample.get(key, "1")}))
