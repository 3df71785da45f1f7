"""Keys made here: one a machine, by which its host is known from the start; one to come in with."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from msgspec import Struct

from evalfleet.model import MachineId
from evalfleet.names import safe_name

FOLDER = ".azure"


class KeyPair(Struct, frozen=True):
    """`path`: of the private key's file, which only we can read."""

    private: str
    public: str
    path: Path


class Keys:
    """Files under the home. Whoever makes a key first has made it for all controllers of the home."""

    def __init__(self, home: Path, place: str, key: str) -> None:
        self._folder = home / FOLDER / safe_name(place)
        self._key = Path(key) if key else self._folder / "id_ed25519"

    def own(self) -> KeyPair:
        """By which machines let us in: the user's own, or one that is made here."""
        return _kept(self._key)

    def of_host(self, machine: MachineId) -> KeyPair:
        return _kept(self._host_path(machine))

    def known(self, machine: MachineId) -> bool:
        """Was the machine's key made here?"""
        return self._host_path(machine).is_file()

    def known_hosts(self, machine: MachineId, address: str, port: int, others: str = "") -> Path:
        """A file by which the machine's host is known, at this address; with lines about other hosts."""
        where = address if port == 22 else f"[{address}]:{port}"
        text = f"{where} {self.of_host(machine).public}\n{others}"
        path = self._host_path(machine).with_suffix(".known_hosts")
        if not path.is_file() or path.read_text() != text:
            _write(path, text)
        return path

    def drop(self, machine: MachineId) -> None:
        path = self._host_path(machine)
        for each in (path, path.with_suffix(".known_hosts")):
            each.unlink(missing_ok=True)

    def _host_path(self, machine: MachineId) -> Path:
        return self._folder / "hosts" / f"{safe_name(machine)}.key"


def _kept(path: Path) -> KeyPair:
    import asyncssh

    if not path.is_file():
        fresh = asyncssh.generate_private_key("ssh-ed25519")  # pyright: ignore[reportUnknownMemberType]
        _write(path, fresh.export_private_key().decode(), only_new=True)
    private = path.read_text()
    public = asyncssh.import_private_key(private).export_public_key().decode().strip()
    return KeyPair(private, public, path)


def _write(path: Path, text: str, *, only_new: bool = False) -> None:
    """Whole or not at all, for our eyes only. `only_new`: another's stays."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd, part = tempfile.mkstemp(dir=path.parent)  # with mode 0600
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(text)
    try:
        if only_new:
            os.link(part, path)
        else:
            os.replace(part, path)
    except FileExistsError:
        pass
    finally:
        Path(part).unlink(missing_ok=True)
