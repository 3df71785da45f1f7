"""Each worker has a contiguous slice of the tasks, of the same size but for one."""

from __future__ import annotations


def lane(index: int, total: int, lanes: int) -> int:
    size, extra = divmod(total, lanes)  # the first workers have one more
    return index // (size + 1) if index < extra * (size + 1) else (index - extra) // size
