"""The benchmark of the chaos suite: short tasks that leave traces, and wait where they are told to."""

from __future__ import annotations

import json
from pathlib import Path

TASKS = 200
USER = "lab"
HOME = "/home/lab"
STARTS = f"{HOME}/attempts"
HOLD, HELD, LINGER = f"{HOME}/hold", f"{HOME}/held", f"{HOME}/linger"
KILL_SUPERVISOR = ("sh", "-c", f"kill -9 $(cut -d' ' -f1 {HOME}/.evalfleet/*/*/supervisor.pid)")

BENCHMARK = """\
name = "chaos"
tasks = "tasks.jsonl"
command = ["sh", "task.sh", "{params.seconds}", "{params.bytes}", "{params.score}"]
files = ["task.sh"]
timeout_s = 400
"""

# Each attempt writes its name down where it goes home with the artefacts, and where it stays on the host.
# On a host with the file `hold` it waits after that, so that a fault can hit it half way; on one with the
# file `linger` it waits when its result is written.
SCRIPT = """\
echo "$EVALFLEET_JOB" >>"$EVALFLEET_OUT/started" || exit 9
echo "$EVALFLEET_JOB" >>"$HOME/attempts" || exit 9
sleep "$1"
if [ -e "$HOME/hold" ]; then
  echo "$EVALFLEET_JOB" >>"$HOME/held"
  while [ -e "$HOME/hold" ]; do sleep 0.05; done
fi
if [ "$2" -gt 5000 ]; then
  yes "$EVALFLEET_JOB" | head -c "$2" >"$EVALFLEET_OUT/blob" || exit 9
else
  text=
  while [ ${#text} -lt "$2" ]; do text="$text$EVALFLEET_JOB
"; done
  printf "%.$2s" "$text" >"$EVALFLEET_OUT/blob" || exit 9
fi
echo "{\\"score\\": $3}" >"$EVALFLEET_OUT/result.json" || exit 9
while [ -e "$HOME/linger" ]; do sleep 0.05; done
"""

AFTER = """\
name = "after"
tasks = "after.jsonl"
command = ["sleep", "0.1"]
score_from = "exit_code"
"""


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "chaos.toml").write_text(BENCHMARK)
    (folder / "task.sh").write_text(SCRIPT)
    tasks = [
        {"id": task_id(n), "params": {"seconds": seconds(n), "bytes": size(n), "score": score(n)}}
        for n in range(TASKS)
    ]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    (folder / "after.toml").write_text(AFTER)
    (folder / "after.jsonl").write_text("".join(f'{{"id": "after_{n}"}}\n' for n in range(20)))


def task_id(n: int) -> str:
    return f"t_{n}"


def seconds(n: int) -> float:
    return 0.1 + n * 7 % 9 * 0.05


def size(n: int) -> int:
    """Every tenth is too large to travel inside a message."""
    return 300_000 if n % 10 == 3 else 200 + n * 37 % 2000


def is_large(task: str) -> bool:
    return size(int(task.removeprefix("t_"))) > 100_000


def score(n: int) -> float:
    """Each task's own, so that results that are mixed up are seen."""
    return n % 8 / 8


def blob(attempt: str, n: int) -> bytes:
    line = f"{attempt}\n".encode()
    return (line * (size(n) // len(line) + 1))[: size(n)]
