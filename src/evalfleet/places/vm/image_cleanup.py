"""What makes a machine itself is removed from it, so that its disk can become an image.

Before its disk becomes an image, what makes the machine itself goes, secrets too. All that could be a secret
goes with the first part of that (CLEAN), which ends what we run there. The second (SEAL) shuts us out. So it
comes last, runs to its end whoever leaves, and may be taken for done where a machine that has got so far does
not let us in any more.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from evalfleet.errors import PlaceError

if TYPE_CHECKING:
    from evalfleet.channels.ssh.hosts import SshHost

CLEAN = r"""
set -eu
home=$(getent passwd "$1" | cut -d: -f6)
for each in "$home"/.evalfleet/*/*/supervisor.pid; do
  if [ -e "$each" ]; then read -r pid _ <"$each" || true; kill -9 "$pid" 2>/dev/null || true; fi
done
rm -rf "$home/.evalfleet"
for each in "$home" /root; do
  rm -rf "$each/.docker/config.json" "$each"/.az* "$each/.aws" "$each/.config/gcloud" "$each/.netrc" \
    "$each/.git-credentials" "$each/.cache" "$each"/.ssh/id_* "$each"/.*_history
done
if command -v apt-get >/dev/null; then apt-get clean || true; fi
if command -v cloud-init >/dev/null; then cloud-init clean --logs; fi
rm -rf /var/log/journal/*
find /var/log -xdev -type f -exec truncate -s 0 {} +
find /tmp /var/tmp -xdev -mindepth 1 -delete 2>/dev/null || true
: >/etc/machine-id
fstrim / 2>/dev/null || true
df -Pk / | awk 'NR == 2 { print $3 }'
"""
SEAL = r"""
trap "" HUP INT TERM PIPE
exec </dev/null >/dev/null 2>&1
home=$(getent passwd "$1" | cut -d: -f6)
if command -v waagent; then waagent -force -deprovision; fi
rm -rf /var/lib/waagent/*
rm -f /etc/ssh/ssh_host_* /etc/sudoers.d/90-cloud-init-users
rm -f /root/.ssh/authorized_keys "$home/.ssh/authorized_keys"
sync
"""


async def clean(host: SshHost, user: str) -> float:
    """Remove all but our way in. Returns the GB in use on its disk. Raises as hosts do, and PlaceError."""
    said = await _run(host, f"sudo -n sh -c {shlex.quote(CLEAN)} clean {shlex.quote(user)}")
    try:
        return int(said.split()[-1]) / (1 << 20)
    except (ValueError, IndexError):
        raise PlaceError(
            f"{host.name}: it did not tell what its disk has in use", transient=False, scope="machine"
        ) from None


async def seal(host: SshHost, user: str) -> None:
    """Remove our way in. Raises as `clean` does."""
    await _run(host, f"sudo -n setsid --wait sh -c {shlex.quote(SEAL)} seal {shlex.quote(user)}")


async def _run(host: SshHost, command: str) -> str:
    from evalfleet.channels.ssh.hosts import converse

    async with host.process(command) as process:
        said, errors = await converse(process)
        status = process.exit_status
    if status != 0:
        told = errors.decode("utf-8", "replace").strip()[-300:] or f"exit status {status}"
        raise PlaceError(f"{host.name} cannot be cleaned: {told}", transient=False, scope="machine")
    return said.decode("utf-8", "replace")
