"""SSH keys that are made here: a host key for each VM, and the key by which we come in."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from msgspec import Struct

from evalfleet.model import MachineId
from evalfleet.names import safe_name


class KeyPair(Struct, frozen=True):
    """A private key, its public key, and the file of the private one, which only we can read."""

    private: str
    public: str
    path: Path


class SshKeys:
    """The SSH keys of one place, as files under the home.

    A VM gets its host key from us when it is made, so that it is known from the first connection on. Whoever
    makes a key first has made it for all controllers of the home.
    """

    def __init__(self, folder: Path, login_key: str) -> None:
        self._folder = folder
        self._login_key = Path(login_key) if login_key else folder / "id_ed25519"

    def login(self) -> KeyPair:
        """The key by which machines let us in: the user's own, or one that is made here."""
        return _read_or_make(self._login_key)

    def of_host(self, machine: MachineId) -> KeyPair:
        """The machine's host key; made if there is none yet."""
        return _read_or_make(self._host_path(machine))

    def has_host(self, machine: MachineId) -> bool:
        """Was the machine's host key made in this home?"""
        return self._host_path(machine).is_file()

    def known_hosts(self, machine: MachineId, address: str, port: int, others: str = "") -> Path:
        """A file with the machine's host key at this address, and with `others`, the lines of other hosts."""
        where = address if port == 22 else f"[{address}]:{port}"
        text = f"{where} {self.of_host(machine).public}\n{others}"
        path = self._host_path(machine).with_suffix(".known_hosts")
        if not path.is_file() or path.read_text() != text:
            _write(path, text)
        return path

    def drop(self, machine: MachineId) -> None:
        key = self._host_path(machine)
        for path in (key, key.with_suffix(".known_hosts")):
            path.unlink(missing_ok=True)

    def _host_path(self, machine: MachineId) -> Path:
        return self._folder / "hosts" / f"{safe_name(machine)}.key"


def _read_or_make(path: Path) -> KeyPair:
    import asyncssh

    if not path.is_file():
        fresh = asyncssh.generate_private_key("ssh-ed25519")  # pyright: ignore[reportUnknownMemberType]
        _write(path, fresh.export_private_key().decode(), only_new=True)
    private = path.read_text()
    public = asyncssh.import_private_key(private).export_public_key().decode().strip()
    return KeyPair(private, public, path)


def _write(path: Path, text: str, *, only_new: bool = False) -> None:
    """Write the file whole or not at all, for our eyes only. `only_new`: one that is there stays as it is."""
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
