"""A desk with a benchmark of short tasks and one place, whose machines are reached by mailboxes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.desk import Desk

BENCH = """\
name = "b"
tasks = "tasks.jsonl"
command = ["sh", "run.sh"]
files = ["run.sh"]
timeout_s = 60
"""


def mail_desk(
    folder: Path,
    place: str,
    settings: Mapping[str, Any],
    environ: Mapping[str, str],
    count: int,
    *,
    sleeps: float = 0.5,
) -> Desk:
    score = 'echo \'{"score": 1}\' >"$EVALFLEET_OUT/result.json"'
    (folder / "b.toml").write_text(BENCH)
    (folder / "run.sh").write_text(f"sleep {sleeps}\n{score}\n")
    (folder / "tasks.jsonl").write_text("".join(json.dumps({"id": f"t{n}"}) + "\n" for n in range(count)))
    given = {**settings, "poll_s": 0.2, "settle_s": 0.5}
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in given.items())
    (folder / "evalfleet.toml").write_text(f"[places.{place}]\n{text}")
    return Desk(folder, folder / "results", environ)
