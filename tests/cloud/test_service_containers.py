"""Machines of Batch and Azure ML that are real containers, by podman: here the image matters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from standins import azure_batch, azure_ml
from standins.azure_batch.containers import PodmanNodes as BatchNodes
from standins.azure_ml.containers import PodmanNodes as MlNodes
from standins.podman import Podman
from tests.cloud import batch_places, ml_places
from tests.cloud.mail_desk import nothing_left
from tests.cloud.real_containers import import_bare, marks, podman
from tests.cloud.services import Service, desk, in_image

__all__ = ["podman"]  # a fixture
pytestmark = marks("SERVICES")
RUN = ("run", "b.toml", "--on", "p", "--workers", "1", "--name", "r")


@pytest.fixture(params=["ml", "batch"])
def contained(request: pytest.FixtureRequest, podman: Podman) -> Iterator[Service]:
    if request.param == "ml":
        with azure_ml.StandIn(MlNodes(podman), ml_timing=ml_places.FAST) as ml:
            yield ml
    else:
        with azure_batch.StandIn(nodes=BatchNodes(podman), timing=batch_places.FAST) as batch:
            yield batch


def test_tasks_run_in_a_container_of_the_image(contained: Service, podman: Podman, tmp_path: Path) -> None:
    at = desk(contained, tmp_path, 2, sleeps=0, **in_image(contained, "localhost/tiny"))
    script = tmp_path / "run.sh"
    script.write_text(f'ls /etc > "$EVALFLEET_OUT/etc"\n{script.read_text()}')
    done = at(*RUN)
    assert done.code == 0, done
    seen = [file.read_text().split() for file in (tmp_path / "results/r").glob("t*/t*.0/etc")]
    assert len(seen) == 2
    assert all("debian_version" not in names for names in seen), "it ran on this computer, in no container"
    nothing_left(contained)
    assert not podman.ok("ps", "-aq").strip(), "no container is left"


def test_an_image_without_python_is_refused_in_one_line(
    contained: Service, podman: Podman, tmp_path: Path
) -> None:
    at = desk(contained, tmp_path, 1, **in_image(contained, import_bare(podman)))
    done = at(*RUN)
    assert done.code != 0
    assert "the image has no python3; name an `image` with Python 3.8 or later" in done.out
    assert len(at.state("r").machines) <= 2, "another machine would fare alike"
    nothing_left(contained)
