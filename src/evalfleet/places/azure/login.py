"""Who we are to Azure, and for how long."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .arm import Arm
from .lasting import ENTRIES, doubt, is_handed_over, is_renewed
from .settings import az_folder


class Login:
    def __init__(self, arm: Arm, environ: Mapping[str, str]) -> None:
        self._arm = arm
        self._environ = environ

    async def doubt(self, now: float, lasts_s: float) -> str:
        """Why it may not last for so long; empty if nothing is known against it. Raises ArmFault."""
        if is_renewed(self._environ):
            return ""
        claims = await self._arm.claims()
        return doubt(claims, now, lasts_s, handed_over=is_handed_over(claims, self._entries()))

    def _entries(self) -> str:
        try:
            return (Path(az_folder(self._environ)) / ENTRIES).read_text("utf-8")
        except OSError:
            return ""
