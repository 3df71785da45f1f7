"""What cloud-init makes of a virtual machine's custom data, as files on a host's disk before it boots.

Users, keys, host keys and files are written; commands run when the host boots (`guest-init.sh`). Disks,
packages and the like are left alone, and the log says so.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .machines import Guest

SEED = "var/lib/cloud/seed"
LOG = "var/log/cloud-init.log"
HANDLED = frozenset(
    [
        "users",
        "ssh_authorized_keys",
        "ssh_keys",
        "write_files",
        "bootcmd",
        "runcmd",
        "hostname",
        "disable_root",
        "ssh_deletekeys",
        "ssh_genkeytypes",
        "ssh_pwauth",
        "preserve_hostname",
        "final_message",
        "output",
        "manage_etc_hosts",
        "system_info",
    ]
)
FIRST_UID = 1001


@dataclass
class User:
    name: str
    keys: list[str] = field(default_factory=list[str])
    sudo: str = ""
    shell: str = "/bin/bash"


@dataclass
class Wishes:
    """What custom data asks for. `script`: it is no configuration but a program."""

    config: dict[str, Any] = field(default_factory=dict[str, Any])
    script: str = ""
    complaints: list[str] = field(default_factory=list[str])


def read(data: bytes) -> Wishes:
    """Custom data that cannot be read is no failure of the machine: cloud-init complains and goes on."""
    if data.startswith(b"\x1f\x8b"):
        data = gzip.decompress(data)
    text = data.decode(errors="replace")
    if text.startswith("#!"):
        return Wishes(script=text)
    if text.startswith("#cloud-config"):
        try:
            config = yaml.safe_load(text) or {}
        except yaml.YAMLError as err:
            return Wishes(complaints=[f"Failed loading yaml blob: {err}"])
        if not isinstance(config, dict):
            return Wishes(complaints=["Failed loading yaml blob: it is no mapping"])
        ignored = [f"module of '{key}' is not run by this stand-in" for key in config if key not in HANDLED]
        return Wishes(config, complaints=ignored)
    return Wishes(complaints=["Unhandled non-multipart (text/x-not-multipart) userdata"] if text else [])


class Seeder:
    """Writes to `disk`, what of the host's disk is its own; `base`: what it sees below that."""

    def __init__(self, disk: Path, base: Path) -> None:
        self._disk = disk
        self._base = base
        self._next_uid = FIRST_UID

    def seed(self, guest: Guest) -> None:
        wishes = read(guest.custom_data)
        for user in users_of(guest, wishes.config):
            self._user(user)
        self._host_keys(wishes.config.get("ssh_keys") or {})
        for each in wishes.config.get("write_files") or []:
            self._file(each)
        self._commands("bootcmd", wishes.config.get("bootcmd") or [])
        self._commands("runcmd", wishes.config.get("runcmd") or [])
        if wishes.script:
            self._write(f"{SEED}/script", wishes.script, 0o700)
        self._write(f"{SEED}/custom-data", guest.custom_data.decode(errors="replace"), 0o600)
        complaints = "".join(f"WARNING: {each}\n" for each in wishes.complaints)
        self._write(LOG, f"Cloud-init v. 24.4 on {guest.name}\n{complaints}", 0o640)

    # -- parts ---------------------------------------------------------------------------------

    def _user(self, user: User) -> None:
        if user.name == "root":
            uid, home = 0, "root"
        else:
            home = f"home/{user.name}"
            uid = self._uid(user.name) or self._new_user(user, home)
        # as cloud-init does: who could come in before still can
        there = self._disk / home / ".ssh/authorized_keys"
        keys = "".join(f"{key}\n" for key in user.keys)
        keys = (there.read_text() if there.exists() else "") + keys
        self._write(f"{home}/.ssh/authorized_keys", keys, 0o600)
        for place in (home, f"{home}/.ssh", f"{home}/.ssh/authorized_keys"):
            os.chown(self._disk / place, uid, uid)
        (self._disk / home).chmod(0o750)
        (self._disk / home / ".ssh").chmod(0o700)
        if user.sudo:
            rule = f"{user.name} {user.sudo}\n"
            self._append("etc/sudoers.d/90-cloud-init-users", rule, 0o440)

    def _new_user(self, user: User, home: str) -> int:
        uid = self._next_uid
        self._next_uid += 1
        self._append("etc/passwd", f"{user.name}:x:{uid}:{uid}::/{home}:{user.shell}\n", 0o644)
        self._append("etc/group", f"{user.name}:x:{uid}:\n", 0o644)
        self._append("etc/shadow", f"{user.name}:*:19000:0:99999:7:::\n", 0o640)
        return uid

    def _host_keys(self, given: dict[str, str]) -> None:
        kinds = [name.removesuffix("_private") for name in given if name.endswith("_private")]
        for kind in kinds:
            path = f"etc/ssh/ssh_host_{kind}_key"
            self._write(path, given[f"{kind}_private"].strip() + "\n", 0o600)
            self._write(f"{path}.pub", given.get(f"{kind}_public", "").strip() + "\n", 0o644)
        if kinds:
            lines = (self._base / "etc/ssh/sshd_config").read_text().splitlines()
            kept = [line for line in lines if not line.startswith("HostKey ")]
            ours = [f"HostKey /etc/ssh/ssh_host_{kind}_key" for kind in kinds]
            self._write("etc/ssh/sshd_config", "\n".join([*ours, *kept, ""]), 0o644)

    def _file(self, wanted: dict[str, Any]) -> None:
        path = str(wanted["path"]).lstrip("/")
        content = decoded(wanted.get("content", ""), str(wanted.get("encoding", "")))
        place = self._place(path)
        if wanted.get("append"):
            content = (place.read_bytes() if place.exists() else self._below(path)) + content
        place.write_bytes(content)
        place.chmod(int(str(wanted.get("permissions", "0644")), 8))
        owner = str(wanted.get("owner", "root:root")).split(":")[0]
        uid = self._uid(owner)
        os.chown(place, uid, uid)

    def _uid(self, name: str) -> int:
        for line in self._text("etc/passwd").splitlines():
            if line.split(":")[0] == name:
                return int(line.split(":")[2])
        return 0

    def _commands(self, name: str, commands: list[Any]) -> None:
        """As cloud-init does: words are quoted, text is the shell's, a failure does not stop the rest."""
        if not isinstance(commands, list) or not commands:
            return
        lines = [each if isinstance(each, str) else shlex.join(map(str, each)) for each in commands]
        self._write(f"{SEED}/{name}", "\n".join(["#!/bin/sh", *lines, ""]), 0o700)

    # -- files ---------------------------------------------------------------------------------

    def _place(self, path: str) -> Path:
        place = self._disk / path
        missing = [each for each in place.parents if not each.exists() and each.is_relative_to(self._disk)]
        for folder in reversed(missing):
            folder.mkdir()
            below = self._base / folder.relative_to(self._disk)
            if below.is_dir():
                mode = below.stat()
                os.chown(folder, mode.st_uid, mode.st_gid)
                folder.chmod(mode.st_mode & 0o7777)
        return place

    def _write(self, path: str, text: str, mode: int) -> None:
        place = self._place(path)
        place.write_text(text)
        place.chmod(mode)

    def _append(self, path: str, line: str, mode: int) -> None:
        self._write(path, self._text(path) + line, mode)

    def _text(self, path: str) -> str:
        place = self._disk / path
        return (place.read_bytes() if place.exists() else self._below(path)).decode()

    def _below(self, path: str) -> bytes:
        below = self._base / path
        return below.read_bytes() if below.is_file() else b""


def users_of(guest: Guest, config: dict[str, Any]) -> list[User]:
    """The machine's own user first; custom data may add keys to it and other users."""
    own = User(
        guest.user, [*guest.keys, *(config.get("ssh_authorized_keys") or [])], "ALL=(ALL) NOPASSWD:ALL"
    )
    found = {own.name: own} if own.name else {}
    for wanted in config.get("users") or []:
        if isinstance(wanted, str):
            continue  # `default`: the machine's own
        name = str(wanted["name"])
        user = found.setdefault(name, User(name))
        user.keys += [str(key) for key in wanted.get("ssh_authorized_keys") or []]
        user.shell = str(wanted.get("shell", user.shell))
        sudo = wanted.get("sudo")
        user.sudo = "; ".join(sudo) if isinstance(sudo, list) else str(sudo or user.sudo)
    return list(found.values())


def decoded(content: str | bytes, encoding: str) -> bytes:
    plain = content.encode() if isinstance(content, str) else content
    try:
        if "b64" in encoding or "base64" in encoding:
            plain = base64.b64decode(plain)
        if "gz" in encoding:
            plain = gzip.decompress(plain)
    except (binascii.Error, OSError):
        return content.encode() if isinstance(content, str) else content
    return plain
