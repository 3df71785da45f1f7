"""When a job has written nothing for too long: files are real, time is an argument."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from evalfleet.channels.supervisor import output as growing
from evalfleet.channels.supervisor.host import NEVER
from evalfleet.channels.supervisor.output import Growth

PATIENCE_S = 80.0
START = 1000.0


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "log").write_text("begun\n")
    (tmp_path / "out" / "deep" / "er").mkdir(parents=True)
    (tmp_path / "out" / "deep" / "er" / "file").write_text("x")
    (tmp_path / "out" / "other").write_text("x")
    return tmp_path


class Watch:
    """Looks whenever it is due."""

    def __init__(self, job: Path, patience: float = PATIENCE_S) -> None:
        self.growth = Growth(str(job), patience)
        self.growth.begin(START)
        self.now = START
        self.looks = 0

    def until(self, end: float) -> bool:
        """Was it stuck before `end`? `now` is then when that was found."""
        while self.growth.due <= end:
            self.now = self.growth.due
            self.looks += 1
            if self.growth.stuck(self.now):
                return True
        return False


def test_one_that_writes_nothing_is_stuck_soon_after_its_patience(job: Path) -> None:
    watch = Watch(job)
    assert watch.until(START + 1000)
    assert PATIENCE_S <= watch.now - START <= PATIENCE_S + 2 * growing.LOOK_S


def test_nobody_looks_unless_it_is_asked_for(job: Path) -> None:
    watch = Watch(job, NEVER)
    assert not watch.until(START + 1e9)
    assert watch.looks == 0


def append(job: Path) -> None:
    with (job / "out/deep/er/file").open("a") as file:
        file.write("more")


def same_size_in_the_past(job: Path) -> None:
    """As a clock that was set back would have it."""
    (job / "out/other").write_text("y")
    os.utime(job / "out/other", (1, 1))


WRITES: list[Callable[[Path], object]] = [
    append,
    same_size_in_the_past,
    lambda job: os.truncate(job / "out/other", 0),
    lambda job: (job / "out/deep/new").touch(),
    lambda job: (job / "out/deep/er/file").unlink(),
    lambda job: (job / "out/other").rename(job / "out/another"),
    lambda job: os.truncate(job / "log", 0),
]


@pytest.mark.parametrize("write", WRITES)
def test_whatever_is_written_counts(job: Path, write: Callable[[Path], object]) -> None:
    watch = Watch(job)
    assert not watch.until(START + PATIENCE_S - 1)
    write(job)
    assert not watch.until(START + 2 * PATIENCE_S - 2)
    assert watch.until(START + 1000)


def test_reading_does_not_count_and_links_are_not_followed(
    job: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (job / "out" / "link").symlink_to(elsewhere)
    watch = Watch(job)
    assert not watch.until(START + PATIENCE_S - 1)
    (elsewhere / "new").touch()
    (job / "out/other").read_text()
    assert watch.until(START + PATIENCE_S + 2 * growing.LOOK_S)


@pytest.mark.parametrize("what", ["gone", "link"])
def test_a_job_may_do_away_with_its_folder(job: Path, what: str) -> None:
    shutil.rmtree(job / "out")
    if what == "link":
        (job / "out").symlink_to("/")
    watch = Watch(job)
    assert watch.until(START + 1000)
    assert watch.looks < 100


def test_many_files_are_looked_at_a_few_at_a_time(job: Path) -> None:
    for n in range(5 * growing.STEP):
        os.close(os.open(job / "out" / "deep" / str(n), os.O_CREAT))
    watch = Watch(job)
    watch.now = watch.growth.due
    assert not watch.growth.stuck(watch.now)
    assert watch.growth.due == watch.now + growing.PAUSE_S, "it looked at all of them at once"
    (job / "out/deep/7").write_text("x")
    assert watch.until(START + 1000)
    assert PATIENCE_S <= watch.now - START < 2 * PATIENCE_S


def test_while_the_log_grows_files_are_not_looked_at(job: Path) -> None:
    """To look at so many files takes more looks than one, at short intervals: there are none of those."""
    for n in range(2 * growing.STEP):
        os.close(os.open(job / "out" / str(n), os.O_CREAT))
    watch = Watch(job)
    for _ in range(100):
        with (job / "log").open("a") as log:
            log.write("on\n")
        due = watch.growth.due
        assert not watch.until(due)
        assert watch.growth.due == due + growing.LOOK_S
    assert watch.looks == 100
    assert not watch.until(watch.growth.due)
    assert watch.growth.due == watch.now + growing.PAUSE_S, "nor are they when it is quiet"


def test_a_time_in_which_nobody_looked_does_not_count(job: Path) -> None:
    """The host was frozen, and the job with it."""
    watch = Watch(job)
    assert not watch.until(START + PATIENCE_S / 2)
    frozen_s = 5000.0
    watch.growth.due += frozen_s
    assert not watch.until(START + frozen_s + PATIENCE_S - 1)
    assert watch.until(START + frozen_s + PATIENCE_S + 3 * growing.LOOK_S)
