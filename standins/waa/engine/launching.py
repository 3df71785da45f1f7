"""A container's processes: how its namespaces are made and entered, and what it sees in them."""

from __future__ import annotations

import os
import shlex

from .store import HOST_FOLDERS, Container, settings

USUAL_RIGHTS = (
    *("chown", "dac_override", "fowner", "fsetid", "kill", "setgid", "setuid", "setpcap"),
    *("net_bind_service", "net_raw", "sys_chroot", "audit_write", "setfcap"),
)
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
# The first child is process 1. `unshare --fork` would give a wrong exit code when that is killed.
WAIT = 'exec 4<&0; sh -c "$0" <&4 4<&- & wait $!'
PROC_FLAGS = "ro,nosuid,nodev,noexec"
KINDS = ("user", "mount", "pid", "ipc", "uts")


def unshare(container: Container) -> list[str]:
    """Start process 1. It says `ready`, hears a line, and becomes the command, its output in the log."""
    kinds = [f"--{kind}" for kind in (*KINDS, *([] if on_host_network(container) else ["net"]))]
    return ["unshare", *kinds, *_users(), "sh", "-c", WAIT, _script(container)]


def _users() -> list[str]:
    """Where only root is known inside, it has no rights over files of other users, as the original's has."""
    if not settings().get("all_users"):
        return ["--map-root-user"]
    return ["--map-users=0,0,60000", "--map-groups=0,0,60000", "--setuid=0", "--setgid=0"]


def enter(container: Container, pid: int, workdir: str, command: list[str]) -> list[str]:
    kinds = [f"--{kind}" for kind in (*KINDS, *([] if on_host_network(container) else ["net"]))]
    into = ["nsenter", f"--target={pid}", *kinds, "--preserve-credentials", "--"]
    return [*into, *_rights(container), "sh", "-c", 'cd "$0" && exec "$@"', workdir, *command]


def on_host_network(container: Container) -> bool:
    return bool(container.config["network"] == "host")


def _rights(container: Container) -> list[str]:
    asked = [name.lower().replace("cap_", "", 1) for name in container.config["cap_add"]]
    kept = ",".join(f"+{name}" for name in dict.fromkeys((*USUAL_RIGHTS, *asked)))
    return ["setpriv", f"--bounding-set=-all,{kept}"]


def _script(container: Container) -> str:
    root = shlex.quote(container.rootfs)
    lines = [
        "set -e",
        f"mount --bind {root} {root}",
        f"cd {root}",
        *_host_folders(),
        "mkdir -p proc sys dev tmp run root; chmod 1777 tmp",
        # where the host's own /proc is masked in parts, the kernel allows no better one than it finds
        f"mount -t proc proc proc 2>/dev/null || mount -t proc -o {PROC_FLAGS} proc proc 2>/dev/null"
        " || mount --rbind /proc proc",
        *_devices(container),
        *(line for mount in container.config["mounts"] for line in _mount(mount)),
        "" if on_host_network(container) else "ip link set lo up",
        f"hostname {container.id[:12]}",
        "pivot_root . . && umount -l . && cd /",
        f"cd {shlex.quote(container.config['workdir'] or '/')}",
        "echo ready; read -r _; exec </dev/null >&2",
        "exec " + " ".join(shlex.quote(word) for word in [*_rights(container), *container.config["command"]]),
    ]
    return "\n".join(lines)


def _host_folders() -> list[str]:
    """The host's programs, under the image's own files."""
    lines: list[str] = []
    for name in HOST_FOLDERS:
        path = "/" + name
        if os.path.islink(path):
            lines.append(f"[ -e {name} ] || ln -s {shlex.quote(os.readlink(path))} {name}")
        elif os.path.isdir(path):
            lines.append(f"mkdir -p {name} && mount --rbind {path} {name}")
    return lines


def _devices(container: Container) -> list[str]:
    lines = ["mount -t tmpfs -o mode=755 dev dev", "mkdir dev/shm dev/pts"]
    lines += [f"touch dev/{name} && mount --bind /dev/{name} dev/{name}" for name in DEVICES]
    lines.append("ln -s /proc/self/fd dev/fd")
    for device in container.config["devices"]:
        source, _, rest = device.partition(":")
        target = (rest.partition(":")[0] or source).lstrip("/")
        lines.append(f"mkdir -p $(dirname {shlex.quote(target)}); touch {shlex.quote(target)}")
        lines.append(f"mount --bind {shlex.quote(source)} {shlex.quote(target)}")
    return lines


def _mount(mount: dict[str, str]) -> list[str]:
    source, target = shlex.quote(mount["source"]), shlex.quote(mount["target"].lstrip("/"))
    if os.path.isdir(mount["source"]):
        lines = [f"mkdir -p {target}"]
    else:
        lines = [f"mkdir -p $(dirname {target}); touch {target}"]
    lines.append(f"mount --bind {source} {target}")
    if mount["mode"] == "ro":
        lines.append(f"mount -o remount,bind,ro {target}")
    return lines
