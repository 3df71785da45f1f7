"""The command benchmark: what it runs, what it ships, and what results mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from evalfleet.benchmarks import containers
from evalfleet.benchmarks import spec as bundles
from evalfleet.benchmarks.command import CommandBenchmark
from evalfleet.benchmarks.loaded import Repeated
from evalfleet.benchmarks.results import read_result, scored_apart
from evalfleet.benchmarks.spec import CommandSpec
from evalfleet.errors import RequestError
from evalfleet.model import (
    AttemptId,
    Broken,
    Cause,
    Command,
    Ended,
    EndReason,
    Measured,
    Needs,
    Outcome,
    Scored,
    SetupStep,
    Task,
    TaskId,
)
from evalfleet.ports import Benchmark, Stepped

TASK = Task(TaskId("a_1"), "a", {"n": 3, "s": "x y", "l": [1, True, None]}, timeout_s=60, stall_s=7)


def spec(**changes: Any) -> CommandSpec:
    return CommandSpec(**{"name": "b", "root": "/nowhere", "command": ("run", "{task_id}"), **changes})


def outcome(ended: Ended, *, healthy: bool = True, **changes: Any) -> Outcome:
    return CommandBenchmark(spec(**changes)).outcome(TASK, ended, healthy)


def exited(result: object, code: int = 0) -> Ended:
    raw = result if isinstance(result, bytes) else json.dumps(result).encode()
    return Ended("exited", exit_code=code, result=raw)


def broken(ended: Ended) -> Broken:
    found = outcome(ended)
    assert isinstance(found, Broken)
    return found


# The command.


def test_placeholders_are_replaced_and_other_braces_stay() -> None:
    words = ("{task_id}-{domain}", "{attempt}", "{params.n}{params.s}", "{params.l}", "{x} {} ${HOME} {{n}}")
    command = CommandBenchmark(spec(command=words)).command(TASK, AttemptId("a_1.2"))
    assert command.argv == ("a_1-a", "2", "3x y", "[1,true,null]", "{x} {} ${HOME} {{n}}")


def test_what_is_put_in_is_not_looked_at_again() -> None:
    task = Task(TaskId("{domain}"), "{attempt}", {"n": "{task_id}"})
    command = CommandBenchmark(spec(command=("r", "{task_id}{domain}{params.n}"))).command(
        task, AttemptId("t.0")
    )
    assert command.argv[1] == "{domain}{attempt}{task_id}"


def test_the_environment_of_a_command() -> None:
    bench = CommandBenchmark(
        spec(secrets=("KEY",)), model="m", agent={"steps": "5"}, settings={"temperature": "0"}
    )
    command = bench.command(TASK, AttemptId("a_1.0"))
    assert command.secrets == ("KEY",)
    assert command.env == {
        "EVALFLEET_TASK_ID": "a_1",
        "EVALFLEET_ATTEMPT": "0",
        "EVALFLEET_PARAMS": '{"n":3,"s":"x y","l":[1,true,null]}',
        "EVALFLEET_MODEL": "m",
        "EVALFLEET_AGENT": '{"steps":"5"}',
        "EVALFLEET_SETTINGS": '{"temperature":"0"}',
    }


def test_what_was_not_given_is_not_in_the_environment() -> None:
    env = CommandBenchmark(spec()).command(TASK, AttemptId("a_1.0")).env
    assert sorted(env) == ["EVALFLEET_ATTEMPT", "EVALFLEET_PARAMS", "EVALFLEET_TASK_ID"]


def test_a_repeat_sees_the_id_it_knows_and_its_number() -> None:
    bench: Benchmark = Repeated.times(CommandBenchmark(spec()), 3)
    task = msgspec.structs.replace(TASK, id=TaskId("a_1~2"))
    command = bench.command(task, AttemptId("a_1~2.0"))
    assert command.argv == ("run", "a_1")
    assert command.env["EVALFLEET_REPEAT"] == "2"
    assert bench.outcome(task, exited({"score": 1}), True) == Scored(1.0, success=True)
    inner = CommandBenchmark(spec())
    assert Repeated.times(inner, 1) is inner


def test_steps_of_repeats_are_read_as_those_of_one() -> None:
    repeated = Repeated.times(CommandBenchmark(spec(steps="out/steps.jsonl")), 3)
    assert isinstance(repeated, Stepped)
    assert repeated.steps == "out/steps.jsonl"
    assert [step.action for step in repeated.read_steps(b'{"n": 1, "action": "click"}\n').steps] == ["click"]
    without = Repeated.times(CommandBenchmark(spec()), 3)
    assert isinstance(without, Stepped)
    assert not without.steps


def test_a_spec_makes_an_equal_benchmark_after_a_trip_through_json() -> None:
    bench = CommandBenchmark(
        spec(
            setup=(("s", "1"),),
            probe=("p",),
            on_timeout="broken",
            secrets=("K",),
            needs=Needs(cpus=2),
            slots=4,
        )
    )
    again = CommandBenchmark.from_spec(msgspec.json.decode(msgspec.json.encode(bench.to_spec())))
    assert again.spec == bench.spec
    assert again.needs == Needs(cpus=2)
    assert again.probe == Command(("p",))
    assert CommandBenchmark(spec()).probe is None


# The bundle.


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "run.sh").write_text("echo")
    (tmp_path / "data" / "deep").mkdir(parents=True)
    (tmp_path / "data" / "deep" / "x.txt").write_text("x")
    return tmp_path


def bundle_of(root: Path, *files: str, setup: tuple[tuple[str, ...], ...] = ()) -> CommandBenchmark:
    return CommandBenchmark(spec(root=str(root), files=files, setup=setup))


def test_a_bundle_names_files_by_their_relative_path_and_counts_contents_once(root: Path) -> None:
    bundle = bundle_of(root, "data/", "run.sh", "./run.sh", "data/deep/x.txt", setup=(("a",), ("b",))).bundle
    assert bundle.files == {"data": str(root / "data"), "run.sh": str(root / "run.sh")}
    assert bundle.steps == (SetupStep("setup-1", Command(("a",))), SetupStep("setup-2", Command(("b",))))
    assert bundle_of(root, "data/deep/x.txt").bundle.files == {
        "data/deep/x.txt": str(root / "data/deep/x.txt")
    }


def test_the_digest_depends_on_names_modes_contents_and_steps_alone(root: Path) -> None:
    def digest(*files: str, setup: tuple[tuple[str, ...], ...] = ()) -> str:
        return bundle_of(root, *files, setup=setup).bundle.digest

    seen = [digest("data", "run.sh")]
    assert digest("run.sh", "data/") == seen[0]
    seen += [digest("data"), digest("data", "run.sh", setup=(("a",),))]
    (root / "run.sh").chmod(0o755)
    seen.append(digest("data", "run.sh"))
    (root / "run.sh").chmod(0o711)  # only the owner's x counts: umasks differ
    assert digest("data", "run.sh") == seen[-1]
    (root / "data" / "deep" / "x.txt").write_text("y")
    seen.append(digest("data", "run.sh"))
    (root / "data" / "empty").mkdir()
    seen.append(digest("data", "run.sh"))
    (root / "data" / "deep" / "x.txt").rename(root / "data" / "deep" / "z.txt")
    seen.append(digest("data", "run.sh"))
    assert len(set(seen)) == len(seen)


def test_a_run_with_an_image_goes_on_with_a_later_version_whose_script_is_another(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = spec(root=str(root), files=("run.sh",), image="localhost/tiny")
    planned = msgspec.structs.replace(planned, digest=bundles.bundle_of(planned).digest)
    bundles.keep_bundles(planned, (), tmp_path / "kept", lambda _: None)
    monkeypatch.setattr(containers, "PULL", containers.PULL + "# said otherwise\n")
    assert bundles.bundle_of(planned, tmp_path / "kept").digest == planned.digest
    other = msgspec.structs.replace(planned, image="localhost/other", digest="")
    assert bundles.bundle_of(other).digest != planned.digest
    (tmp_path / "kept" / planned.digest / "run.sh").write_text("changed")
    with pytest.raises(RequestError, match="were changed"):
        bundles.bundle_of(planned, tmp_path / "kept")


def test_a_run_with_an_image_of_a_version_that_digested_its_script_goes_on(
    root: Path, tmp_path: Path
) -> None:
    planned = spec(root=str(root), files=("run.sh",), image="localhost/tiny", digest="0" * 64)
    (tmp_path / planned.digest).mkdir()
    (tmp_path / planned.digest / "run.sh").write_text("as it was")
    assert bundles.bundle_of(planned, tmp_path).digest == planned.digest
    without_files = msgspec.structs.replace(planned, files=())
    assert bundles.bundle_of(without_files, tmp_path / "nothing").digest == planned.digest


def test_the_digest_is_computed_once(root: Path) -> None:
    bench = bundle_of(root, "run.sh")
    first = bench.bundle
    (root / "run.sh").write_text("other")
    assert bench.bundle is first


def test_a_file_that_went_away_is_told(root: Path) -> None:
    bench = bundle_of(root, "run.sh")
    (root / "run.sh").unlink()
    with pytest.raises(RequestError, match=r"run\.sh: cannot be read \(no such file"):
        _ = bench.bundle


# Results.


@pytest.mark.parametrize("score", [0, 0.0, 0.25, 1, 1.0])
@pytest.mark.parametrize("code", [0, 1, 137])
def test_a_valid_result_is_a_score_whatever_the_exit_code(score: float, code: int) -> None:
    assert outcome(exited({"score": score}, code)) == Scored(float(score), success=score == 1)


@pytest.mark.parametrize(
    "reason", ["timed_out", "stalled", "lost", "evicted", "lease", "stopped", "failed_to_start"]
)
def test_a_valid_result_wins_over_every_other_end(reason: EndReason) -> None:
    assert outcome(Ended(reason, result=b'{"score": 0.5}'), healthy=False) == Scored(0.5)


def test_all_that_a_result_may_tell() -> None:
    told = {
        "score": 0.5,
        "success": True,
        "num_steps": 5,
        "cost_usd": 0.25,
        "error": "late",
        "screenshots": ["step_0.png", "more/step_1.png"],
    }
    expected = Scored(0.5, True, 5, 0.25, "late", ("step_0.png", "more/step_1.png"))
    assert outcome(exited(told)) == expected
    assert outcome(exited(b"\xef\xbb\xbf" + json.dumps(told).encode())) == expected
    assert outcome(exited({"score": 1, "success": False, "num_steps": None})) == Scored(1.0, success=False)


MORE = {
    "metrics": {"lines": 12, "ok": True, "share": 0.5},
    "tokens": {"in": 9, "out": 3},
    "metadata": {"a": [1]},
}


def test_numbers_tokens_and_metadata_are_kept_whatever_comes_of_the_attempt() -> None:
    expected = Measured({"lines": 12.0, "ok": 1.0, "share": 0.5}, {"in": 9, "out": 3}, {"a": [1]})
    assert outcome(exited({"score": 1, **MORE})) == Scored(1.0, True, measured=expected)
    for told in ({"broken": "model"}, {"broken": "x"}, {"score": 7}, {}):
        assert outcome(exited({**told, **MORE})).measured == expected, told
    assert outcome(exited({"score": 1, "tokens": 12})).measured == Measured(tokens={"total": 12})
    assert outcome(exited({"score": 1, "metrics": {}, "tokens": None})).measured is None


def test_numbers_that_are_none_are_left_out_and_named() -> None:
    told = {"metrics": {"a": "x", "b": 2}, "tokens": {"in": -1}, "metadata": {"big": "x" * 20_000}}
    found = outcome(exited({"score": 1, **told}))
    assert isinstance(found, Scored)
    assert (found.score, found.measured) == (1.0, Measured({"b": 2.0}))
    assert found.error == "ignored in result.json: metrics.a, tokens.in, metadata"


def test_a_score_command_has_the_metrics_and_the_attempt_its_tokens() -> None:
    own = exited({"score": 1, "metrics": {"mine": 1}, "tokens": {"in": 9}, "metadata": {"agent": "x"}})
    graded = scored_apart(TASK, own, exited({"score": 0.5, "metrics": {"tests": 3}}))
    assert graded.measured == Measured({"tests": 3.0}, {"in": 9})


@pytest.mark.parametrize(
    ("told", "cause"),
    [
        ({"broken": "model"}, Cause.MODEL),
        ({"broken": "nonsense"}, Cause.RESULT),
        ({"score": 7}, Cause.RESULT),
        ({}, Cause.RESULT),
    ],
)
def test_what_broke_tells_its_cost_too(told: dict[str, object], cause: Cause) -> None:
    broken = outcome(exited({**told, "cost_usd": 0.25}))
    assert isinstance(broken, Broken)
    assert (broken.cause, broken.cost_usd) == (cause, 0.25)
    assert outcome(exited({**told, "cost_usd": -1})) == outcome(exited(told))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("success", "yes"),
        ("success", 1),
        ("num_steps", -1),
        ("num_steps", 1.5),
        ("num_steps", True),
        ("num_steps", 10**400),
        ("cost_usd", -0.1),
        ("cost_usd", "1"),
        ("cost_usd", 10**400),
        ("error", {"a": 1}),
        ("screenshots", "a.png"),
        ("screenshots", ["/etc/passwd"]),
        ("screenshots", ["../../x"]),
        ("screenshots", [1]),
        ("screenshots", [""]),
        ("metrics", [1]),
        ("metrics", {"": 1}),
        ("tokens", "many"),
        ("metadata", "x"),
    ],
)
def test_a_wrong_optional_field_never_breaks_a_score(key: str, value: object) -> None:
    expected = Scored(1.0, success=True, error=f"ignored in result.json: {key}")
    assert outcome(exited({"score": 1, key: value})) == expected


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (b"", "result.json is empty; write an object with a score from 0 to 1"),
        (b"{", "result.json is not JSON (Input data was truncated)"),
        (b'{"score": NaN}', "result.json is not JSON (JSON is malformed"),
        (b"\xff\xfe", "result.json is not JSON ("),
        (b"[" * 100_000, "result.json is not JSON ("),
        (b"1", "result.json is not a JSON object; write an object"),
        (b"{}", "result.json has no score; write a number from 0 to 1"),
        (b'{"score": null}', "result.json has no score"),
        (b'{"score": true}', "result.json has a score that is no number (True)"),
        (b'{"score": "1"}', "result.json has a score that is no number ('1')"),
        (b'{"score": 1.01}', "result.json has a score of 1.01; write a number from 0 to 1"),
        (b'{"score": -1}', "result.json has a score of -1; write a number from 0 to 1"),
        (b'{"score": 1e400}', "result.json is not JSON ("),
        (b'{"score": 1' + b"0" * 400 + b"}", "result.json has a score that is no number (1000"),
    ],
)
def test_an_unusable_result_is_broken_and_says_what_is_wrong(raw: bytes, what: str) -> None:
    found = broken(exited(raw))
    assert found.cause is Cause.RESULT
    assert found.detail.startswith(what)
    assert found.detail.endswith("(exit code 0)")


@pytest.mark.parametrize("cause", ["model", "setup", "readiness", "stuck", "internal"])
def test_a_result_may_declare_what_broke_the_attempt(cause: str) -> None:
    assert outcome(exited({"broken": cause, "error": "429"})) == Broken(Cause(cause), "429")
    assert outcome(Ended("timed_out", result=json.dumps({"broken": cause, "score": 1}).encode())) == Broken(
        Cause(cause), "declared by result.json"
    )


@pytest.mark.parametrize("cause", ["evicted", "nonsense", 1, True, ["model"]])
def test_only_some_causes_can_be_declared(cause: object) -> None:
    found = broken(exited({"broken": cause}))
    assert found.cause is Cause.RESULT
    assert f"has broken = {cause!r}; write one of setup, readiness, stuck, model, internal" in found.detail


def test_a_result_may_tell_how_long_the_task_took_and_which_limit_it_kept() -> None:
    told = outcome(exited({"score": 0, "seconds": 12.5, "limit_s": 60}))
    assert told == Scored(0.0, seconds=12.5, limit_s=60.0)
    told = outcome(exited({"score": 0, "seconds": -1, "limit_s": "x"}))
    assert told == Scored(0.0, error="ignored in result.json: seconds, limit_s")
    absurd = {"seconds": 1e18, "limit_s": 1e300, "cost_usd": 1e9, "num_steps": 10**12}
    told = outcome(exited({"score": 0, **absurd}))
    assert told == Scored(0.0, error="ignored in result.json: num_steps, cost_usd, seconds, limit_s")


def test_a_score_beside_a_null_broken_counts() -> None:
    assert outcome(exited({"broken": None, "score": 1})) == Scored(1.0, success=True)


@pytest.mark.parametrize(
    ("code", "detail"),
    [
        (0, "exit code 0, no result.json: the tail"),
        (3, "exit code 3, no result.json: the tail"),
        (
            127,
            "exit code 127 (command not found; install it in setup or list it in files), "
            "no result.json: the tail",
        ),
        (
            126,
            "exit code 126 (not executable; chmod +x it or name its interpreter), no result.json: the tail",
        ),
        (137, "exit code 137 (killed by signal 9), no result.json: the tail"),
        (-9, "exit code -9 (killed by signal 9), no result.json: the tail"),
        (None, "ended, no result.json: the tail"),
    ],
)
def test_an_end_without_a_result_says_how(code: int | None, detail: str) -> None:
    assert outcome(Ended("exited", exit_code=code, detail=" the tail\n")) == Broken(Cause.RESULT, detail)


def test_the_time_limit_of_a_healthy_machine_is_the_agents() -> None:
    limit = "time limit of 60 s reached"
    scored = Scored(0.0, success=False, limit_s=60.0, error=limit)
    assert outcome(Ended("timed_out")) == scored
    assert outcome(Ended("timed_out", result=b'{"sco')) == scored
    assert outcome(Ended("timed_out"), on_timeout="broken") == Broken(Cause.TIMEOUT, limit)
    for on_timeout in ("zero", "broken"):
        stuck = outcome(Ended("timed_out"), healthy=False, on_timeout=on_timeout)
        assert stuck == Broken(Cause.STUCK, f"{limit}, and the machine did not answer its probe")


@pytest.mark.parametrize("on_timeout", ["zero", "broken"])
def test_an_attempt_that_wrote_nothing_for_too_long_is_stuck(on_timeout: str) -> None:
    found = outcome(Ended("stalled", detail="step 3 of 9\n"), on_timeout=on_timeout)
    silence = "nothing was written to the log or the artefacts for 7 s"
    assert found == Broken(Cause.STUCK, f"{silence}: step 3 of 9")


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("lost", Cause.MACHINE_LOST),
        ("evicted", Cause.EVICTED),
        ("lease", Cause.CONNECTION),
        ("stopped", Cause.CANCELLED),
        ("failed_to_start", Cause.SETUP),
    ],
)
@pytest.mark.parametrize("result", [None, b"{"])
def test_other_ends_have_their_cause(reason: EndReason, cause: Cause, result: bytes | None) -> None:
    found = outcome(Ended(reason, result=result, detail="why"))
    assert isinstance(found, Broken)
    assert found.cause is cause
    assert found.detail.endswith(": why")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)
KEYS = st.sampled_from(
    [
        "score",
        "success",
        "num_steps",
        "cost_usd",
        "error",
        "screenshots",
        "broken",
        "metrics",
        "tokens",
        "metadata",
    ]
)
RESULTS = st.dictionaries(KEYS, JSON | st.sampled_from([0, 1, 0.5, "model"])).map(
    lambda data: json.dumps(data).encode()
)


@given(st.binary() | RESULTS | RESULTS.map(lambda raw: raw[:-1]), st.booleans())
@example(b'{"score": 1, "error": "\\ud800"}', True)
@example(b'{"score": 1, "error": "\\ud800\\u0041", "screenshots": ["\\ud800x"]}', True)
def test_no_bytes_ever_raise_and_every_outcome_can_be_recorded(raw: bytes, healthy: bool) -> None:
    read_result(raw)
    for reason in ("exited", "timed_out", "lost"):
        found = outcome(Ended(reason, exit_code=1, result=raw), healthy=healthy)
        assert msgspec.json.decode(msgspec.json.encode(found), type=Scored | Broken) == found
        if isinstance(found, Scored):
            assert 0 <= found.score <= 1
