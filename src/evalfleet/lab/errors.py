"""What goes wrong in a lab."""

from __future__ import annotations

from evalfleet.errors import FleetError


class LabError(FleetError):
    """The lab cannot do this here; the message says what is missing or what failed."""
