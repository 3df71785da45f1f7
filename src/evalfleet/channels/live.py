"""Where a job's output is while it runs, for machines whose files this computer can read."""

from __future__ import annotations

from pathlib import Path

from .supervisor.files import job_name


def live_log(address: str, job: str) -> Path:
    """The job's log on a machine whose address is a directory. It need not exist."""
    return Path(address) / "jobs" / job_name(job) / "log"
