"""For all tests: what they find must not depend on how busy the computer is, nor on how they were started."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

settings.register_profile("evalfleet", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("evalfleet")

# Under `nohup`, or in the background of a script, these are ignored, and every process started from here
# would inherit that: Ctrl-C would do nothing to it. A handler, even an idle one, is not inherited.
for name in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(name) is signal.SIG_IGN:
        signal.signal(name, lambda signum, frame: None)
