"""A lab host with the stand-in for Docker and for the image of Windows Agent Arena."""

from tests.waa.conftest import docker, kit, lab, storage

__all__ = ["docker", "kit", "lab", "storage"]
