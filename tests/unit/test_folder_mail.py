"""One thread looks after all mailboxes of a file system, which may hang."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from evalfleet.channels.mail.folder import FolderClerk, FolderMail
from evalfleet.channels.supervisor.mailbox import FolderPost, Pace

QUICK_S = (0.01, 0.02)


def _threads() -> int:
    return sum(thread.name == "mailboxes" for thread in threading.enumerate())


def test_many_mailboxes_are_looked_after_by_one_thread(tmp_path: Path) -> None:
    async def look() -> None:
        clerk, before = FolderClerk(), _threads()
        folders = [tmp_path / str(number) for number in range(20)]
        for folder in folders:
            folder.mkdir()
        mails = [FolderMail(clerk, str(folder), QUICK_S) for folder in folders]
        found = [asyncio.create_task(mail.find("out/l/1", Pace(*QUICK_S), 0.0)) for mail in mails]
        await asyncio.sleep(0)
        assert _threads() - before <= 1
        for folder in folders:
            FolderPost(str(folder)).create("out/l/1", folder.name.encode())
        assert await asyncio.gather(*found) == [folder.name.encode() for folder in folders]
        assert await mails[0].names("out") == ["out/l/1"]
        await mails[0].remove(["out/l/1"])
        assert await mails[0].read("out/l/1") is None

    asyncio.run(look())


def test_a_folder_that_is_away_is_an_error_for_who_asks_and_a_pause_for_who_waits(tmp_path: Path) -> None:
    folder = tmp_path / "shared"

    async def look() -> None:
        mail = FolderMail(FolderClerk(), str(folder), QUICK_S)
        waiting = asyncio.create_task(mail.find("out/l/1", Pace(*QUICK_S), 0.0))
        with pytest.raises(FileNotFoundError):
            await mail.create("new/1", b"mail")
        assert not waiting.done()
        folder.mkdir()
        assert await mail.create("out/l/1", b"mail")
        assert await waiting == b"mail"

    asyncio.run(look())


def test_a_look_that_nobody_waits_for_is_given_up(tmp_path: Path) -> None:
    async def look() -> None:
        looks = 0

        def call() -> bytes | None:
            nonlocal looks
            looks += 1
            return None

        clerk = FolderClerk()
        waiting = asyncio.create_task(clerk.find(call, Pace(*QUICK_S), 0.0))
        while not looks:
            await asyncio.sleep(0.001)
        waiting.cancel()
        await clerk.do(lambda: None)
        so_far = looks
        await clerk.do(lambda: None)
        await asyncio.sleep(5 * QUICK_S[1])
        await clerk.do(lambda: None)
        assert looks == so_far

    asyncio.run(look())


def test_what_goes_wrong_with_one_errand_is_told_and_the_others_go_on() -> None:
    async def ask() -> None:
        clerk = FolderClerk()
        with pytest.raises(ValueError, match="null byte"):
            await clerk.do(open, "\0")
        assert await clerk.do(len, "ab") == 2

    asyncio.run(ask())


HANGS = """\
import asyncio, threading
from evalfleet.channels.mail.folder import FolderClerk

async def main():
    hung, other = FolderClerk(), FolderClerk()
    waiting = [asyncio.create_task(hung.do(threading.Event().wait)) for _ in range(100)]
    print(await other.do(lambda: "another file system answers"), flush=True)
    print(await asyncio.to_thread(lambda: "other threads are free"), flush=True)

asyncio.run(main())
print("and the program ends", flush=True)
"""


def test_a_file_system_that_hangs_holds_nobody_up() -> None:
    ran = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60)
    assert ran.stdout.splitlines() == [
        "another file system answers",
        "other threads are free",
        "and the program ends",
    ], ran.stderr
