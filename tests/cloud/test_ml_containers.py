"""Machines of Azure ML that are real containers, by podman: here the image matters, and its registry."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from evalfleet.events import AttemptStarted
from standins.azure_ml import StandIn
from standins.azure_ml.containers import PodmanNodes
from standins.podman import Podman
from standins.registry import Registry
from tests.cloud import ml_places
from tests.cloud.mail_desk import nothing_left
from tests.cloud.real_containers import PASSWORD, marks, podman, private
from tests.cloud.services import desk
from tests.cloud.test_ml_limits import begin, scored_elsewhere
from tests.waiting import until

__all__ = ["podman", "private"]  # fixtures
pytestmark = marks("AZURE ML")


@pytest.fixture
def ml(podman: Podman) -> Iterator[StandIn]:
    with StandIn(PodmanNodes(podman), ml_timing=ml_places.FAST) as made:
        yield made


def connect(ml: StandIn, private: Registry, password: str) -> None:
    """The workspace has a connection to the registry."""
    login = {"username": private.user, "password": password}
    target = {"category": "ContainerRegistry", "target": private.address, "credentials": login}
    ml.do(lambda: ml.service.connections.__setitem__("acr", {"properties": target}))


@pytest.mark.parametrize("fault", ["wrong password", "no such image"])
def test_a_pull_that_fails_for_good_stops_the_run_at_once_with_the_registrys_words(
    ml: StandIn, private: Registry, tmp_path: Path, fault: str
) -> None:
    connect(ml, private, PASSWORD if fault == "no such image" else "wrong")
    private.passwords[PASSWORD] = ("evals/tiny", "evals/none")
    at = desk(ml, tmp_path, 1, image=private.name("evals/none" if fault == "no such image" else "evals/tiny"))
    done = begin(at).wait()
    assert done.code != 0
    assert ("manifest unknown" if fault == "no such image" else "unauthorized") in done.out, done
    tokens = [line for line in private.asked if "/v2/token" in line]
    assert len(tokens) <= 4, f"it was tried again and again: {tokens}"
    assert not any(isinstance(event, AttemptStarted) for event in at.events())
    nothing_left(ml)


def test_a_registry_that_is_busy_is_asked_again(ml: StandIn, private: Registry, tmp_path: Path) -> None:
    connect(ml, private, PASSWORD)
    private.failures = 4  # an engine asks three times by itself
    at = desk(ml, tmp_path, 1, image=private.name("evals/tiny"), sleeps=0)
    done = begin(at).wait()
    assert done.code == 0, done
    assert at.results("r")["scored"] == 1
    nothing_left(ml)


def test_a_container_that_dies_without_a_word_is_given_up(
    ml: StandIn, podman: Podman, tmp_path: Path
) -> None:
    """Its job says `Running`, and another machine is heard meanwhile."""
    kept = tmp_path / "kept"
    kept.mkdir()
    at = desk(ml, tmp_path, 2, image="localhost/tiny", docker_args=f"-v {kept}:{kept}", lost_s=60)
    (tmp_path / "run.sh").write_text(
        f"if mkdir {kept}/first; then echo $EVALFLEET_OUT >{kept}/hangs; sleep 1000\n"
        f"elif mkdir {kept}/second; then sleep 160; fi\n"
        'echo \'{"score": 1}\' >"$EVALFLEET_OUT/result.json"\n'
    )
    bench = tmp_path / "b.toml"
    bench.write_text(bench.read_text().replace("timeout_s = 60", "timeout_s = 600"))
    run = begin(at, "--canary", "0", workers=2)
    until((kept / "hangs").exists, lambda: run.said)
    started = [event for event in at.events() if isinstance(event, AttemptStarted)]
    (machine,) = [each.machine for each in started if each.attempt in (kept / "hangs").read_text()]
    ml.kill(machine)
    assert ml.job(machine).status == "Running"
    assert "nothing heard of it for" in scored_elsewhere(ml, at, run, tasks=2)
    assert not podman.ok("ps", "-aq").strip(), "no container is left"
