"""One attempt at one task: Windows ready, the client under its limit, what it left, what that means."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import signal
import subprocess
import threading
import time
from itertools import takewhile

# there is no evalfleet on a machine
from ..task_folder import TRAJECTORY, Reading, read_task  # noqa: TID252
from ..task_log import read_log  # noqa: TID252
from . import guest
from .config import CONTAINER, V2_MARK
from .container import ensure_clean, mark_clean, mark_dirty
from .results import LiveTrajectory, bring_out
from .shell import Failed, replace_file, say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from .config import HostConfig
    from .docker import Docker

ORDER = "EVALFLEET_WAA_ATTEMPT"
METER = "EVALFLEET_METER"
"""The variable that says where the meter of model calls is, if the machine has one."""
GATEWAY = "EVALFLEET_GATEWAY"
FOLDER = "/tmp/evalfleet"
END_S = 30.0
BUSY_S = 15.0
"""What a guest that was just worked in may take to answer."""
AT_LIMIT = (124, 137)
"""Exit codes of `timeout` when it had to end the client, gently or not."""
KILLED = 137
TAIL = 8000
HINTS = (
    ("huggingface", "the agent fetches its models from there: give the machine a route, or som_origin=a11y"),
    ("Unknown agent name", "check --set agent"),
    ("QMP", "the virtual machine's monitor does not answer"),
)
_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r'^[ \t]*File "(?:/client/)?([^"]+)", line (\d+)', re.M)
_FRAMES = 3
"""So many of a traceback's frames are in the message, the innermost last."""
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Timeout)\b(?::|$)")

LOG_TAIL = 1 << 20
MANY_CALLS = 6
"""Lines in a row, up to the end, that tell of a failure: one call of navi's has up to five of them."""
FAILING = frozenset((400, 401, 403, 404, 408, 409, 422, 429))

_CALL = re.compile(rb'HTTP Request: [A-Z]+ \S+ "HTTP/[0-9.]+ ([0-9]{3})|(Retrying request to )\S+ in ')

# The client leads a group, so that all of it can be ended; ending `docker exec` alone would leave it running.
END = f"""\
for f in {FOLDER}/*/pid; do [ -e "$f" ] && kill -9 -- "-$(cat "$f")"; done 2>/dev/null
"""
V2_WORDS = (
    "the image has the client of WindowsAgentArena-V2, whose flags and results differ: take an image of "
    "microsoft/WindowsAgentArena"
)
# Task and secrets come by standard input: no command line, no environment of an engine has them.
# The results' folder is made here, because it is copied out also after a client that died at its start.
CLIENT = f"""\
{END}rm -rf {FOLDER}
d=$1; limit=$2; shift 2
mkdir -p "$d/results" && cd /client || exit 125
[ ! -e {V2_MARK} ] || {{ echo "{V2_WORDS}"; exit 1; }}
IFS= read -r line && printf '%s\\n' "$line" >"$d/task.json"
while IFS= read -r line && [ -n "$line" ]; do export "$line"; done
if [ -n "${GATEWAY}" ]; then export NO_PROXY="$NO_PROXY,${GATEWAY}" no_proxy="$no_proxy,${GATEWAY}"; fi
echo $$ >"$d/pid"
exec timeout -k 10 "$limit" python run.py "$@" </dev/null
"""


class AttemptOrder:
    """What one attempt is to do."""

    def __init__(self, given: dict[str, object]) -> None:
        self.attempt = str(given["attempt"])
        self.domain = str(given["domain"])
        self.task = str(given["task"])
        self.limit_s = float(str(given["limit_s"]))
        self.lately_s = float(str(given["lately_s"]))
        self.fresh = bool(given["fresh"])
        self.model = str(given["model"])
        self.action_space = str(given["action_space"])
        self.observation_type = str(given["observation_type"])
        self.flags = _list(given["flags"])
        self.is_navi = self.flags[:2] == ["--agent_name", "navi"]
        self.marks_from_tree = bool(given["marks_from_tree"])
        self.secrets = _list(given["secrets"])
        self.environ = _list(given["environ"])
        self.programs: dict[str, int] = dict(given.get("programs") or {})  # type: ignore[call-overload]
        """What must be installed in Windows, and how many tasks need it."""

    @property
    def folder(self) -> str:
        return f"{FOLDER}/{self.attempt}"

    @property
    def inside(self) -> str:
        """Where the client puts the task's files, below its results."""
        parts = (self.action_space, self.observation_type, self.model, self.attempt, self.domain, self.task)
        return "/".join(parts)

    @property
    def results(self) -> str:
        return f"{self.folder}/results"

    def words(self) -> list[str]:
        own = {"result_dir": self.results, "test_all_meta_path": f"{self.folder}/task.json"}
        own.update(trial_id=self.attempt, domain="all", worker_id="0", num_workers="1")
        return [*self.flags, *(word for name, value in own.items() for word in (f"--{name}", value))]

    def stdin(self, metered: dict[str, str]) -> bytes:
        """The task's list, then variables, then an empty line. The last of a name counts."""
        secrets = [f"{name}={os.environ.get(name, '')}" for name in self.secrets]
        if any("\n" in line for line in secrets):
            raise Failed("a secret has more than one line, which the client cannot be given")
        others = [f"{name}={value}" for name, value in metered.items()]
        lines = [json.dumps({self.domain: [self.task]}), *self.environ, *secrets, *others]
        return "".join(f"{line}\n" for line in lines).encode() + b"\n"


def _list(value: Any) -> list[str]:
    return [str(each) for each in value]


class Ending:
    """How the client ended, and what could be seen then."""

    def __init__(self, code: int, seconds: float, limit_s: float) -> None:
        self.code = code
        self.seconds = seconds
        self.at_limit = seconds >= limit_s or (code in AT_LIMIT and seconds > limit_s - 1.0)
        self.at = time.time()  # as the files' times are
        self.guest_answers = True
        self.grew_lately = True
        self.model_trouble = ""
        self.began_task = True
        self.last_words = ""
        """What the client said at its end, without secrets."""


def attempt(config: HostConfig, engine: Docker) -> int:
    """Always ends with a result.json, unless the machine does not let it."""
    order = AttemptOrder(json.loads(os.environ[ORDER]))
    out = os.environ["EVALFLEET_OUT"]
    try:
        ensure_clean(config, engine, deep=order.fresh)
    except Failed as err:
        return _write_result(out, {"broken": "readiness", "error": f"Windows could not be made ready: {err}"})
    missing = guest.missing_programs(list(order.programs))
    if missing:
        told = ", ".join(f"{name} (for {order.programs[name]} of the chosen tasks)" for name in missing)
        remedy = (
            "install it in golden storage, choose other tasks, or try all the same with --set programs=any"
        )
        return _write_result(out, {"broken": "readiness", "error": f"this Windows lacks {told}: {remedy}"})
    try:
        stdin = order.stdin(_meter_variables(engine))
    except Failed as err:
        return _write_result(out, {"broken": "internal", "error": str(err)})
    mark_dirty(config, f"attempt {order.attempt} did not end well")
    with LiveTrajectory(engine, order.folder, f"{order.results}/{order.inside}", out, order.limit_s + END_S):
        ending = _run_client(engine, order, stdin)
    try:
        bring_out(engine, order.results, order.inside, out)
    except Failed as err:
        return _write_result(
            out, {"broken": "readiness", "error": f"the task's files could not be had: {err}"}
        )
    reading = read_task(out, order.marks_from_tree)
    _look_around(order, ending, reading, out)
    result = verdict(reading, ending, order.limit_s)
    if "broken" in result:
        guest.save_evidence(engine)
    if "broken" not in result or died_at_start(reading, ending):
        mark_clean(config)  # what dies before the first task does nothing to Windows
    return _write_result(out, result)


def verdict(reading: Reading, ending: Ending, limit_s: float) -> dict[str, object]:
    """What result.json says. The files decide; where they say nothing, what could be seen does."""
    result: dict[str, object] = {"num_steps": reading.steps, "screenshots": list(reading.screenshots)}
    result["seconds"] = round(ending.seconds, 3)
    if reading.score == 0 and not ending.guest_answers:
        # the agent may have ended it, so that this costs an attempt
        told = "scored 0, and Windows no longer answered /probe: the evaluator may have asked nobody"
        result.update(broken="stuck", error=told)
    elif reading.is_scored:
        result["score"] = reading.score
        result["error"] = reading.error
    elif reading.names_fault:
        result.update(broken=reading.cause, error=reading.error)
    elif ending.at_limit and ending.guest_answers and ending.model_trouble:
        told = f"time limit of {limit_s:g} s reached while the model's API failed: {ending.model_trouble}"
        result.update(broken="model", error=told)
    elif ending.at_limit and ending.guest_answers and ending.grew_lately:
        told = f"time limit of {limit_s:g} s reached"
        result.update(score=0.0, limit_s=limit_s, error=told)
    elif ending.at_limit:
        silent = "took no step for long" if ending.guest_answers else "did not answer /probe"
        who = "the client" if ending.guest_answers else "Windows"
        result.update(broken="stuck", error=f"time limit of {limit_s:g} s reached, and {who} {silent}")
    elif died_at_start(reading, ending):
        told = f"the client died at its start (exit code {ending.code}): {ending.last_words}"
        hint = next((hint for sign, hint in HINTS if sign in ending.last_words), "")
        result.update(broken="internal", error=f"{told}; {hint}" if hint else told)
    else:
        how = "was killed, perhaps for want of memory" if ending.code == KILLED else "ended by itself"
        told = f"the client {how} (exit code {ending.code}): {reading.error}"
        result.update(broken="readiness", error=told)
    return result


def died_at_start(reading: Reading, ending: Ending) -> bool:
    """It ended by an exception of its own before it came to the task."""
    failed = ending.code not in (0, KILLED) and not ending.at_limit
    return failed and not ending.began_task and not reading.is_scored and bool(ending.last_words)


# -- the client ----------------------------------------------------------------------------------


def _meter_variables(engine: Docker) -> dict[str, str]:
    """By which the client finds the meter of model calls, if there is one: at its network's gateway.

    Raises Failed.
    """
    meter = os.environ.get(METER, "")
    if not meter:
        return {}
    done = engine.do("inspect", "-f", "{{json .NetworkSettings.Networks}}", CONTAINER)
    networks = json.loads(done.out)
    gateway = next((found["Gateway"] for found in networks.values() if found.get("Gateway")), "")
    if not gateway:
        raise Failed("its container has no network with a gateway, by which it could reach the meter")
    there = meter.replace("127.0.0.1", gateway)
    found = {name: text.replace(meter, there) for name, text in os.environ.items() if meter in text}
    del found[METER]
    return {**found, GATEWAY: gateway}


def _run_client(engine: Docker, order: AttemptOrder, stdin: bytes) -> Ending:
    """Its output goes to the job's log. `stdin` is what it hears at first."""
    words = ["exec", "-i", CONTAINER, "sh", "-c", CLIENT, "evalfleet", order.folder, f"{order.limit_s:g}"]
    argv = engine.argv(*words, *order.words())
    say(f"{order.domain}/{order.task} as {order.attempt}")
    begun = time.monotonic()
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    tail = bytearray()
    pump = threading.Thread(target=_pass_on, args=(process, tail), daemon=True)
    pump.start()

    def stop(signum: int, _: object) -> None:
        _end_client(engine)
        raise SystemExit(128 + signum)

    signal.signal(signal.SIGTERM, stop)
    try:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(stdin)
        process.wait(timeout=order.limit_s + END_S)
    except subprocess.TimeoutExpired:
        _end_client(engine)
        process.kill()
        process.wait()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ending = Ending(process.returncode, time.monotonic() - begun, order.limit_s)
    pump.join(END_S)
    ending.last_words = last_words(bytes(tail), [os.environ.get(name, "") for name in order.secrets])
    return ending


def _pass_on(process: subprocess.Popen[bytes], tail: bytearray) -> None:
    """Copy the client's output to the job's log, keeping the end."""
    assert process.stdout is not None
    with process.stdout as said:
        while block := os.read(said.fileno(), 1 << 16):
            os.write(1, block)
            tail += block
            del tail[:-TAIL]


def last_words(said: bytes, secrets: Sequence[str]) -> str:
    """Return the line that names the exception, with where it was raised, or the last line.

    The values of secrets are taken out.
    """
    text = said.decode("utf-8", "replace")
    for value in filter(None, secrets):
        text = text.replace(value, "***")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if _EXCEPTION.match(line)]
    words = (named or lines or [""])[-1][:500]
    frames = _FRAME.findall(text.rpartition(_TRACEBACK)[2]) if named else []
    where = " > ".join(f"{path}:{line}" for path, line in frames[-_FRAMES:])
    return f"{words} ({where})" if where else words


def _end_client(engine: Docker) -> None:
    """End the client of whatever attempt."""
    engine.try_("exec", CONTAINER, "sh", "-c", END, timeout_s=END_S)


# -- what it left --------------------------------------------------------------------------------


def _look_around(order: AttemptOrder, ending: Ending, reading: Reading, out: str) -> None:
    ending.began_task = os.path.isdir(os.path.join(out, "logs"))
    if reading.score == 0:
        ending.guest_answers = guest.await_answer(time.monotonic() + BUSY_S, lambda: False)
    if not ending.at_limit:
        return
    ending.guest_answers = guest.answers()
    try:
        written = os.stat(os.path.join(out, TRAJECTORY)).st_mtime
    except OSError:
        written = 0.0
    ending.grew_lately = ending.at - written < order.lately_s
    ending.model_trouble = model_trouble(out, order.is_navi)


def _write_result(out: str, result: dict[str, object]) -> int:
    told = {key: value for key, value in result.items() if value not in (None, "")}
    replace_file(os.path.join(out, "result.json"), json.dumps(told))
    say(f"result: {json.dumps(result)[:500]}")
    return 0


# -- the model's API ---------------------------------------------------------------------------------


def model_trouble(out: str, is_navi: bool = False) -> str:
    """What an attempt's last calls came to, if they failed; empty if all was well, or unknown.

    A few failures may pass, but not if no call was ever answered. Of navi we know that it logs every answer,
    and that it asks before its first action.

    The client's log has what httpx and the SDK wrote. navi asks again 30 times, which takes longer than a
    task may: no Error line comes of it, and what looks like an agent that took its time was one that was
    not answered.
    """
    calls = [int(status) if status else 0 for status, _ in _CALL.findall(_newest_tail(out))]
    failed = list(takewhile(_is_failure, reversed(calls)))
    if not calls:
        log = read_log(out)
        return "it answered no call" if is_navi and log.acted and not log.stepped else ""
    if len(failed) < min(MANY_CALLS, len(calls)):
        return ""
    answers = [status for status in failed[:MANY_CALLS] if status]
    return f"its last answer was {answers[0]}" if answers else "it does not answer"


def _newest_tail(out: str) -> bytes:
    logs = glob.glob(os.path.join(glob.escape(out), "client_logs", "normal-*.log"))
    try:
        with open(max(logs, key=os.path.getmtime, default=""), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_TAIL))
            return file.read(LOG_TAIL)
    except OSError:
        return b""


def _is_failure(status: int) -> bool:
    """0: no answer came, and the call is repeated."""
    return status == 0 or status >= 500 or status in FAILING
