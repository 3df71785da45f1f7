"""A machine has the key of its mailbox: what it seals may still be nonsense."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from evalfleet.channels.mailbox import FolderMail, open_mail
from evalfleet.channels.supervisor.mailbox import mail_out, sealed


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
        mail, line = FolderMail(str(tmp_path), (0.01, 0.01)), Line()
        transport = await open_mail(mail, "key", line)
        name = mail_out(transport.name, 1)
        for folder in ("new", f"in/{transport.name}", f"out/{transport.name}"):
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        assert await mail.create(name, sealed("key", name, header))
        transport.write(b"hello\n")
        await asyncio.wait_for(line.lost.wait(), 60)
        return line.came

    assert asyncio.run(main()).startswith(b"\0")
