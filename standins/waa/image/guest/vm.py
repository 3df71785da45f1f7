"""What stands for QEMU: checks what it needs, boots or installs the disk in /storage, and serves the guest.

/storage holds data.img and windows.*, as the original makes them; data.img starts with a mark, and a disk
without it never boots. What happens to the guest is written to it, so that it is not the golden one any more.
"""

import json
import os
import signal
import struct
import subprocess
import sys
import time

STORAGE = os.environ.get("STORAGE", "/storage")
ADDRESSES = ("20.20.20.21", "172.30.0.2")
MARK = b"stand-in disk\n"
OTHERS = ("windows.base", "windows.mac", "windows.rom", "windows.vars")
PYTHON = "/usr/bin/python3"
NAME = "qemu-system-x86_64"
ERROR = "\x1b[1;31m❯ ERROR: {}\x1b[0m"
QCOW2 = b"QFI\xfb"
DISKS = (os.path.join(STORAGE, "data.qcow2"), os.path.join(STORAGE, "data.img"))  # as the base image looks
BOOT = "windows.boot"  # made by a clean shutdown: without it Windows is installed anew


def main() -> int:
    plan = read_plan()
    problem = missing()
    if problem:
        print(ERROR.format(problem), flush=True)
        return 1
    installed = os.path.exists(os.path.join(STORAGE, BOOT))
    if not installed and not has_iso(plan):
        print(ERROR.format("ISO file not found or is empty."), flush=True)
        return 61
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # until Windows runs, its power button does nothing
    subprocess.Popen([PYTHON, "/guest/monitor.py", os.environ.get("ARGUMENTS", "")])
    if not installed:
        print("❯ Installing Windows...", flush=True)
        time.sleep(float(plan.get("install_s", 0.5)))
        while plan.get("install_waits") and not os.path.exists(os.path.join(STORAGE, "go")):
            time.sleep(0.05)
        if plan.get("install_fails"):
            print(ERROR.format(plan["install_fails"]), flush=True)
            return 62
        make_disk()
    else:
        choose_firmware()
    print(f"❯ Booting Windows{' securely' if is_secure() else ''} using QEMU...", flush=True)
    time.sleep(float(plan.get("boot_s", 0.3)))
    if plan.get("boot_fails"):
        print(ERROR.format(plan["boot_fails"]), flush=True)
        return 15
    disk = next((path for path in DISKS if os.path.exists(path)), DISKS[1])
    if not is_sound(disk) or not plan.get("boots", True):
        print("BdsDxe: failed to load Boot0001: Not Found", flush=True)  # QEMU runs on, Windows does not
        while True:
            time.sleep(3600)
    os.execv(PYTHON, [NAME, "/guest/server.py", disk])


def is_sound(disk: str) -> bool:
    """Does it hold Windows? A layer does if what is below it does, where the container can see that."""
    try:
        with open(disk, "rb") as file:
            head = file.read(32)
            if not head.startswith(QCOW2):
                return head.startswith(MARK)
            _, version, at, length, bits, _ = struct.unpack(">4sIQIIQ", head)
            file.seek(at)
            below = file.read(length).decode() if at else ""
            file.seek(0)
            return version == 3 and bits == 16 and (is_sound(below) if below else MARK in file.read())
    except (OSError, struct.error) as err:
        print(f"qemu-system-x86_64: Could not open backing file: {err}", flush=True)
        return False


def has_iso(plan: dict) -> bool:
    """The original downloads none; an image on a newer base does (`downloads` in the plan)."""
    if plan.get("downloads"):
        print("❯ Downloading Windows 11 Enterprise (Evaluation)...", flush=True)
        return True
    return os.path.isfile("/custom.iso") and os.path.getsize("/custom.iso") > 0


def missing() -> str:
    if not os.path.exists("/dev/kvm") and os.environ.get("KVM") != "N":  # N: software emulation, as asked for
        return "KVM acceleration is not available (no access to /dev/kvm)"
    for address in ADDRESSES:
        done = subprocess.run(
            ["ip", "addr", "add", address + "/32", "dev", "lo"], capture_output=True, text=True
        )
        if done.returncode and "exists" not in done.stderr:
            return "Failed to create bridge. Please add the docker setting: --cap-add NET_ADMIN"
    subprocess.run(["ip", "link", "set", "lo", "up"], check=False)
    return ""


def read_plan() -> dict:
    """What a test wants: from the storage, or else from the image."""
    for path in (os.path.join(STORAGE, "plan.json"), "/plan.json"):
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                return json.load(file)
    return {}


def is_secure() -> bool:
    return os.path.exists(os.path.join(STORAGE, "windows.mode"))


def choose_firmware() -> None:
    """The base image has no version number, and so takes every Windows for one of before 2.14: it renames
    the firmware's files and writes down the mode, at the first boot after the installation."""
    for kind in ("rom", "vars"):
        plain, secure = (os.path.join(STORAGE, f"{mode}.{kind}") for mode in ("windows", "windows_secure"))
        if not is_secure() and os.path.exists(plain) and not os.path.exists(secure):
            os.rename(plain, secure)
        if not os.path.exists(secure):  # the image's own, with Microsoft's keys
            with open(secure, "w", encoding="utf-8") as file:
                file.write("from the image\n")
    with open(os.path.join(STORAGE, "windows.mode"), "w", encoding="utf-8") as file:
        file.write("windows_secure\n")


def make_disk() -> None:
    with open(os.path.join(STORAGE, "data.img"), "wb") as file:
        file.write(MARK)
    for name in OTHERS:
        with open(os.path.join(STORAGE, name), "w", encoding="utf-8") as file:
            file.write(name + "\n")
    with open(os.path.join(STORAGE, "windows.ver"), "w", encoding="utf-8") as file:
        file.write("0.00\n")


if __name__ == "__main__":
    sys.exit(main())
