"""What holds for all tests."""

from __future__ import annotations

import asyncio
import gc
import inspect
import itertools
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

WAITING = ("tests/cloud/", "tests/lab/", "tests/slurm/", "tests/ssh/", "tests/waa/")


def pytest_configure() -> None:
    """Let processes that tests start hear signals, however the tests were started.

    In the background, or by `nohup`, some are ignored. That is inherited, where a handler is not; the tests
    themselves stay deaf to these signals.
    """
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(signum) == signal.SIG_IGN:
            signal.signal(signum, lambda *_: None)
    _pass_by_shims()
    gc.disable()  # until all tests are collected: nothing that is made meanwhile goes away


def pytest_collection_finish() -> None:
    """Let Python look for garbage among what tests make, not among the tests themselves.

    Every worker collects all of them, which is a million objects to look at again and again.
    """
    gc.freeze()
    gc.enable()


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


@pytest.hookimpl(trylast=True)  # when it is known which tests run
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let each worker begin with some of the slow tests: none is to be left alone with one at the end.

    Then most of them go on with tests of machines, which wait more than they compute, while the others keep
    the processors busy; all end with what is quick. With `--dist worksteal` workers get equal shares of the
    list, and take from the end of each other's.
    """
    workers = int(getattr(config, "workerinput", {}).get("workercount", 1))
    slow = [item for item in items if any(mark.name == "slow" for mark in item.own_markers)]
    quick = [item for item in items if all(mark.name != "slow" for mark in item.own_markers)]
    waiting = [item for item in quick if item.nodeid.startswith(WAITING)]
    others = iter([item for item in quick if not item.nodeid.startswith(WAITING)])
    waiters = -(-workers * 2 // 3)
    ordered: list[pytest.Item] = []
    for worker in range(workers):
        share = (len(items) - len(ordered)) // (workers - worker)
        first = slow[worker::workers]
        if worker < waiters:
            first += waiting[len(waiting) * worker // waiters : len(waiting) * (worker + 1) // waiters]
        ordered += [*first, *itertools.islice(others, max(0, share - len(first)))]
    items[:] = ordered
