"""Tasks are dealt out in turn, one to each worker, before any has begun."""

from __future__ import annotations


def lane(index: int, total: int, lanes: int) -> int:
    return index % lanes
