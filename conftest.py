"""What holds for all tests."""

from __future__ import annotations

import asyncio
import inspect
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# An example that takes long says something about the computer, not about the code.
settings.register_profile("patient", parent=settings(), deadline=None)
settings.load_profile("patient")


def pytest_configure() -> None:
    """Let processes that tests start hear signals, however the tests were started.

    In the background, or by `nohup`, some are ignored. That is inherited, where a handler is not; the tests
    themselves stay deaf to these signals.
    """
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(signum) == signal.SIG_IGN:
            signal.signal(signum, lambda *_: None)
    _pass_by_shims()


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Tests may be coroutines."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    wanted = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in wanted}))
    return True


def _pass_by_shims() -> None:
    """Let a job's `python3` be the Python that pyenv's script of this name finds.

    That script takes six times as long to look for it as Python takes to start, and jobs start many.
    """
    python = shutil.which("python3")
    if python and Path(python).parent.name == "shims":
        os.environ["PATH"] = f"{sys.base_prefix}/bin{os.pathsep}{os.environ['PATH']}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with single tests that are slow: no worker is to be left alone with one at the end.

    With `--dist worksteal` they are the first worker's, and others take tests from the end of its share. It
    waits, as slow tests mostly do, while they compute.
    """
    items.sort(key=lambda item: all(mark.name != "slow" for mark in item.own_markers))
