"""BabyAI's scripted agent: one move at a time, from the sentence and the seven by seven cells in view.

Pure but for a seeded generator. It looks for the first thing that the sentence names, walks up to it and acts
on it; what it does not see it looks for by wandering. It has no map and no memory, and keeps to the first
half of a sentence with two.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

LEFT, RIGHT, FORWARD, PICKUP, DROP, TOGGLE = range(6)
KINDS = {"door": 4, "key": 5, "ball": 6, "box": 7}
COLOURS = {"red": 0, "green": 1, "blue": 2, "purple": 3, "yellow": 4, "grey": 5}
EMPTY, FLOOR, DOOR, OPEN = 1, 3, 4, 0
SIDE = 7
ME = (3, 6)  # in what is seen, which looks upwards

Cells = Sequence[Sequence[Sequence[int]]]  # [x][y] -> kind, colour, state


@dataclass(frozen=True)
class Goal:
    """What to do (`go to`, `open`, `pick up`) with the first thing named; no colour or kind means any."""

    verb: str
    colour: int | None
    kind: int | None


def goal_of(mission: str) -> Goal:
    """The first thing that the sentence asks for."""
    found = re.search(r"(go to|open|pick up|put) (?:the|an?) (?:(\w+) )?(door|key|ball|box|object)", mission)
    if not found:
        return Goal("go to", None, None)
    return Goal(found[1], COLOURS.get(found[2] or ""), KINDS.get(found[3]))


def matches(cell: Sequence[int], goal: Goal) -> bool:
    """Whether this cell holds what the goal names."""
    kind, colour, _ = (int(n) for n in cell)
    wanted = kind == goal.kind if goal.kind is not None else kind in KINDS.values()
    return wanted and (goal.colour is None or colour == goal.colour)


def free(cell: Sequence[int]) -> bool:
    """Whether one can step there."""
    return int(cell[0]) in (EMPTY, FLOOR) or (int(cell[0]) == DOOR and int(cell[2]) == OPEN)


def path_to(cells: Cells, goal: Goal) -> list[tuple[int, int]]:
    """The shortest way over free cells in view to the nearest thing that matches, or an empty one."""
    came: dict[tuple[int, int], tuple[int, int]] = {ME: ME}
    queue = deque([ME])
    while queue:
        here = queue.popleft()
        if here != ME and matches(cells[here[0]][here[1]], goal):
            way = [here]
            while came[way[0]] != ME:
                way.insert(0, came[way[0]])
            return way
        if here != ME and not free(cells[here[0]][here[1]]):
            continue
        for dx, dy in ((0, -1), (-1, 0), (1, 0), (0, 1)):
            there = (here[0] + dx, here[1] + dy)
            if 0 <= there[0] < SIDE and 0 <= there[1] < SIDE and there not in came:
                came[there] = here
                queue.append(there)
    return []


def decide(mission: str, cells: Cells, chance: random.Random) -> int:
    """The next move."""
    goal = goal_of(mission)
    front = cells[ME[0]][ME[1] - 1]
    if way := path_to(cells, goal):
        x, y = way[0]
        if x != ME[0] or y > ME[1]:
            return LEFT if x < ME[0] else RIGHT
        if len(way) > 1:
            return FORWARD
        return {"open": TOGGLE, "pick up": PICKUP, "put": PICKUP}.get(goal.verb, FORWARD)
    if int(front[0]) == DOOR and int(front[2]) != OPEN:
        # a closed door is a way on; a locked one stays shut, hence not every time
        return TOGGLE if chance.random() < 0.8 else chance.choice((LEFT, RIGHT))
    if free(front) and chance.random() < 0.8:
        return FORWARD
    return chance.choice((LEFT, RIGHT))
