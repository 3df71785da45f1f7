"""Named pools: machines that outlive runs, and are lent to one run after another."""

from .bare import Bare
from .lending import LentPlace, OwnPlace, machine_of, pool_fence
from .reading import PoolView, read_pool

__all__ = ["Bare", "LentPlace", "OwnPlace", "PoolView", "machine_of", "pool_fence", "read_pool"]
