"""Named pools: machines that outlive runs, and are lent to one run after another."""

from evalfleet.benchmarks.loaded import Bare

from .changes import Change
from .pool_places import LentPlace, estate_at, fence_of, machine_of, pool_fence
from .view import PoolView, look_at, read_pool

__all__ = [
    "Bare",
    "Change",
    "LentPlace",
    "PoolView",
    "estate_at",
    "fence_of",
    "look_at",
    "machine_of",
    "pool_fence",
    "read_pool",
]
