"""Golden storage: Windows as installed, once on a machine, and the copy that the container works on."""

from __future__ import annotations

import json
import os
import shutil
import time

from . import guest, iso, qcow2, vm
from .config import (
    CONTAINER,
    FILE,
    GOLDEN_INSIDE,
    INSTALLER,
    ON_MACHINE,
    POINTER,
    PORTS,
    PROGRAM,
    SENT,
    SENT_FROM,
)
from .shell import Failed, as_root, replace_file, run, say

TYPE_CHECKING = False
if TYPE_CHECKING:
    import tarfile
    from collections.abc import Collection
    from typing import IO, Any

    from .config import HostConfig
    from .docker import Docker

DISKS = ("data.img", "data.qcow2")
BOOT = "windows.boot"
MODES = ("windows", "windows_secure")
"""Modes of the firmware, whose files bear their names. The image goes over to the second one, and writes
`windows.mode`, when it boots a Windows that a base image without a version number has installed."""
FIRMWARE = ("rom", "vars")
FILES = (
    BOOT,
    *(f"{mode}.{kind}" for mode in MODES for kind in (*FIRMWARE, "tpm")),
    *(f"windows.{kind}" for kind in ("base", "mac", "mode", "old", "type", "ver", "vga")),
    *DISKS,
)
"""All that golden storage may have."""
COMPLETE = ".complete"
WARN_DAYS = 14
INSTALL_S = 7200.0
STALLED_S = 1800.0
GROWTH_GB = 0.02
"""Less than that within `STALLED_S` is no installation that goes on: it asks something on its screen."""
COPY_S = 3600.0


def step_golden(config: HostConfig, engine: Docker) -> None:
    """Golden is complete, and storage is as golden. A way in for people is left beside it."""
    leave_program(config)
    folder = config.golden_folder
    if not is_whole(config):
        if config.golden == ON_MACHINE:
            raise Failed(f"golden={ON_MACHINE}, and {folder} has no Windows; {iso.WHERE}")
        if os.path.exists(os.path.join(folder, COMPLETE)):
            _do(["rm", "-rf", folder])  # another one, or spoilt; what is only incomplete goes on
        if config.golden.startswith("http"):
            fetch(config.golden, os.environ.get(config.golden_token, ""), folder)
        elif config.golden.startswith(SENT):
            _fetch_sent(folder)
        elif config.is_one_file:
            _adopt(config.golden, folder)
        elif not config.golden:
            _install(config, engine, folder)
        _check(folder, config.is_one_file)
        _note(config, folder)
    if _stored(config) != _mark(config):
        engine.remove(CONTAINER)
        restore(config)
    say(f"golden storage is in {folder}, {size_gb(folder):.1f} GB{licence_words(config)}")


def is_there(config: HostConfig) -> bool:
    return is_whole(config) and _stored(config) == _mark(config)


def _stored(config: HostConfig) -> str | None:
    """Which golden storage the container's comes from."""
    try:
        with open(config.state("storage")) as file:
            return file.read()
    except OSError:
        return None


def _mark(config: HostConfig) -> str:
    """A layer is good for nothing but the very disk that it was made over."""
    if not config.layered:
        return config.golden
    found = os.stat(_disk_of(config.golden_folder))
    return f"{config.golden} {found.st_size} {found.st_mtime_ns}"


def leave_program(config: HostConfig) -> None:
    """`cd ~/evalfleet-waa/program && python3 -m waa.host reset` works after the job is gone, too."""
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    target = os.path.join(config.data, PROGRAM)
    if os.path.realpath(os.path.dirname(here)) != os.path.realpath(target):
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(here, os.path.join(target, "waa"), ignore=shutil.ignore_patterns("__pycache__"))
    replace_file(
        os.path.join(config.data, FILE), json.dumps({**config.given, "container": CONTAINER, "ports": PORTS})
    )
    replace_file(os.path.expanduser(POINTER), config.data + "\n")


def restore(config: HostConfig) -> None:
    """Storage as golden has it: a thin layer over its disk, or a copy. The container must not run."""
    begun = time.monotonic()
    fresh, mark = f"{config.storage}.new", config.state("storage")
    if os.path.exists(mark):
        os.unlink(mark)  # cut short from here on, it is done again
    _do(["rm", "-rf", fresh, config.storage])
    _do(["mkdir", fresh])
    if config.layered:
        disk = _disk_of(config.golden_folder)
        layer = os.path.join(config.data, "layer.new")
        qcow2.write_layer(layer, qcow2.Disk(disk), f"{GOLDEN_INSIDE}/{os.path.basename(disk)}")
        _do(["mv", layer, os.path.join(fresh, DISKS[1])])
        others = sorted(set(os.listdir(config.golden_folder)) - {*DISKS, COMPLETE})
        if others:
            _do(["cp", "-a", *(os.path.join(config.golden_folder, name) for name in others), fresh])
    else:
        _do(["cp", "-a", "--reflink=auto", "--sparse=always", f"{config.golden_folder}/.", fresh])
        _do(["rm", "-f", os.path.join(fresh, COMPLETE)])
    _do(["mv", fresh, config.storage])
    with open(mark, "w") as file:
        file.write(_mark(config))
    how = "a new layer over golden" if config.layered else "copied from golden"
    say(f"storage is {how} after {time.monotonic() - begun:.2f} s")


def _disk_of(folder: str) -> str:
    names = [name for name in DISKS if os.path.exists(os.path.join(folder, name))]
    return os.path.join(folder, names[0] if names else DISKS[0])


def _do(argv: list[str]) -> None:
    """Run it as root: what the container wrote is root's."""
    done = run(as_root(argv), COPY_S)
    if not done.ok:
        raise Failed(f"{' '.join(argv)}: {done.words()}")


def size_gb(folder: str) -> float:
    """What it takes on the disk: much of it is zeros."""
    paths = [os.path.join(top, name) for top, _, names in os.walk(folder) for name in names]
    return sum(os.lstat(path).st_blocks * 512 for path in paths if os.path.lexists(path)) / (1 << 30)


# -- is it whole? --------------------------------------------------------------------------------


def lacking(there: Collection[str], one_file: bool = False) -> list[str]:
    """Return the names of the files that a golden storage with these files lacks."""
    missing = [] if BOOT in there else [BOOT]
    if not one_file:
        firmware = [[name for kind in FIRMWARE if (name := f"{mode}.{kind}") not in there] for mode in MODES]
        least: list[str] = min(firmware, key=len)
        missing += least
    return missing if any(name in there for name in DISKS) else [*missing, DISKS[0]]


def _check(folder: str, one_file: bool = False) -> None:
    there: set[str] = set(os.listdir(folder)) if os.path.isdir(folder) else set()
    missing = lacking(there, one_file)
    empty = [name for name in DISKS if name in there and os.path.getsize(os.path.join(folder, name)) == 0]
    what = f"has no {', '.join(missing)}" if missing else f"has an empty {empty[0]}" if empty else ""
    if not what:
        below = qcow2.Disk(_disk_of(folder)).backing
        what = f"has a disk that is a layer over {below}, which is not there" if below else ""
    if what:
        raise Failed(f"golden storage in {folder} {what}; give another with --set golden=URL|PATH, or none")


def _note(config: HostConfig, folder: str) -> None:
    """Where we may write. One on a machine image is checked each time, which costs nothing."""
    if config.owns_golden:
        known = {"source": config.golden, "sizes": _sizes(folder), "installed": _installed(folder)}
        with open(os.path.join(folder, COMPLETE), "w") as file:
            json.dump(known, file)


def is_whole(config: HostConfig) -> bool:
    folder = config.golden_folder
    try:
        if not config.owns_golden:
            _check(folder)
            return True
        with open(os.path.join(folder, COMPLETE)) as file:
            note = json.load(file)
        same = config.golden == ON_MACHINE or note["source"] == config.golden
        return bool(same and note["sizes"] == _sizes(folder))
    except (Failed, OSError, ValueError, KeyError):
        return False


def _installed(folder: str) -> float:
    """When Windows was shut down for the first time, which is when this file was made.

    Of golden storage that came from elsewhere, it is the latest that it can have been.
    """
    return os.stat(os.path.join(folder, BOOT)).st_mtime


def installed_at(config: HostConfig) -> float:
    """When the golden Windows was installed, at the latest, in seconds since 1970; 0 if nothing tells."""
    folder = config.golden_folder
    try:
        with open(os.path.join(folder, COMPLETE)) as file:
            return float(json.load(file).get("installed") or 0.0)
    except (OSError, ValueError):
        return _installed(folder) if os.path.exists(os.path.join(folder, BOOT)) else 0.0


def licence_words(config: HostConfig) -> str:
    """How old the evaluation licence of the golden Windows is, to be said after something else."""
    installed = installed_at(config)
    days = int((time.time() - installed) / 86400)
    if not installed or days < 1:
        return ""
    left = iso.LICENCE_DAYS - days
    if left < 0:
        return f"; WARNING: it is {days} days old, and its licence lasted {iso.LICENCE_DAYS}: make it anew"
    return f"; {'WARNING: ' if left < WARN_DAYS else ''}its licence is {days} days old, {left} are left"


def _sizes(folder: str) -> dict[str, int]:
    names = sorted(name for name in os.listdir(folder) if name != COMPLETE)
    return {name: os.path.getsize(os.path.join(folder, name)) for name in names}


# -- from elsewhere ------------------------------------------------------------------------------


def fetch(url: str, token: str, folder: str) -> None:
    """A tar archive, or a folder of a blob store whose files are asked for by name. Raises Failed."""
    os.makedirs(folder, exist_ok=True)
    begun = time.monotonic()
    if url.endswith((".tar", ".tar.gz", ".tgz")):
        _fetch_archive(url, token, folder)
    elif url.endswith(".qcow2"):
        _fetch_disk(url, token, folder)
    else:
        _fetch_files(url.rstrip("/"), token, folder)
    say(f"golden storage came in {time.monotonic() - begun:.0f} s")


def _fetch_sent(folder: str) -> None:
    """Raises Wanted if nobody has told where it is."""
    addresses: dict[str, str] = json.loads(os.environ.get(SENT_FROM) or "{}")
    if not addresses:
        raise iso.Wanted(
            "golden storage is on the computer that runs evalfleet, and not here; `evalfleet pool prepare` "
            "sends it to the place's storage, once, and lets machines fetch it"
        )
    from .download import Download, Missing  # it takes long to load, and is seldom needed

    os.makedirs(folder, exist_ok=True)
    begun = time.monotonic()
    for name, address in addresses.items():
        url, _, token = address.partition("?")
        try:
            Download(url, token, os.path.join(folder, name)).bring()
        except Missing:
            raise Failed(f"{url} is not there; prepare the pool again") from None
    say(f"golden storage came in {time.monotonic() - begun:.0f} s")


def _fetch_files(url: str, token: str, folder: str) -> None:
    from .download import Download, Missing  # it takes long to load, and is seldom needed

    missing: list[str] = []
    for name in FILES:
        if name == DISKS[1] and DISKS[0] not in missing:
            continue  # it has one disk
        try:
            Download(f"{url}/{name}", token, os.path.join(folder, name)).bring()
        except Missing:
            missing.append(name)
    if BOOT in missing:
        raise Failed(f"{url}/{BOOT} is not there; golden is the URL of the folder that has it")


def _fetch_disk(url: str, token: str, folder: str) -> None:
    from .download import Download, Missing

    try:
        Download(url, token, os.path.join(folder, DISKS[1])).bring()
    except Missing:
        raise Failed(f"{url} is not there") from None
    _complete(folder)


def _adopt(disk: str, folder: str) -> None:
    """A disk of this machine becomes golden storage: linked where that is possible, for it is only read."""
    os.makedirs(folder, exist_ok=True)
    target = os.path.join(folder, DISKS[1])
    if not os.path.exists(disk):
        raise Failed(f"{disk} is not on the machine; give another with --set golden=URL|PATH")
    _do(
        ["cp", "-aL", "--link", "--force", disk, target]
        if _same_disk(disk, folder)
        else ["cp", "--reflink=auto", "--preserve=timestamps", disk, target]
    )
    _complete(folder)


def _same_disk(path: str, folder: str) -> bool:
    return os.stat(path).st_dev == os.stat(folder).st_dev


def _complete(folder: str) -> None:
    """What the image takes as the sign that Windows is installed. The rest it makes itself."""
    boot, disk = os.path.join(folder, BOOT), os.stat(_disk_of(folder))
    with open(boot, "a"):
        pass
    os.utime(boot, (disk.st_mtime, disk.st_mtime))  # Windows was installed then, at the latest


def _fetch_archive(url: str, token: str, folder: str) -> None:
    import gzip
    import tarfile
    import zlib

    from .download import Download, Missing, no_room

    path = os.path.join(os.path.dirname(folder), "golden-download")
    try:
        Download(url, token, path).bring()
    except Missing:
        raise Failed(f"{url} is not there") from None
    try:
        with tarfile.open(path) as archive:
            _unpack(archive, folder)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as err:
        os.unlink(path)  # the next try brings it anew
        raise Failed(f"{url} is damaged, or no tar archive ({err}); make it again") from None
    except OSError as err:
        raise Failed(no_room(folder, err)) from None  # what came is not brought again
    os.unlink(path)


def _unpack(archive: tarfile.TarFile, folder: str) -> None:
    for member in archive:
        name = os.path.basename(member.name)
        source = archive.extractfile(member) if member.isfile() else None
        if source is not None and name in FILES:
            with source, open(os.path.join(folder, name), "wb") as target:
                _copy_sparse(source, target, member.size)
            os.utime(target.name, (member.mtime, member.mtime))
    packed: Any = archive.fileobj
    while packed.read(1 << 20):
        pass  # what gzip knows of damage stands at its very end, after the archive's own


def _copy_sparse(source: IO[bytes], target: IO[bytes], size: int) -> None:
    while block := source.read(1 << 20):
        if block.strip(b"\0"):
            target.write(block)
        else:
            target.seek(len(block), os.SEEK_CUR)
    target.truncate(size)


# -- made here -----------------------------------------------------------------------------------


def _install(config: HostConfig, engine: Docker, folder: str) -> None:
    """WAA's own way: its image installs Windows, shuts it down and ends. Raises Failed."""
    making = f"{folder}.new"
    os.makedirs(making, exist_ok=True)  # an installation that was cut short goes on
    engine.remove(CONTAINER)  # its ports are needed, so that people can look at the installation
    if not engine.is_running(INSTALLER):
        engine.remove(INSTALLER)
        engine.run_detached(config.install_words(making, iso.bring(config)), restart=False)
    say("installing Windows, which takes 20 minutes or more; `evalfleet pool vnc` shows it")
    problem = _await_installation(engine, making)
    if not problem:
        try:
            _check(making)
        except Failed as err:
            problem = f"{err}: {vm.last_error(vm.log(engine, INSTALLER))}"
    if problem:
        guest.save_evidence(engine, INSTALLER)
        engine.try_("stop", "-t", "0", INSTALLER, timeout_s=60.0)
        raise Failed(f"Windows was not installed: {problem}")
    engine.remove(INSTALLER)
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(making, folder)
    shutil.rmtree(os.path.dirname(config.iso_file), ignore_errors=True)  # it is needed no more


def _await_installation(engine: Docker, making: str) -> str:
    """Until its container has ended. What went wrong, if something did."""
    begun = grew = time.monotonic()
    most = 0.0
    watch = vm.VmWatch(engine, INSTALLER, lambda: f"{size_gb(making):.1f} GB written")
    look_s = 0.2
    while engine.is_running(INSTALLER):
        if watch.look() and engine.is_running(INSTALLER):
            return watch.problem
        now, size = time.monotonic(), size_gb(making)
        if size > most + GROWTH_GB:
            most, grew = size, now
        if now - begun > INSTALL_S:
            return f"it was not done after {INSTALL_S / 60:.0f} minutes, with {size:.1f} GB written"
        if now - grew > STALLED_S:
            minutes = STALLED_S / 60
            return f"it stands still: nothing was written for {minutes:.0f} minutes, after {size:.1f} GB"
        time.sleep(look_s)
        look_s = min(look_s * 1.3, vm.LOOK_S)
    return ""
