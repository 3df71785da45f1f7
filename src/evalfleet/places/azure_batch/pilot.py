"""The program of a job's one task: it lets us in, tells the node's host key, and holds the node.

Batch runs its text with the node's Python (3.8 and later, standard library only) as root. A task's folder is
started once: a task that Batch runs anew finds the mark of the first start there, and leaves. On another node
there is no mark, but nobody comes to that one: what Batch counts tells us that it is a second start.
"""

from __future__ import annotations

import glob
import os
import subprocess
import sys
import time

RESTARTED, NO_KVM = 76, 77
LOOK_S = 0.5
KVM_CREATE_VM = 0xAE01


def start_once(folder: str) -> bool:
    try:
        os.close(
            os.open(os.path.join(folder, "evalfleet-started"), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        )
    except FileExistsError:
        return False
    return True


def why_no_kvm() -> str:
    """Make a virtual machine, of nothing: that /dev/kvm is there does not mean that it works."""
    import fcntl

    try:
        with open("/dev/kvm", "r+b", buffering=0) as kvm:
            os.close(fcntl.ioctl(kvm, KVM_CREATE_VM, 0))
    except OSError as err:
        return f"/dev/kvm: {err.strerror or err}"
    return ""


def let_in(user: str, key: str) -> str:
    """Make the user, who may come in with this key and do everything. Returns its home."""
    import pwd

    try:
        pwd.getpwnam(user)
    except KeyError:
        # "*" is no password, but unlike "!" no lock either, by which some sshds let nobody in
        subprocess.run(["useradd", "-m", "-s", "/bin/bash", "-p", "*", user], check=True)
    entry = pwd.getpwnam(user)
    folder = os.path.join(entry.pw_dir, ".ssh")
    os.makedirs(folder, 0o700, exist_ok=True)
    keys = os.path.join(folder, "authorized_keys")
    with open(keys, "w") as file:
        file.write(key + "\n")
    os.chmod(keys, 0o600)
    for path in (folder, keys):
        os.chown(path, entry.pw_uid, entry.pw_gid)
    rights = "/etc/sudoers.d/90-evalfleet"
    with open(rights + ".new", "w") as file:
        file.write(user + " ALL=(ALL) NOPASSWD:ALL\n")
    os.chmod(rights + ".new", 0o440)
    os.replace(rights + ".new", rights)
    return entry.pw_dir


def host_key() -> str:
    """The public key that the node's sshd shows, by its own configuration: of several, the ed25519 one."""
    said = subprocess.run(["/usr/sbin/sshd", "-T"], stdout=subprocess.PIPE, check=True).stdout.decode()
    files = [line.split()[1] for line in said.splitlines() if line.startswith("hostkey ")]
    files = sorted((file for file in files if os.path.exists(file)), key=lambda file: "ed25519" not in file)
    told = subprocess.run(["ssh-keygen", "-y", "-f", files[0]], stdout=subprocess.PIPE, check=True).stdout
    return " ".join(told.decode().split()[:2])


def clean_up(home: str) -> None:
    """End what runs for us here, and let us in no more: the node may be others' too."""
    for program in glob.glob(os.path.join(home, ".evalfleet/*/supervisor-*.pyz")):
        sys.path.insert(0, program)
        from pathlib import Path

        from supervisor.machine import remove_machine  # type: ignore[import-not-found]

        for lock in glob.glob(os.path.join(os.path.dirname(program), "*/supervisor.lock")):
            remove_machine(Path(os.path.dirname(lock)))
        break
    os.unlink(os.path.join(home, ".ssh/authorized_keys"))


def main() -> int:
    began, environ = time.monotonic(), os.environ
    if not start_once(environ["AZ_BATCH_TASK_DIR"]):
        sys.stderr.write("Batch has run this task anew: what ran here before is lost\n")
        return RESTARTED
    problem = why_no_kvm() if environ.get("EVALFLEET_KVM") == "1" else ""
    if problem:
        sys.stderr.write(problem + "\n")
        return NO_KVM
    home = let_in(environ["EVALFLEET_USER"], environ["EVALFLEET_KEY"])
    told = os.path.join(environ["AZ_BATCH_TASK_WORKING_DIR"], "host-key")
    with open(told + ".new", "w") as file:
        file.write(host_key())
    os.replace(told + ".new", told)
    life_s = float(environ["EVALFLEET_LIFE_S"])
    # the supervisor is told by us when the machine expires, which is sooner: the node's start counts, too
    while time.monotonic() - began < life_s and not glob.glob(os.path.join(home, ".evalfleet/*/*/expired")):
        time.sleep(LOOK_S)
    clean_up(home)
    return 0


if __name__ == "__main__":
    sys.exit(main())
