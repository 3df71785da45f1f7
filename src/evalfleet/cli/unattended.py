"""evalfleet without anybody looking: `reap` every hour from the user's crontab, and workflows for GitHub."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from evalfleet.errors import RequestError
from evalfleet.model import Plan
from evalfleet.planning.config import find_config, read_dotenv
from evalfleet.planning.plan_parts import secret_names, specs_of
from evalfleet.planning.plugins import PlaceKind, known, place_kind
from evalfleet.planning.workspace import Workspace
from evalfleet.version import requirement

CRONTAB_S = 30.0


def install(more: tuple[str, ...] = ()) -> str:
    """Add the line, or put the new one in the place of ours; what was done. Raises RequestError."""
    folder = _folder()
    home = Workspace.here().home.absolute()
    line = line_of(folder, home, sys.executable, os.environ.get("PATH", os.defpath), more)
    before = _read()
    after = with_line(before, folder, line)
    if after != before:
        _write(after)
    return f"`evalfleet reap` runs every hour in {folder}; {home}/reap.log has what it said last"


def uninstall() -> str:
    """Take our line out, and leave the others. Raises RequestError."""
    folder = _folder()
    before = _read()
    after = with_line(before, folder, None)
    if after == before:
        return f"there is no job for {folder}"
    _write(after)
    return f"the job for {folder} is gone"


def unseen() -> list[str]:
    """What logs us in here, but is not where a job would find it."""
    lying = read_dotenv(_folder())
    return [name for name in _login_variables(_kinds()) if os.environ.get(name) and name not in lying]


def _folder() -> Path:
    found = find_config(Path.cwd())
    if found is None:
        raise RequestError(
            "there is no evalfleet.toml here, whose places `reap` looks after; go to its folder"
        )
    return found.parent.absolute()


# -- the table: pure -----------------------------------------------------------------------------


def line_of(folder: Path, home: Path, python: str, path: str, more: tuple[str, ...] = ()) -> str:
    """With absolute paths, since cron knows next to nothing; no secret, since anybody may read it."""
    words = [python, "-m", "evalfleet", "reap", *more]
    command = (
        f"cd {shlex.quote(str(folder))} && mkdir -p {shlex.quote(str(home))} && "
        f"PATH={shlex.quote(path)} EVALFLEET_HOME={shlex.quote(str(home))} {shlex.join(words)} "
        f">{shlex.quote(f'{home}/reap.log')} 2>&1 </dev/null {_mark(folder)}"
    )
    if "\n" in command:
        raise RequestError("a crontab cannot name a folder with a line break in it")
    minute = int(hashlib.sha256(str(folder).encode()).hexdigest(), 16) % 60  # not all at once
    return f"{minute} * * * * " + command.replace("%", r"\%")


def _mark(folder: Path) -> str:
    return f"# evalfleet reap in {folder}"


def with_line(table: str, folder: Path, line: str | None) -> str:
    """The table with the line for this folder, or without one. Others' lines stay as they are."""
    mark = _mark(folder).replace("%", r"\%")
    kept = [each for each in table.splitlines() if not each.endswith(mark)]
    return "".join(f"{each}\n" for each in [*kept, *([line] if line else [])])


# -- the program ---------------------------------------------------------------------------------


def _read() -> str:
    done = _crontab("-l")
    return done.stdout if done.returncode == 0 else ""  # so it answers who has none


def _write(table: str) -> None:
    done = _crontab("-", given=table)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise RequestError(f"crontab refuses the job: {said[0]}; run `evalfleet reap` by other means")


def _crontab(word: str, given: str = "") -> subprocess.CompletedProcess[str]:
    program = shutil.which("crontab")
    if program is None:
        hint = "`evalfleet reap --install=github` prints a workflow, or run `evalfleet reap` by other means"
        raise RequestError(f"there is no crontab on this computer; {hint}")
    return subprocess.run(
        [program, word], input=given, capture_output=True, text=True, timeout=CRONTAB_S, check=False
    )


# -- elsewhere -----------------------------------------------------------------------------------

REAP_WORKFLOW = """\
# .github/workflows/reap.yml: delete what evalfleet has left and has expired, every hour.
# evalfleet.toml must be in the repository, with `owner = "..."` in its places: what is that owner's goes.
# The secrets are what logs in to its places: Settings, Secrets and variables, Actions.
name: reap
on:
  schedule:
    - cron: "17 * * * *"
  workflow_dispatch:
jobs:
  reap:
    runs-on: ubuntu-latest
    timeout-minutes: 30
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "3.12"
      # A path in this repository, or a pinned commit: `evalfleet` in a package index is not ours.
      - run: pip install {package}
      - run: evalfleet reap
"""


RUN_WORKFLOW = """\
# .github/workflows/{benchmark}.yml: run the benchmark, keep what came of it, and leave no machine behind,
# whatever happens: a task that fails, a job that is cancelled or takes too long. Should GitHub lose the
# computer that this runs on, the machines end by themselves at their expiry, and the workflow that
# `evalfleet reap --install=github` prints deletes what is left of them.
# Secrets: Settings, Secrets and variables, Actions.
name: {benchmark}
on:
  workflow_dispatch:
permissions:
  contents: read
jobs:
  run:
    runs-on: ubuntu-latest
    timeout-minutes: 355
    env:
      RUN: ci-${{{{ github.run_id }}}}-${{{{ github.run_attempt }}}}
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "3.12"
      # A path in this repository, or a pinned commit: `evalfleet` in a package index is not ours.
      - run: pip install {package}
      - id: run
        timeout-minutes: 330
        run: |
          {command} --name "$RUN" --yes
{secrets}\
      - name: end it, if it goes on
        if: always() && steps.run.outcome != 'skipped'
        run: evalfleet cancel "$RUN"
{secrets}\
      - name: report
        if: always() && steps.run.outcome != 'skipped'
        run: |
          evalfleet report "$RUN" --format github
          evalfleet report "$RUN" --format junit -o junit.xml
          evalfleet export "$RUN" -o "$RUN.evalfleet.tar.gz"
      - uses: actions/upload-artifact@v4
        if: always() && steps.run.outcome != 'skipped'
        with:
          name: ${{{{ env.RUN }}}}
          path: |
            junit.xml
            *.evalfleet.tar.gz
      - name: delete what is left
        if: always() && steps.run.outcome != 'skipped'
        run: evalfleet reap
{secrets}\
"""
LONGEST = ("--max-duration", "5h")
"""Of a run in a workflow that says nothing else: it then ends by itself before it is ended."""


def run_workflow(plan: Plan, words: Sequence[str]) -> str:
    """A workflow for GitHub that runs `evalfleet run WORDS`, whose plan this is."""
    kinds = [place_kind(spec.kind) for spec in specs_of(plan).values()]
    names = list(dict.fromkeys((*secret_names(plan), *_login_variables(kinds))))
    more = () if plan.limits.max_duration_s is not None else LONGEST
    return RUN_WORKFLOW.format(
        benchmark=re.sub(r"[^A-Za-z0-9_-]+", "-", plan.benchmark),
        package=_package(kinds),
        command=shlex.join(["evalfleet", "run", *words, *more]),
        secrets=_environment(names),
    )


def reap_workflow() -> str:
    """A workflow for GitHub that does what the line in a crontab does, with what the places need."""
    kinds = _kinds()
    return REAP_WORKFLOW.format(package=_package(kinds)) + _environment(_login_variables(kinds))


def _environment(names: Sequence[str]) -> str:
    """The environment of one step, so that no action of somebody else's sees a secret."""
    lines = [f"          {name}: ${{{{ secrets.{name} }}}}\n" for name in names]
    return "".join(["        env:\n", *lines]) if lines else ""


def _package(kinds: Sequence[PlaceKind]) -> str:
    extras = sorted({kind.extra for kind in kinds if kind.extra})
    return f"'{requirement(','.join(extras), elsewhere=True)}'"


def _kinds() -> list[PlaceKind]:
    """The kinds of the places in evalfleet.toml; where it has none, all that are installed."""
    places = Workspace.here().config.places
    names = {str(table.get("kind", name)) for name, table in places.items()} or known("place")
    found: list[PlaceKind] = []
    for name in sorted(names):
        with suppress(RequestError):  # a plug-in that cannot be imported logs in nowhere
            found.append(place_kind(name))
    return found


def _login_variables(kinds: Sequence[PlaceKind]) -> list[str]:
    return list(dict.fromkeys(name for kind in kinds for name in kind.login_variables))
