"""For all tests: what a property test finds must not depend on how busy the computer is."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("evalfleet", deadline=None)
settings.load_profile("evalfleet")
