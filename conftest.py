"""For all tests: what they find must not depend on how busy the computer is, nor on how they were started."""

from __future__ import annotations

import os
import signal
import sys

from hypothesis import HealthCheck, settings

settings.register_profile("evalfleet", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("evalfleet")

# Where Python is told not to keep what it compiled, as in many container images, each of the thousands of
# processes that the tests start would compile all it imports, which doubles what it takes to start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Under `nohup`, or in the background of a script, these are ignored, and every process started from here
# would inherit that: Ctrl-C would do nothing to it. A handler, even an idle one, is not inherited.
for name in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(name) is signal.SIG_IGN:
        signal.signal(name, lambda signum, frame: None)
