"""A real podman and a private registry, for services whose machines are containers: there the image matters.

Whoever imports `podman` and `private` has two fixtures.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from standins.podman import Podman, lacking, podman_with
from standins.registry import Registry, registry
from standins.waa import rootfs

PASSWORD = "a-password-that-nobody-may-see"


def marks(service: str) -> list[pytest.MarkDecorator]:
    """For a file of tests with real containers on this service."""
    why = lacking(rootfs.PROGRAMS)
    skipped = pytest.mark.skipif(why is not None, reason=f"NO TEST OF REAL CONTAINERS ON {service}: {why}")
    return [pytest.mark.nightly, skipped]


@pytest.fixture
def podman() -> Iterator[Podman]:
    """Its image localhost/tiny has Python."""
    with podman_with(rootfs.PROGRAMS) as made:
        yield made


@pytest.fixture
def private(podman: Podman) -> Iterator[Registry]:
    """A registry that has the image for those who have the password."""
    podman.ok("save", "--format", "oci-dir", "-o", str(podman.folder / "saved"), "localhost/tiny")
    with registry() as made:
        made.images["evals/tiny"] = podman.folder / "saved"
        made.user, made.passwords = "evals", {PASSWORD: ("evals/tiny",)}
        yield made


def import_bare(podman: Podman) -> str:
    """The name of an image without Python."""
    (podman.folder / "none").mkdir()
    rootfs.write_rootfs(podman.folder / "bare.tar", podman.folder / "none", ("sh", "env"))
    podman.ok("import", "-q", str(podman.folder / "bare.tar"), "localhost/bare")
    return "localhost/bare"
