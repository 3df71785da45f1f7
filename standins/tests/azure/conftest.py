"""The stand-in for Azure, and a client that knows only Azure's REST API."""

from tests.cloud.conftest import azure, rest

__all__ = ["azure", "rest"]
