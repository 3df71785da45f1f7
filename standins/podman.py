"""A real podman, Debian's, whose images and containers are in a folder of a test's own. It needs root."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from standins.waa import rootfs
from tests.waiting import PATIENCE_S, until

LIMITS = (
    "--ulimit",
    "nofile=20000:20000",
    "--ulimit",
    "nproc=32768:32768",
)  # or it asks for more than there is


class Podman:
    """With its images and containers in a folder of the test's own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        where = ("--root", str(folder / "root"), "--runroot", str(folder / "run"), "--storage-driver", "vfs")
        kept = ("--tmpdir", str(folder / "tmp"), "--cgroup-manager", "cgroupfs")
        # runc's own folder is everybody's: what cleans up after a container is not told of another one
        runtime = ("--runtime", "runc")
        self.options = (*where, *kept, *runtime)
        self.argv: tuple[str, ...] = ("podman", *self.options)
        self.group = f"evalfleet-podman-{folder.name}"
        self.grouped = ("--cgroup-parent", f"/{self.group}")

    def __call__(self, *argv: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.argv, *argv], capture_output=True, text=True, input=text, timeout=PATIENCE_S
        )

    def ok(self, *argv: str, text: str | None = None) -> str:
        done = self(*argv, text=text)
        assert done.returncode == 0, f"podman {argv}: {done.returncode}: {done.stderr}"
        return done.stdout

    def import_image(self, name: str, files: Path, entrypoint: Sequence[str], env: Mapping[str, str]) -> None:
        """Make an image of `files` and the programs of this computer that `rootfs` lists."""
        archive = self.folder / "root.tar"
        rootfs.write_rootfs(archive, files)
        variables = {"PATH": "/opt/stand-in/bin:/usr/local/bin:/usr/bin:/bin", **env}
        lines = [f"ENTRYPOINT {json.dumps(entrypoint)}"]
        lines += [f"ENV {key}={json.dumps(value)}" for key, value in variables.items()]
        changes = [word for line in lines for word in ("--change", line)]
        self.ok("import", "-q", *changes, str(archive), name)

    def write_program(self, path: Path, run: Sequence[str] = (), **env: str) -> None:
        """A program that is this engine. Options of `run` that it adds, and variables that it sets, may be
        given."""
        path.parent.mkdir(exist_ok=True)
        program = shlex.join((shutil.which("podman") or "", *self.options))
        lines = [f"export {key}={shlex.quote(value)}" for key, value in env.items()]
        lines.append(f'if [ "$1" = run ]; then shift; set -- run {shlex.join(run)} "$@"; fi' if run else "")
        path.write_text("\n".join(("#!/bin/sh", *lines, f'exec {program} "$@"\n')))
        path.chmod(0o755)

    @contextmanager
    def as_docker(self, path: Path, prefix: Sequence[str] = ()) -> Iterator[None]:
        """A program that passes for docker's while this lasts: it asks a daemon, whose children containers
        are, and gives these the limits that they need here. `prefix` goes before the daemon's command."""
        where = f"unix://{self.folder}/podman.sock"
        client = shlex.join((shutil.which("podman") or "", "--remote", "--url", where))
        limited = shlex.join(("run", *LIMITS, *self.grouped))
        path.parent.mkdir(exist_ok=True)
        run = f'run) shift; exec {client} {limited} "$@" ;;'
        path.write_text(f'#!/bin/sh\ncase $1 in {run} *) exec {client} "$@" ;; esac\n')
        path.chmod(0o755)
        argv = (*prefix, "podman", *self.options, "system", "service", "--time=0", where)
        with subprocess.Popen(argv) as daemon:
            try:
                until(lambda: not subprocess.run([path, "version"], capture_output=True).returncode)
                yield
            finally:
                self("rm", "-f", "-a", "-t", "0")
                daemon.terminate()

    def destroy(self) -> None:
        """It leaves control groups behind otherwise."""
        self("rm", "-f", "-a", "-t", "0")
        tops = Path("/sys/fs/cgroup")
        for top in (*tops.glob(self.group), *tops.glob(f"*/{self.group}")):
            for group, _, _ in os.walk(top, topdown=False):
                # the monitors of what a daemon's clients have executed stay for five minutes
                for pid in Path(group, "cgroup.procs").read_text().split():
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                remove_group(group)
        with suppress(OSError):
            os.rmdir("/run/runc")  # not if somebody else has containers
        shutil.rmtree(self.folder)


def lacking(programs: Sequence[str]) -> str | None:
    """Why `podman_with` cannot be used here, in one line."""
    if os.geteuid():
        return "that needs root"
    absent = [name for name in ("podman", "runc", *programs) if shutil.which(name) is None]
    return f"there is no {absent[0]} (Debian: apt install podman runc)" if absent else None


@contextmanager
def podman_with(programs: Sequence[str]) -> Iterator[Podman]:
    """An engine with the image localhost/tiny, made of programs of this computer; `bin/podman` runs it."""
    made = Podman(Path(tempfile.mkdtemp(prefix="ef-", dir="/tmp")))  # it takes no longer paths
    try:
        (made.folder / "files").mkdir()
        rootfs.write_rootfs(made.folder / "tiny.tar", made.folder / "files", programs)
        made.ok("import", "-q", str(made.folder / "tiny.tar"), "localhost/tiny")
        made.write_program(made.folder / "bin" / "podman")
        yield made
    finally:
        made.destroy()


def remove_group(group: str) -> None:
    """The monitor of a container leaves its group a moment after the container is gone."""

    def removed() -> bool:
        try:
            os.rmdir(group)
        except OSError as err:
            if err.errno != errno.EBUSY:
                raise
            return False
        return True

    until(removed, f"{group} to be left")
