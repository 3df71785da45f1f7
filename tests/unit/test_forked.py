"""A forked process of evalfleet cannot be told from one that was started anew."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.desk import Desk


@pytest.mark.parametrize("options", [{}, {"umask": -1}], ids=["forked", "anew"])
def test_words_folder_variables_streams_and_exit_codes(tmp_path: Path, options: dict[str, Any]) -> None:
    desk = Desk(tmp_path)
    assert desk.done("--version", **options).out.startswith("evalfleet ")
    desk("run", "./none.toml", **options).refused("none.toml")
    desk.config("[defaults]\nworkers = 0\n")
    desk("run", "./none.toml", **options).refused("workers")
    desk.config("")
    desk("show", "r", env={"EVALFLEET_HOME": str(tmp_path / "other")}, **options).refused("other")
    assert type(desk.processes[0].popen).__name__ == ("Popen" if options else "Forked")


@pytest.mark.parametrize("options", [{}, {"umask": -1}], ids=["forked", "anew"])
def test_signals(tmp_path: Path, options: dict[str, Any]) -> None:
    desk = Desk(tmp_path)
    killed = desk.start("serve", "--port", "0", **options)
    assert killed.lives
    killed.kill()
    assert (killed.popen.wait(), killed.lives) == (-signal.SIGKILL, False)
