"""Slurm's accounting: Debian's slurmdbd and MariaDB beside a private cluster. Nothing is installed for it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.waiting import until

from .cluster import Cluster, Ports

PACKAGES = ("slurmdbd", "slurm-wlm-mysql-plugin", "libmariadb3", "mariadb-server-core", "mariadb-server")
PLUGINS = "usr/lib/x86_64-linux-gnu/slurm-wlm"
SMALL = ("--innodb-buffer-pool-size=32M", "--innodb-log-file-size=8M", "--skip-grant-tables", "--user=root")
DBD = """\
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
DbdHost=localhost
DbdPort={port}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm
PluginDir={plugins}:/{system}
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
"""
USED = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
AccountingStoragePort={port}
AccountingStoragePass={folder}/munge.socket
AccountingStorageEnforce=associations,limits,qos
"""


def packages() -> Path:
    """Debian's packages, unpacked. They are fetched once, by apt, unless SLURMDBD names their folder."""
    kept = Path(os.environ.get("SLURMDBD") or Path.home() / ".cache" / "evalfleet-slurmdbd")
    root = kept / "root"
    if not root.exists():
        kept.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", *PACKAGES], cwd=kept, check=True, capture_output=True)
        for package in kept.glob("*.deb"):
            subprocess.run(["dpkg", "-x", package.name, "partial"], cwd=kept, check=True)
        (kept / "partial").rename(root)
    return root


@contextmanager
def accounting(cluster: Cluster) -> Iterator[None]:
    """The cluster, which does not run yet, keeps accounts and takes jobs of those alone that are known."""
    root, folder = packages(), cluster.folder
    ports = Ports(1)
    port = ports.first
    cluster.config.write_text(
        cluster.config.read_text().replace(
            "AccountingStorageType=accounting_storage/none\n", USED.format(folder=folder, port=port)
        )
    )
    config = folder / "slurmdbd.conf"
    config.write_text(DBD.format(folder=folder, port=port, plugins=root / PLUGINS, system=PLUGINS))
    config.chmod(0o600)
    environ = {
        **os.environ,
        **cluster.environ,  # slurmdbd.conf is beside slurm.conf
        "LD_LIBRARY_PATH": str(root / "usr/lib/x86_64-linux-gnu"),
        "MYSQL_UNIX_PORT": str(folder / "maria.sock"),
    }
    running: list[subprocess.Popen[bytes]] = []
    try:
        running.append(_start_maria(root, folder, environ))
        cluster.start_munge()
        argv = [str(root / "usr/sbin/slurmdbd"), "-D"]
        with (folder / "slurmdbd.out").open("wb") as out:
            running.append(subprocess.Popen(argv, env=environ, stdout=out, stderr=out))
        log = folder / "slurmdbd.log"
        until(
            lambda: log.exists() and "slurmdbd version" in log.read_text() and "started" in log.read_text(),
            lambda: f"slurmdbd is up: {log.read_text() if log.exists() else ''}",
        )
        yield
    finally:
        for process in reversed(running):
            process.kill()
            process.wait()
        ports.free()


def _start_maria(root: Path, folder: Path, environ: dict[str, str]) -> subprocess.Popen[bytes]:
    data, shared = folder / "maria", root / "usr/share/mysql"
    (data / "mysql").mkdir(parents=True)
    places = (f"--datadir={data}", f"--basedir={root / 'usr'}", f"--lc-messages-dir={shared}")
    argv = [str(root / "usr/sbin/mariadbd"), "--no-defaults", *places, *SMALL]
    tables = "".join(
        (shared / name).read_text() for name in ("mysql_system_tables.sql", "mysql_system_tables_data.sql")
    )
    with (folder / "maria.out").open("wb") as out:
        made = subprocess.run(
            [*argv, "--bootstrap"],
            input=f"use mysql;\n{tables}".encode(),
            env=environ,
            stdout=out,
            stderr=out,
        )
        assert made.returncode == 0, (folder / "maria.out").read_text()
        socket = f"--socket={folder / 'maria.sock'}"
        process = subprocess.Popen([*argv, socket, "--skip-networking"], env=environ, stdout=out, stderr=out)
    until((folder / "maria.sock").exists, lambda: f"MariaDB: {(folder / 'maria.out').read_text()}")
    return process
