"""A machine has the key of its mailbox: what it seals may still be nonsense."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from evalfleet.channels.mail.folder import FolderClerk, FolderMail
from evalfleet.channels.mail.lines import open_mail
from evalfleet.channels.supervisor.mailbox import FolderPost, line_name, mail_out, sealed
from evalfleet.places.slurm.folders import perform
from evalfleet.places.slurm.sight import folder_of


class Line(asyncio.Protocol):
    def __init__(self) -> None:
        self.lost = asyncio.Event()
        self.came = b""

    def data_received(self, data: bytes) -> None:
        self.came += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()


@pytest.mark.parametrize("header", [{"read": float("inf")}, {"read": float("nan")}, {"read": None}, {}])
def test_a_header_that_is_no_header_ends_the_line(tmp_path: Path, header: dict[str, object]) -> None:
    async def main() -> bytes:
        mail, line = FolderMail(FolderClerk(), str(tmp_path), (0.01, 0.01)), Line()
        transport = await open_mail(mail, "key", line)
        name = mail_out(line_name(1), 1)
        for folder in ("new", f"in/{line_name(1)}", f"out/{line_name(1)}"):
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        assert await mail.create(name, sealed("key", name, header))
        transport.write(b"hello\n")
        await asyncio.wait_for(line.lost.wait(), 60)
        return line.came

    assert asyncio.run(main()).startswith(b"\0")


def _precious(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    (home / "0000000001").write_text("precious")
    (tmp_path / "mail").mkdir()
    return home


@pytest.mark.parametrize("planted", ["new", "out", "out/line"])
def test_a_folder_that_is_a_link_leads_nowhere(tmp_path: Path, planted: str) -> None:
    home, post = _precious(tmp_path), FolderPost(str(tmp_path / "mail"))
    (tmp_path / "mail" / planted).parent.mkdir(exist_ok=True)
    (tmp_path / "mail" / planted).symlink_to(home)
    assert post.names(planted) == []
    assert not post.read(f"{planted}/0000000001")
    for refused in (
        lambda: post.create(f"{planted}/0000000002", b"ours"),
        lambda: post.remove([f"{planted}/0000000001"]),
    ):
        with pytest.raises(NotADirectoryError):
            refused()
    assert [path.name for path in home.iterdir()] == ["0000000001"]


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_file_is_no_mail(tmp_path: Path, kind: str) -> None:
    home, post = _precious(tmp_path), FolderPost(str(tmp_path / "mail"))
    (tmp_path / "mail" / "new").mkdir()
    path = tmp_path / "mail" / "new" / "0000000001"
    if kind == "link":
        path.symlink_to(home / "0000000001")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    assert post.read("new/0000000001") == b""
    assert not post.create("new/0000000001", b"ours")
    assert (home / "0000000001").read_text() == "precious"


def test_marks_that_are_pipes_links_or_endless_are_not_read(tmp_path: Path) -> None:
    """Jobs of a cluster have the user of whoever looks at their folders."""
    os.mkfifo(tmp_path / "start")
    (tmp_path / "job").symlink_to("/dev/zero")
    (tmp_path / "ran").write_text("9" * 10**6)
    (tmp_path / "about").write_text('{"life_s": 1e999, "at": "inf", "owner": "\\u001b[2J"}')
    told = folder_of(perform({"verb": "look", "folder": str(tmp_path)}))
    assert (told.start, told.job, told.ran_s, told.life_s, told.owner) == (None, "", None, 0.0, "?[2J")
