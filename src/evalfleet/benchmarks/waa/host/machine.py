"""The machine itself: KVM, room for Windows on a disk that stays, and Docker."""

from __future__ import annotations

import errno
import fcntl
import getpass
import os
import shutil
import sys
import time

from .shell import Failed, as_root, run, say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .config import HostConfig
    from .docker import Docker

DEVICE = "/dev/kvm"
GET_API_VERSION = 0xAE00
CREATE_VM = 0xAE01
API_VERSION = 12
REMEDY = (
    "take a size with nested virtualisation (not ARM; security type Standard), "
    "or --set kvm=false for slow software emulation"
)

GIB = 1 << 30
WIPED = "DATALOSS_WARNING_README.txt"
"""A cloud leaves it on the disk that does not outlive a stop."""

APT = ("apt-get", "-y", "-o", "DPkg::Lock::Timeout=60", "-o", "Dpkg::Options::=--force-confold")
QUIET = ("env", "DEBIAN_FRONTEND=noninteractive", "NEEDRESTART_MODE=a", "UCF_FORCE_CONFFOLD=1")
LOCKED = ("Could not get lock", "Unable to acquire the dpkg frontend lock", "is another process using it")
LOCK_LOOK_S = 5.0
INSTALL_S = 1500.0


# -- KVM -------------------------------------------------------------------------------------------


def step_kvm(device: str = DEVICE) -> None:
    """A virtual machine can be made: the device may be there although the processor cannot do it."""
    problem = try_kvm(device)
    if problem == os.strerror(errno.EACCES) and os.geteuid() != 0:
        # only root and the group kvm may; the engine is root
        script = f"import sys; sys.path[:0] = {sys.path[:1]!r}; "
        script += f"from {__name__} import try_kvm; sys.exit(try_kvm({device!r}) or 0)"
        done = run(as_root([sys.executable, "-c", script]), 60.0)
        problem = "" if done.ok else done.words()
    if problem:
        raise Failed(f"{device} cannot be used ({problem}): {REMEDY}")
    say(f"{device} works")


def try_kvm(device: str) -> str:
    """What is wrong with it; nothing, if a virtual machine can be made."""
    try:
        handle = os.open(device, os.O_RDWR | os.O_CLOEXEC)
    except OSError as err:
        return err.strerror or "unknown"
    try:
        version = fcntl.ioctl(handle, GET_API_VERSION, 0)
        if version != API_VERSION:
            return f"its version is {version}, not {API_VERSION}"
        os.close(fcntl.ioctl(handle, CREATE_VM, 0))
    except OSError as err:
        return f"no virtual machine can be made: {err.strerror}"
    finally:
        os.close(handle)
    return ""


# -- disk ----------------------------------------------------------------------------------------


def step_disk(config: HostConfig) -> None:
    """The folder that keeps Windows is there, ours, and on a disk that outlives a stop."""
    for folder in (config.data, config.state("")):
        try:
            os.makedirs(folder, exist_ok=True)
        except PermissionError:
            run(as_root(["install", "-d", "-o", getpass.getuser(), folder]), 60.0)
        if not os.access(folder, os.W_OK):
            raise Failed(f"{folder} cannot be written; choose another folder with --set data=PATH")
    mount = mount_of(config.data)
    if os.path.exists(os.path.join(mount, WIPED)) or is_memory(mount):
        raise Failed(
            f"{config.data} is on {mount}, which is wiped when the machine is stopped; "
            "choose another folder with --set data=PATH"
        )
    say(f"{config.data} is on {mount}, {free_gb(config.data):.0f} GB free")


def mount_of(path: str) -> str:
    path = os.path.realpath(path)
    while not os.path.ismount(path):
        path = os.path.dirname(path)
    return path


def is_memory(mount: str) -> bool:
    with open("/proc/mounts") as file:
        kinds = [line.split()[2] for line in file if line.split()[1] == mount]
    return bool(kinds) and kinds[-1] in ("tmpfs", "ramfs")


def free_gb(path: str) -> float:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize / GIB


# -- room ----------------------------------------------------------------------------------------


def step_room(config: HostConfig, has_all: Callable[[], bool]) -> None:
    """Enough memory; and enough disk, as long as the image and Windows are still to come."""
    memory = memory_gb()
    if memory < config.memory_gb * 0.9:  # the kernel keeps some for itself
        raise Failed(
            f"{memory:.1f} GB of memory, and {config.memory_gb:g} are needed; take a larger size, or "
            "--set som_origin=a11y, which needs less"
        )
    free = free_gb(config.data)
    if free < config.free_gb and not has_all():
        raise Failed(f"{free:.1f} GB free on {mount_of(config.data)}, and {config.free_gb:g} are needed")
    say(f"{memory:.1f} GB of memory, {free:.1f} GB free")


def memory_gb(path: str = "/proc/meminfo") -> float:
    with open(path) as file:
        kilobytes = next(int(line.split()[1]) for line in file if line.startswith("MemTotal:"))
    return kilobytes / (1 << 20)


# -- Docker --------------------------------------------------------------------------------------


def step_docker(engine: Docker, look_s: float = LOCK_LOOK_S) -> None:
    """An engine that answers. Where there is none, the distribution's is installed."""
    if not engine.find() and not (_start_installed() and engine.find()):
        if shutil.which("apt-get") is None:
            raise Failed("there is no Docker and no apt-get to install it with; install Docker first")
        install(time.monotonic() + INSTALL_S, look_s)
        _start_installed()
        if not engine.find():
            raise Failed("Docker is installed and does not answer; `journalctl -u docker` may tell why")
    root = engine.try_("info", "--format", "{{.DockerRootDir}}").out.strip()
    if root and os.path.exists(os.path.join(mount_of(root), WIPED)):
        raise Failed(
            f"Docker keeps its images in {root}, which is wiped when the machine is stopped; move it"
        )
    engine.remember()
    say("Docker answers")


def install(deadline: float, look_s: float) -> None:
    """First boots install updates, and hold apt's locks meanwhile: they are waited for."""
    if shutil.which("cloud-init") is not None:
        say("waiting for the first boot to end")
        run(["cloud-init", "status", "--wait"], max(1.0, min(600.0, deadline - time.monotonic())))
    for words in (("update",), ("install", "--no-install-recommends", "docker.io")):
        _apt(words, deadline, look_s)


def _apt(words: tuple[str, ...], deadline: float, look_s: float) -> None:
    say(f"apt-get {' '.join(words)}")
    while True:
        left = deadline - time.monotonic()
        done = run(as_root([*QUIET, *APT, *words]), max(1.0, left))
        if done.ok:
            return
        if left < 0 or not any(sign in done.out + done.err for sign in LOCKED):
            raise Failed(f"apt-get {words[0]}: exit code {done.code}: {done.words()}")
        say("another program holds apt's locks; waiting")
        time.sleep(look_s)


def _start_installed() -> bool:
    """One that is there may only have to be started."""
    if shutil.which("docker") is None or shutil.which("systemctl") is None:
        return False
    return run(as_root(["systemctl", "enable", "--now", "docker"]), 120.0).ok
