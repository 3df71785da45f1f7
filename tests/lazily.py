"""Imports that wait until they are used: every worker collects all tests, and runs a few of them."""

from __future__ import annotations

import importlib.util
from types import ModuleType
from typing import Any


class LazyModule(ModuleType):
    """A module that is imported when its first public attribute is asked for.

    Pytest asks whatever a file of tests holds for private ones (`_mock_name`), as it looks for fixtures.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


def lazily(name: str) -> ModuleType:
    assert importlib.util.find_spec(name) is not None, f"{name} is not installed"
    return LazyModule(name)
