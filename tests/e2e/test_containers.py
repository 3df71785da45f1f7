"""Attempts in containers: by a stand-in for an engine that tells what it was asked, and by a real podman."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from evalfleet.events import AttemptGraded
from evalfleet.model import Scored
from standins.podman import LIMITS, Podman, lacking, podman_with
from tests.e2e.harness import Fleet, task
from tests.waiting import until

SCORE = '''echo "{\\"score\\": 1}" > "$EVALFLEET_OUT/result.json"'''
STAND_IN = """#!/bin/sh
printf '%s\\n' "$*" >> "{folder}/asked"
case $1 in
  version) exit 0 ;;
  image) grep -qx "$3" "{folder}/images" 2>/dev/null ;;
  pull)
    [ "$2" != gone ] || {{ echo "no such image"; exit 1; }}
    case $2 in lost/*|shut/*)
      why="dial tcp: lookup lost: no such host"; [ $2 = lost/a ] || why="dial tcp: connection refused"
      for n in 1 2 3; do echo "level=warning msg=\\"Failed, retrying in 1s ... ($n/3). Error: $why\\""; done
      echo "Error: $why"; exit 125 ;;
    esac
    echo "$2" >> "{folder}/images" ;;
  run)
    while [ "$1" != tiny ] && [ "$1" != other ] && [ $# -gt 0 ]; do shift; done
    [ -n "$1" ] || exit 125
    echo "in $1"; shift
    exec "$@" ;;
esac
"""


def stand_in(fleet: Fleet, name: str = "docker") -> None:
    """An engine that runs commands without a container, and keeps what it was asked in the file `asked`."""
    bin = fleet.folder / "bin"
    bin.mkdir()
    (bin / name).write_text(STAND_IN.format(folder=fleet.folder))
    (bin / name).chmod(0o755)
    fleet.environ["PATH"] = f"{bin}:{fleet.environ['PATH']}"


def asked(fleet: Fleet, verb: str) -> list[str]:
    lines = (fleet.folder / "asked").read_text().splitlines()
    return [line for line in lines if line.startswith(verb + " ")]


def test_an_engine_pulls_an_image_once_and_runs_each_attempt_within_its_limits(fleet: Fleet) -> None:
    stand_in(fleet)
    fleet.bench(
        [task("a_1", "echo hello; " + SCORE), task("a_2", SCORE, image="other"), task("a_3", SCORE)],
        image="tiny",
        container={"network": "none", "cpus": 2, "memory_gb": 0.5, "pids": 100, "args": ["--read-only"]},
        secrets=["MODEL_KEY"],
        env={"COLOUR": "red"},
    )
    fleet.forks = True
    done = fleet.run(env={"MODEL_KEY": "mk-12345678"})
    assert done.code == 0, done
    assert sorted(asked(fleet, "pull")) == ["pull other", "pull tiny"]
    runs = asked(fleet, "run")
    assert len(runs) == 3
    for options in ("--network=none", "--cpus=2", "--memory=512m", "--pids-limit=100", "--read-only"):
        assert all(options in run for run in runs)
    assert all(f" -e {name} " in run for run in runs for name in ("MODEL_KEY", "COLOUR", "EVALFLEET_OUT"))
    assert not any("mk-12345678" in run for run in runs)
    assert fleet("logs", "r", "a_1").out == "in tiny\nhello\n"
    assert fleet("logs", "r", "a_2").out == "in other\n"
    assert fleet.results()["isolation"] == ["container"]
    assert "each attempt was in a container of its own" in fleet("report", "r").out


def test_isolation_by_containers_is_refused_where_there_is_no_image(fleet: Fleet) -> None:
    stand_in(fleet)
    fleet.bench([task("a_1", SCORE)], isolation="container")
    done = fleet.run()
    assert done.code == 2, done
    assert "isolation = \"container\" needs an 'image', and task a_1 has none; write one" in done.err
    fleet.bench([task("a_1", SCORE)])
    done = fleet.run("--set", "isolation=container")
    assert done.code == 2, done
    assert "place 'local' has isolation = \"container\", and b has no 'image'; write one" in done.err
    fleet.bench([task("a_1", SCORE)], image="tiny", isolation="container")
    done = fleet.run("--set", "isolation=container")
    assert done.code == 0, done
    assert "--pids-limit 4096" in asked(fleet, "run")[0]


def test_what_ran_in_containers_is_graded_once_more_in_containers(fleet: Fleet) -> None:
    stand_in(fleet)
    grader = fleet.folder / "rules" / "grade.sh"
    grader.parent.mkdir()
    grader.write_text('grep -qx "forty-two" "$EVALFLEET_GRADED_OUT/answer"\n')
    answer = "echo 42 > $EVALFLEET_OUT/answer"
    fleet.bench(
        [task("a_1", answer), task("a_2", answer, image="other")],
        image="tiny",
        score=["sh", "rules/grade.sh"],
        score_files=["rules/"],
        score_from="exit_code",
    )
    assert fleet.run().code == 0
    assert len(asked(fleet, "run")) == 4
    grader.write_text('grep -qx "42" "$EVALFLEET_GRADED_OUT/answer"\n')
    done = fleet("resume", "r", "--regrade")
    assert done.code == 0, done
    graded = fleet.recorded(AttemptGraded, 2)
    assert [event.grade.score for event in graded if isinstance(event.grade, Scored)] == [1, 1]
    assert [fleet.task(name)["score"] for name in ("a_1", "a_2")] == [0, 0], "the first grade counts"
    again = asked(fleet, "run")[4:]
    assert [image in run.split() for run, image in zip(again, ("tiny", "other"), strict=True)] == [True, True]
    (fleet.folder / "bin" / "docker").write_text("#!/bin/sh\necho no daemon; exit 1\n")
    (fleet.folder / "bin" / "podman").symlink_to("docker")
    assert "neither docker nor podman works here" in fleet("resume", "r", "--regrade", "--json").out


def test_an_image_that_cannot_be_had_stops_the_run_or_breaks_its_task(fleet: Fleet) -> None:
    stand_in(fleet)
    fleet.bench([task("a_1", SCORE)], image="gone")
    done = fleet.run()
    assert done.code == 4, done
    assert "no such image" in done.out
    fleet.bench([task("a_1", SCORE), task("a_2", SCORE, image="gone")], image="tiny")
    assert fleet("run", "./b.toml", "--name", "s", "--attempts", "1").code == 1
    assert fleet.task("a_1", "s")["score"] == 1
    assert fleet.task("a_2", "s")["cause"] == "setup"


@pytest.mark.parametrize(
    ("image", "tries", "told"),
    [
        ("shut/a", 12, "shut/a could not be pulled in 4 tries: dial tcp: connection refused"),
        ("lost/a", 2, "there is no registry of the name of lost/a: correct the name (dial tcp: lookup lost"),
    ],
)
def test_a_registry_that_does_not_answer_is_one_line(fleet: Fleet, image: str, tries: int, told: str) -> None:
    stand_in(fleet)
    (fleet.folder / "bin" / "sleep").write_text("#!/bin/sh\n")
    (fleet.folder / "bin" / "sleep").chmod(0o755)
    fleet.bench([task("a_1", SCORE)], image=image)
    done = fleet.run()
    assert done.code == 4, done
    assert told in done.out
    assert "retrying" not in done.said, "the engine's own words, time and again"
    assert len(asked(fleet, "pull")) == tries, "three machines, or one"


def test_a_machine_without_the_engine_says_so(fleet: Fleet) -> None:
    stand_in(fleet, "nothing")
    (fleet.folder / "bin" / "podman").write_text("#!/bin/sh\nexit 1\n")
    (fleet.folder / "bin" / "podman").chmod(0o755)
    fleet.bench([task("a_1", SCORE)], image="tiny", container={"engine": "podman"})
    done = fleet.run()
    assert done.code == 4, done
    assert "podman does not work here" in done.out


# -- a real engine -------------------------------------------------------------------------------

PROGRAMS = ("sh", "bash", "cat", "sleep", "ls", "id", "touch", "sort", "tr")


CANNOT = lacking(PROGRAMS)
real = pytest.mark.skipif(CANNOT is not None, reason=f"NO TEST WITH A REAL CONTAINER ENGINE: {CANNOT}")


@pytest.fixture(scope="module")
def podman() -> Iterator[Podman]:
    with podman_with(PROGRAMS) as made:
        yield made


@real
@pytest.mark.slow
def test_attempts_in_a_real_container_see_their_own_files_and_leave_nothing(
    fleet: Fleet, podman: Podman
) -> None:
    fleet.environ["PATH"] = f"{podman.folder}/bin:{fleet.environ['PATH']}"
    look = (
        "cat data/x; cat secret 2>/dev/null; (touch data/y 2>/dev/null && echo writable); "
        'echo "$COLOUR"; ls | sort | tr "\\n" " "; ' + SCORE
    )
    (fleet.folder / "data").mkdir()
    (fleet.folder / "data" / "x").write_text("from the bundle\n")
    (fleet.folder / "secret").write_text("the answer\n")
    fleet.bench(
        [
            {"id": "look_1", "params": {"do": look}},
            {"id": "slow_1", "params": {"do": "echo begun; sleep 600"}, "timeout_s": 2},
            {"id": "code_1", "params": {"do": "exit 3"}},
        ],
        command=["sh", "-c", "{params.do}"],
        files=["data/"],
        score_from="exit_code",
        env={"COLOUR": "red"},
        image="localhost/tiny",
        container={
            "engine": "podman",
            "network": "none",
            "args": [*LIMITS, *podman.grouped],
        },
    )
    done = fleet.run("--attempts", "1")
    assert done.code == 0, (done, [fleet("logs", "r", name).out for name in ("look_1", "code_1")])
    assert fleet("logs", "r", "look_1").out == "from the bundle\nred\ndata "
    assert {name: fleet.task(name)["score"] for name in ("look_1", "slow_1", "code_1")} == {
        "look_1": 1,
        "slow_1": 0,
        "code_1": 0,
    }
    assert "time limit of 2 s" in fleet.task("slow_1")["error"]
    until(lambda: not podman.ok("ps", "-aq"), lambda: podman.ok("ps", "-a"))


@real
@pytest.mark.slow
def test_a_real_container_grades_and_grades_again(fleet: Fleet, podman: Podman) -> None:
    fleet.environ["PATH"] = f"{podman.folder}/bin:{fleet.environ['PATH']}"
    (fleet.folder / "rules").mkdir()
    grader = fleet.folder / "rules" / "grade.sh"
    grader.write_text('[ "$(cat "$EVALFLEET_GRADED_OUT/answer")" = forty-two ]\n')
    fleet.bench(
        [{"id": "a_1", "params": {"do": "echo 42 > $EVALFLEET_OUT/answer"}}],
        command=["sh", "-c", "{params.do}"],
        files=[],
        score=["sh", "rules/grade.sh"],
        score_files=["rules/"],
        score_from="exit_code",
        image="localhost/tiny",
        container={"engine": "podman", "network": "none", "args": [*LIMITS, *podman.grouped]},
    )
    assert fleet.run().code == 0
    assert fleet.task("a_1")["score"] == 0
    grader.write_text('[ "$(cat "$EVALFLEET_GRADED_OUT/answer")" = 42 ]\n')
    again = fleet("resume", "r", "--regrade")
    assert "a_1 graded: pass" in again.out, again
    (attempt,) = fleet("show", "r", "a_1", "--json").json["attempts"]
    assert (attempt["score"], [grade["score"] for grade in attempt["grades"]]) == (0, [1])
    until(lambda: not podman.ok("ps", "-aq"), lambda: podman.ok("ps", "-a"))
