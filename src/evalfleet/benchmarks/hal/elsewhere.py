"""HAL's grader on a fresh machine of a place, for graders that execute what agents have written.

A call of the grader is a run of its own, of one task, in the same home: its machine is made, paid, watched
and deleted as those of any run. It is started by the command line, as a person would.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from evalfleet.channels import children
from evalfleet.errors import RequestError

from .checkout import IN_HAL, HalAnswer, last_line, read_answer
from .settings import HERE, HalSettings

THERE = Path(__file__).parent / "host" / "grade_there.py"
TASK = "grading"
GRADING = ".grading"
"""The folder of a run in which its answers are graded."""
_NOT_SENT = (".git", ".venv", "venv", "results", ".env", "__pycache__", ".gitignore", "node_modules")


def check_place(settings: HalSettings, base: Path) -> None:
    """Raises RequestError if `grade_on` names no place, or one that is not set up: later it is too late."""
    if settings.grade_on in ("", HERE):
        return
    with tempfile.TemporaryDirectory(prefix="evalfleet-hal-") as scratch:
        file = Path(scratch) / "grading.toml"
        file.write_text('name = "hal-grading"\ncommand = ["true"]\n[[tasks]]\nid = "grading"\n', "utf-8")
        told = subprocess.run(
            _words("run", str(file), "--on", settings.grade_on, "--dry-run"),
            cwd=base,
            capture_output=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    if told.returncode != 0:
        why = last_line(told.stderr.decode("utf-8", "replace")).removeprefix("evalfleet: ")
        raise RequestError(f"grade_on={settings.grade_on}: {why}")


async def grade_elsewhere(
    settings: HalSettings, base: Path, order: Mapping[str, Any], folder: Path, secrets: Mapping[str, str]
) -> HalAnswer:
    """Grade on machines, as `ask_in_background` does here. `folder` is below the run's own, in its home."""
    run_folder = next(above for above in folder.parents if above.name == GRADING).parent
    folder.mkdir(parents=True, exist_ok=True)
    await asyncio.to_thread(_write_benchmark, settings, order, folder)
    digest = hashlib.sha256(msgspec.json.encode(order)).hexdigest()[:8]
    call = _GradingRun(settings, base, run_folder.parent, f"{run_folder.name[:44]}-grading-{digest}", secrets)
    said = await call.run(folder / "grading.toml")
    answer = call.answer_folder / "answer.json"
    if not answer.is_file():
        return HalAnswer(stage="machine", problem=f"run {call.name} gave no grades: {said}")
    shutil.copyfile(answer, folder / "answer.json")  # the tree for HAL's tools is made of this
    told = read_answer(folder, said)
    return msgspec.structs.replace(told, stage=told.stage or "grading")


def _write_benchmark(settings: HalSettings, order: Mapping[str, Any], folder: Path) -> None:
    shutil.rmtree(folder / "checkout", ignore_errors=True)
    shutil.copytree(
        settings.hal_repo,
        folder / "checkout",
        symlinks=False,
        ignore=shutil.ignore_patterns(*_NOT_SENT),
        copy_function=_link_or_copy,
        ignore_dangling_symlinks=True,
    )
    shutil.copyfile(IN_HAL, folder / "in_hal.py")
    shutil.copyfile(THERE, folder / "grade_there.py")
    (folder / "order.json").write_bytes(msgspec.json.encode(order))
    extra = settings.benchmark.partition("_")[0]
    prepare = ["python3", "grade_there.py", "prepare", extra]
    keys = {
        "name": f"hal-grading-{settings.benchmark}",
        "command": ["python3", "grade_there.py"],
        "files": ["checkout/", "in_hal.py", "grade_there.py", "order.json"],
        "setup": [] if settings.grade_python else [prepare],
        "secrets": settings.grader_secrets,
        "timeout_s": settings.grade_timeout_s,
        "on_timeout": "broken",
    }
    lines = [f"{key} = {msgspec.json.encode(value).decode()}" for key, value in keys.items()]
    if settings.grade_python:
        lines.append(f"env = {{HAL_PYTHON = {msgspec.json.encode(settings.grade_python).decode()}}}")
    lines.append(f'[[tasks]]\nid = "{TASK}"\n')
    (folder / "grading.toml").write_text("\n".join(lines), "utf-8")


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def _words(*words: str) -> list[str]:
    return [sys.executable, "-m", "evalfleet", *words]


class _GradingRun:
    """A run that grades. One that an earlier controller has left is gone on with."""

    def __init__(
        self, settings: HalSettings, base: Path, home: Path, name: str, secrets: Mapping[str, str]
    ) -> None:
        self._settings = settings
        self._base = base
        self._home = home
        self._environ = {**os.environ, **secrets, "EVALFLEET_HOME": str(home)}
        taken = 1
        self.name = name
        while (ended := self._has_ended()) is True:  # it was asked before, and now once more
            taken += 1
            self.name = f"{name}-{taken}"
        self._is_left = ended is False

    @property
    def answer_folder(self) -> Path:
        attempts = sorted((self._home / self.name / TASK).glob(f"{TASK}.*"))
        return attempts[-1] if attempts else self._home / self.name

    def _has_ended(self) -> bool | None:
        """None if there is no such run."""
        try:
            told = msgspec.json.decode((self._home / self.name / "results.json").read_bytes())
        except OSError:
            return False if (self._home / self.name).is_dir() else None
        except msgspec.MsgspecError:
            return False
        return bool(told.get("ended_at"))

    async def run(self, file: Path) -> str:
        """What it said last. If whoever asked goes, the run is cancelled."""
        budget = self._settings.grade_budget_usd
        limits = ("--budget", f"{budget}") if budget else ()
        try:
            if not self._is_left:
                words = ("run", str(file), "--name", self.name, "--on", self._settings.grade_on, *limits)
                return await self._said(*words, "--workers", "1", "--attempts", "2", "--yes", "--quiet")
            await self._said("watch", self.name)  # its controller may still be at work
            return await self._said("resume", self.name, "--quiet") if not self._has_ended() else ""
        except asyncio.CancelledError:
            await asyncio.shield(self._said("cancel", self.name))
            raise

    async def _said(self, *words: str) -> str:
        child = await asyncio.create_subprocess_exec(
            *_words(*words),
            cwd=self._base,
            env=self._environ,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            out, _ = await child.communicate()
        except asyncio.CancelledError:
            await children.end(child)
            raise
        return last_line(out.decode("utf-8", "replace"))
