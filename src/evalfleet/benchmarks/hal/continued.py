"""Going on with a run of HAL that has left a tree: which tasks it still has to run, and both in one tree."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .checkout import HalAnswer, ask_in_background, last_line, listing
from .elsewhere import GRADING, grade_elsewhere
from .settings import HERE, HalSettings
from .tree import RAW, Tree, is_answer, read_tree, write_tree


def tree_in(folder: Path) -> Tree | None:
    """What an earlier run has left there, ours or hal-eval's own."""
    return read_tree(folder) if (folder / f"{folder.name}{RAW}").is_file() else None


def tasks_left(settings: HalSettings, earlier: Tree | None) -> list[str]:
    """The tasks without an answer, in HAL's order, as HAL finds them. Raises RequestError."""
    lines = {} if earlier is None else earlier.lines
    return [task for task in listing(settings).tasks if task not in lines or not is_answer(lines[task][task])]


def continued_tree(earlier: Tree, later: Tree | None) -> Tree:
    """Both in one; of a task that both have, the later answer counts."""
    if later is None:
        return earlier
    return Tree(
        {**earlier.lines, **later.lines},
        {**earlier.times, **later.times},
        {**earlier.costs, **later.costs},
        _added(earlier.run_cost, later.run_cost),
        {**earlier.usage, **later.usage},
    )


def _added(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Money of both runs. What one of them does not know, nobody knows of both."""
    total = dict(later)
    for key in ("machines_usd", "models_usd"):
        known = [usd for usd in (earlier.get(key), later.get(key)) if isinstance(usd, int | float)]
        total[key] = sum(known) if len(known) == 2 else None
    total["per_task_usd"] = None
    return total


def take_task_folders(source: Path, target: Path, tasks: Iterable[str]) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for task in tasks:
        if (source / task).is_dir():
            shutil.rmtree(target / task, ignore_errors=True)
            (target / task).parent.mkdir(parents=True, exist_ok=True)
            shutil.move(source / task, target / task)


async def regrade(
    settings: HalSettings,
    config: Mapping[str, Any],
    tree: Tree,
    folder: Path,
    secrets: Mapping[str, str],
    now_s: float,
    *,
    home: Path,
    base: Path,
) -> str:
    """Let HAL grade all answers of a tree, and write it. What there is to say about it.

    Where `grade_on` says that it happens elsewhere, that is a run in the home, with places as in `base`.
    """
    order = {
        "benchmark": settings.benchmark,
        "agent_dir": settings.agent_dir,
        "args": config["agent_args"],
        "submissions": {task: line[task] for task, line in tree.lines.items()},
        "run_id": folder.name,
        "results_dir": "",
        "wandb": settings.wandb,
    }
    if settings.grade_on not in ("", HERE):
        scratch = home / folder.name / GRADING / "continued"
        told = await grade_elsewhere(settings, base, order, scratch, secrets)
    else:
        with tempfile.TemporaryDirectory(prefix="evalfleet-hal-") as name:
            order["results_dir"] = str(Path(name) / "results")
            told = await ask_in_background(settings, "grade", order, Path(name), secrets)
    graded = None if told.problem else _graded(told, now_s)
    write_tree(folder, tree, graded, config)
    said = f"{len(tree.lines)} submissions in {folder}"
    if graded is None:
        return f"{said}; HAL's grader fails on them: {last_line(told.problem)}"
    return f"{said}; HAL's accuracy: {told.metrics.get('accuracy')}"


def _graded(told: HalAnswer, now_s: float) -> dict[str, Any]:
    return {
        "results": told.results,
        "metrics": told.metrics,
        "prompts": told.prompts,
        "wandb": told.wandb,
        "at": now_s,
    }
