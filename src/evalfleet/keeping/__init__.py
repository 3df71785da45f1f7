"""Named pools from Python: what `evalfleet pool` calls."""

from .opening import create, keep_plan, open_pool, pools, tend
from .pool import Pool
from .sites import Answer, Site, running_in

__all__ = ["Answer", "Pool", "Site", "create", "keep_plan", "open_pool", "pools", "running_in", "tend"]
