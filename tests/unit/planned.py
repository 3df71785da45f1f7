"""A plan, decided in a folder that no run has used."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from evalfleet.planning.load import HomeFacts, LentPool, load
from evalfleet.planning.plan import Resolved, decide
from evalfleet.planning.request import Purpose, RunRequest, read


def resolve(
    request: RunRequest,
    *,
    environ: Mapping[str, str],
    cwd: Path,
    now: int = 0,
    purpose: Purpose = "run",
    pool: LentPool | None = None,
    home_id: str = "",
) -> Resolved:
    options = read(request, environ=environ, cwd=cwd, purpose=purpose)
    return decide(options, load(options, HomeFacts(names=lambda: (home_id, ()), pool=pool)), now)
