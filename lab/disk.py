"""What a host sees as its disk: an overlay of three layers.

upper   the host's own, a tmpfs of a given size: `disk full` is real, and costs no memory to bring about
base    the lab's, shared: its users, keys and devices, and marks that hide what hosts must not see
rootfs  this machine's root file system (or a given one), read-only
"""

from __future__ import annotations

import os
import shutil
import stat
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path

from . import login, system
from .login import server_config
from .system import LabError

# Of the machine, hosts see these and nothing else; `proc`, `run` and so on are made anew.
KEPT = frozenset({"bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "etc", "opt", "var"})
KEPT_STATE = frozenset(
    {"dpkg", "apt", "dbus", "misc", "python", "ca-certificates-java", "xml-core", "sgml-base"}
)
FRESH = {
    "root": 0o700,
    "home": 0o755,
    "tmp": 0o1777,
    "dev": 0o755,
    "dev/pts": 0o755,
    "dev/shm": 0o1777,
    "mnt": 0o755,
    "proc": 0o555,
    "run": 0o755,
    "srv": 0o755,
    "sys": 0o555,
    "etc/ssh": 0o755,
    "etc/cron.d": 0o755,
    "var/backups": 0o755,
    "var/cache": 0o755,
    "var/log": 0o755,
    "var/mail": 0o775,
    "var/spool": 0o755,
    "var/tmp": 0o1777,
}
HIDDEN = (
    "etc/gshadow",
    "etc/ssl/private",
    "etc/NetworkManager",
    "etc/netplan",
    "etc/wireguard",
    "etc/krb5.keytab",
)
DEVICES = {"null": 3, "zero": 5, "full": 7, "random": 8, "urandom": 9}
LINKS = {"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
OPAQUE = "trusted.overlay.opaque"
INIT = Path(__file__).with_name("init.sh")


class Base:
    """The lab's layer, in `path`."""

    def __init__(self, path: Path, rootfs: Path) -> None:
        self.path = path
        self.rootfs = rootfs

    def make(self, client_key: str, mask: Iterable[Path], expose: Iterable[Path]) -> None:
        """`mask` and `expose` are absolute paths, as hosts would see them."""
        self.path.mkdir()
        system.mount_tmpfs(self.path, "mode=755,size=64m")
        self._keep_only(Path(), KEPT)
        self._keep_only(Path("var/lib"), KEPT_STATE)
        for name, mode in FRESH.items():
            self._fresh(Path(name), mode)
        for name in (*HIDDEN, *(str(path).lstrip("/") for path in mask)):
            self._hide(Path(name))
        self._devices()
        login.write_users(self.path, self.rootfs, client_key)
        (self.path / "etc/ssh/sshd_config").write_text(server_config(self.rootfs))
        (self.path / "etc/resolv.conf").write_text("")
        for place in expose:
            self._make_room(Path(str(place).lstrip("/")))
        self._directory(self.rootfs_path(Path("sbin")))
        shutil.copyfile(INIT, self.path / self.rootfs_path(Path("sbin")) / "lab-init")

    def rootfs_path(self, path: Path) -> Path:
        """`sbin` is a link to `usr/sbin` in most systems: a directory of ours would hide it."""
        real = os.path.realpath(self.rootfs / path)
        return Path(os.path.relpath(real, os.path.realpath(self.rootfs)))

    def _directory(self, path: Path) -> None:
        """A directory of this layer shows the mode of this layer: copy it."""
        for part in [*reversed(path.parents), path]:
            ours, theirs = self.path / part, self.rootfs / part
            if not ours.is_dir():
                ours.mkdir()
                if theirs.is_dir():
                    mode = theirs.stat()
                    os.chown(ours, mode.st_uid, mode.st_gid)
                    ours.chmod(stat.S_IMODE(mode.st_mode))

    def _keep_only(self, path: Path, kept: frozenset[str]) -> None:
        there = self.rootfs / path
        for name in os.listdir(there) if there.is_dir() else ():
            if name not in kept:
                self._hide(path / name)

    def _hide(self, path: Path) -> None:
        """Hide it as overlays mark what was deleted. Does nothing if it is not there, or hidden already."""
        if os.path.lexists(self.rootfs / path) and not self._is_hidden(path):
            self._directory(path.parent)
            os.mknod(self.path / path, stat.S_IFCHR | 0o600, os.makedev(0, 0))

    def _is_hidden(self, path: Path) -> bool:
        """Is it hidden by a mark on itself or on a directory above it?"""
        ours = [self.path / part for part in (path, *path.parents[:-1])]
        there = [part for part in ours if os.path.lexists(part)]
        return any(not part.is_dir() or OPAQUE in os.listxattr(part) for part in there)

    def _fresh(self, path: Path, mode: int) -> None:
        ours = self.path / path
        if os.path.lexists(ours) and not ours.is_dir():
            ours.unlink()
        self._directory(path.parent)
        ours.mkdir(exist_ok=True)
        os.chown(ours, 0, 0)
        ours.chmod(mode)
        os.setxattr(ours, OPAQUE, b"y")

    def _make_room(self, path: Path) -> None:
        """A directory to show something in; what is hidden above it is there then, and otherwise empty."""
        for part in [*reversed(path.parents[:-1]), path]:
            if os.path.lexists(self.path / part) and not (self.path / part).is_dir():
                self._fresh(part, 0o755)
        (self.path / path).mkdir(parents=True, exist_ok=True)

    def _devices(self) -> None:
        # made here once rather than by each host, which costs 10 ms
        for name, minor in DEVICES.items():
            _device(self.path / "dev" / name, os.makedev(1, minor))
        _device(self.path / "dev/tty", os.makedev(5, 0))
        for name, target in LINKS.items():
            (self.path / "dev" / name).symlink_to(target)


class HostDisk:
    """One host's, in the host's directory."""

    def __init__(self, directory: Path, size: int) -> None:
        self._directory = directory
        self._mount = directory / "disk"
        self._size = size

    def make(self, host: str, address: str, host_key: bytes) -> None:
        self._mount.mkdir()
        system.mount_tmpfs(self._mount, f"mode=700,size={self._size}")
        for name in ("upper", "work", "upper/etc", "upper/etc/ssh"):
            (self._mount / name).mkdir()
            (self._mount / name).chmod(0o755)
        etc = self._mount / "upper/etc"
        _write(etc / "hostname", f"{host}\n")
        _write(etc / "hosts", f"127.0.0.1 localhost\n{address} {host}\n")
        _write(etc / "machine-id", f"{uuid.uuid4().hex}\n")
        key = etc / "ssh/ssh_host_ed25519_key"
        key.write_bytes(host_key)
        key.chmod(0o600)

    def prepare_boot(self, base: Base, expose: Sequence[Path]) -> None:
        """What the host mounts when it boots."""
        root = self._directory / "root"
        root.mkdir(exist_ok=True)
        # the machine's boot id would say that the host never restarted
        _write(self._directory / "boot_id", f"{uuid.uuid4()}\n")
        layers = f"lowerdir={base.path}:{base.rootfs},upperdir={self._mount}/upper,workdir={self._mount}/work"
        lines = [
            f"overlay {root} overlay {layers}",
            f"proc {root}/proc proc nosuid,nodev,noexec",
            *(f"{root}/proc/{name} {root}/proc/{name} none bind,ro" for name in _harmful()),
            f"{self._directory}/boot_id {root}/proc/sys/kernel/random/boot_id none bind,ro",
            f"sysfs {root}/sys sysfs ro,nosuid,nodev,noexec",
            f"run {root}/run tmpfs mode=755,nosuid,nodev",
            f"devpts {root}/dev/pts devpts newinstance,ptmxmode=0666,mode=0620,gid=5,nosuid,noexec",
            f"shm {root}/dev/shm tmpfs mode=1777,nosuid,nodev",
            *(f"{_escaped(path)} {root}{_escaped(path)} none bind,ro" for path in expose),
        ]
        _write(self._directory / "fstab", "".join(f"{line} 0 0\n" for line in lines))

    def fill(self, bytes_left: int) -> None:
        """The disk shrinks to what is used and this; rounded up to a page by the kernel."""
        room = os.statvfs(self._mount)
        used = (room.f_blocks - room.f_bfree) * room.f_frsize
        self._resize(used + max(bytes_left, 0))

    def free(self) -> None:
        self._resize(self._size)

    def remove(self) -> None:
        if os.path.ismount(self._mount):
            system.unmount(self._mount)

    def _resize(self, size: int) -> None:
        # 0 would mean: without limit
        try:
            system.mount_tmpfs(self._mount, f"size={max(size, 4096)}", again=True)
        except OSError as err:
            raise LabError(f"the disk at {self._mount} cannot be resized: {err}") from err


def _harmful() -> list[str]:
    """What of /proc a host's root could do the machine harm by."""
    return [name for name in ("sys", "sysrq-trigger") if os.path.exists(f"/proc/{name}")]


def _device(path: Path, number: int) -> None:
    os.mknod(path, stat.S_IFCHR | 0o666, number)
    path.chmod(0o666)  # whatever our umask is


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o644)


def _escaped(path: Path) -> str:
    return str(path).replace("\\", "\\134").replace(" ", "\\040").replace("\t", "\\011")
