"""What result.json says. Written by code under test: any bytes may come, and none of them raise."""

from __future__ import annotations

import math
from pathlib import PurePosixPath
from typing import Any, TypeGuard, cast

import msgspec
from msgspec import Struct, structs

from evalfleet.model import CAUSES, Broken, Cause, Ended, Measured, Outcome, Scored, Task

DECLARABLE = tuple(cause for cause, traits in CAUSES.items() if traits.declarable)
"""What a benchmark itself may call broken, as `{"broken": "model", "error": "..."}`."""

_TEXT_CAP = 2000
_LONGEST_S = 31_536_000.0
_DEAREST_USD = 1e6
"""What an attempt says of itself beyond a year or a million is nonsense, and would spoil every sum."""
_SCREENSHOTS_CAP = 10_000
_METRICS_CAP = 200
_NAME_CAP = 100
_METADATA_CAP = 16_000
"""Bytes of JSON. The journal holds it for every attempt; what is larger belongs into an artefact."""
_MOST_TOKENS = 10**12


class Unusable(Struct, frozen=True):
    """result.json exists and says nothing that counts; `why` ends the sentence 'result.json ...'.

    What the model cost is spent all the same, if it tells that.
    """

    why: str
    cost_usd: float | None = None
    measured: Measured | None = None


def read_result(raw: bytes) -> Scored | Broken | Unusable:
    """A score, or what the benchmark itself calls broken (this wins over a score beside it)."""
    try:
        data = msgspec.json.decode(raw.removeprefix(b"\xef\xbb\xbf"))
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as e:
        what = "is empty" if not raw.strip() else f"is not JSON ({_first_line(str(e))})"
        return Unusable(what + "; write an object with a score from 0 to 1")
    if not isinstance(data, dict):
        return Unusable("is not a JSON object; write an object with a score from 0 to 1")
    fields = cast("dict[str, Any]", data)
    if fields.get("broken") is not None:
        return _declared(fields)
    score = fields.get("score")
    if not _is_number(score):
        wrong = "has no score" if score is None else f"has a score that is no number ({_shown(score)})"
        return Unusable(f"{wrong}; write a number from 0 to 1", _cost_usd(fields), _measured(fields, []))
    if not 0 <= score <= 1:
        wrong = f"has a score of {_shown(score)}"
        return Unusable(f"{wrong}; write a number from 0 to 1", _cost_usd(fields), _measured(fields, []))
    return _scored(float(score) + 0.0, fields)  # + 0.0: no minus zero in reports


def outcome_of(
    task: Task,
    ended: Ended,
    healthy: bool,
    *,
    zero_on_timeout: bool = True,
    exit_code_scores: bool = False,
) -> Outcome:
    """What the end of an attempt means: a valid result wins over everything, then the way it ended.

    `exit_code_scores`: without a result, exit code 0 scores 1 and another one 0, unless the command could
    not be run or was killed.
    """
    result = None if ended.result is None else read_result(ended.result)
    if result is None and ended.unusable:
        result = Unusable(ended.unusable)
    if isinstance(result, Scored | Broken):
        return result
    outcome = _without_result(task, ended, healthy, result, zero_on_timeout, exit_code_scores)
    if result is None or (result.cost_usd is None and result.measured is None):
        return outcome
    return structs.replace(outcome, cost_usd=result.cost_usd, measured=result.measured)


def scored_apart(task: Task, ended: Ended, scorer: Ended, *, exit_code_scores: bool = False) -> Outcome:
    """The score is the score command's, and so are metrics and metadata: of what the attempt says, only its
    steps, its cost and its tokens are taken."""
    result = None if scorer.result is None else read_result(scorer.result)
    if result is None and exit_code_scores and not scorer.unusable:
        result = _by_exit_code(scorer)
    own = None if ended.result is None else read_result(ended.result)
    if isinstance(result, Scored):
        if isinstance(own, Scored):
            result = structs.replace(
                result,
                num_steps=own.num_steps if result.num_steps is None else result.num_steps,
                cost_usd=own.cost_usd if result.cost_usd is None else result.cost_usd,
                measured=_with_tokens(result.measured, own.measured),
            )
        limit_s = task.timeout_s if ended.reason == "timed_out" else None
        return structs.replace(result, limit_s=limit_s, seconds=ended.seconds)
    cost_usd = None if own is None else own.cost_usd
    if isinstance(result, Broken):
        return structs.replace(result, cost_usd=cost_usd if result.cost_usd is None else result.cost_usd)
    if scorer.reason == "timed_out":
        what = "reached its time limit"
    elif scorer.reason == "exited":
        what = _exit_words(scorer.exit_code, result)
    else:
        what = scorer.reason.replace("_", " ")
    return Broken(Cause.RESULT, _with_tail(f"the score command: {what}", scorer.detail), cost_usd)


def _with_tokens(measured: Measured | None, own: Measured | None) -> Measured | None:
    if own is None or not own.tokens or (measured is not None and measured.tokens):
        return measured
    return structs.replace(measured or Measured(), tokens=own.tokens)


def _without_result(
    task: Task,
    ended: Ended,
    healthy: bool,
    result: Unusable | None,
    zero_on_timeout: bool,
    exit_code_scores: bool,
) -> Outcome:
    """What an attempt without a result means, by the way it ended."""
    if ended.reason == "timed_out":
        return _timed_out(task, ended, healthy, zero_on_timeout)
    if ended.reason == "stalled":
        what = f"nothing was written to the log or the artefacts for {task.stall_s:g} s"
        return Broken(Cause.STUCK, _with_tail(what, ended.detail))
    scored = _by_exit_code(ended) if exit_code_scores and result is None else None
    if scored is not None:
        return scored
    if ended.reason == "exited":
        return Broken(Cause.RESULT, _with_tail(_exit_words(ended.exit_code, result), ended.detail))
    cause, what = {
        "lost": (Cause.MACHINE_LOST, "the attempt's processes are gone, or the machine is"),
        "evicted": (Cause.EVICTED, "the machine was taken back by its place"),
        "lease": (Cause.CONNECTION, "no controller was heard from until the attempt's lease lapsed"),
        "stopped": (Cause.CANCELLED, "stopped"),
        "failed_to_start": (Cause.SETUP, "the attempt could not be started"),
    }[ended.reason]
    return Broken(cause, _with_tail(what, ended.detail))


def _by_exit_code(ended: Ended) -> Scored | None:
    """The score that an exit code stands for; None if the command could not be run, or was killed."""
    code = ended.exit_code
    if ended.reason != "exited" or code is None or not 0 <= code < 126:
        return None
    return Scored(float(code == 0), success=code == 0)


def _timed_out(task: Task, ended: Ended, healthy: bool, zero_on_timeout: bool) -> Outcome:
    what = f"time limit of {task.timeout_s:g} s reached"
    if not healthy:
        return Broken(
            Cause.STUCK, _with_tail(f"{what}, and the machine did not answer its probe", ended.detail)
        )
    if not zero_on_timeout:
        return Broken(Cause.TIMEOUT, _with_tail(what, ended.detail))
    return Scored(0.0, success=False, limit_s=task.timeout_s, error=what)


def _exit_words(code: int | None, result: Unusable | None) -> str:
    ending = "ended" if code is None else f"exit code {code}"
    if code == 127:
        ending += " (command not found; install it in setup or list it in files)"
    elif code == 126:
        ending += " (not executable; chmod +x it or name its interpreter)"
    elif code is not None and (code < 0 or code > 128):
        ending += f" (killed by signal {-code if code < 0 else code - 128})"
    return f"{ending}, no result.json" if result is None else f"result.json {result.why} ({ending})"


def _declared(fields: dict[str, Any]) -> Broken | Unusable:
    known = [str(cause) for cause in DECLARABLE]
    if fields["broken"] not in known:
        wrong = f"has broken = {_shown(fields['broken'])}; write one of {', '.join(known)}"
        return Unusable(wrong, _cost_usd(fields), _measured(fields, []))
    error = fields.get("error")
    detail = error[:_TEXT_CAP] if isinstance(error, str) else ""
    return Broken(
        Cause(fields["broken"]),
        detail or "declared by result.json",
        _cost_usd(fields),
        measured=_measured(fields, []),
    )


def _cost_usd(fields: dict[str, Any]) -> float | None:
    cost = fields.get("cost_usd")
    return float(cost) if _is_number(cost) and 0 <= cost <= _DEAREST_USD else None


def _measured(fields: dict[str, Any], ignored: list[str]) -> Measured | None:
    """Metrics, tokens and metadata as far as they are right; None if it tells none. `ignored` gets the names
    of the others."""
    metrics: dict[str, float] = {}
    for name, value in _entries(fields, "metrics", ignored):
        if (_is_number(value) or isinstance(value, bool)) and len(metrics) < _METRICS_CAP:
            metrics[name] = float(value) + 0.0
        else:
            ignored.append(f"metrics.{name}")
    tokens: dict[str, int] = {}
    if type(fields.get("tokens")) is int:
        fields = {**fields, "tokens": {"total": fields["tokens"]}}
    for name, value in _entries(fields, "tokens", ignored):
        if type(value) is int and 0 <= value <= _MOST_TOKENS and len(tokens) < _METRICS_CAP:
            tokens[name] = value
        else:
            ignored.append(f"tokens.{name}")
    metadata = fields.get("metadata")
    if metadata is not None and not _is_metadata(metadata):
        ignored.append("metadata")
        metadata = None
    if not (metrics or tokens or metadata):
        return None
    return Measured(metrics, tokens, cast("dict[str, Any]", metadata) or {})


def _entries(fields: dict[str, Any], key: str, ignored: list[str]) -> list[tuple[str, object]]:
    """The entries of a table of numbers whose names can be shown."""
    table = fields.get(key)
    if not isinstance(table, dict):
        ignored += [key] if table is not None else []
        return []
    entries = cast("dict[str, object]", table).items()
    kept = [(name, value) for name, value in entries if name.isprintable() and 0 < len(name) <= _NAME_CAP]
    ignored += [key] if len(kept) < len(entries) else []
    return kept


def _is_metadata(value: object) -> bool:
    """An object that the journal can hold: not too large, and encoded as it was decoded."""
    if not isinstance(value, dict):
        return False
    try:
        return len(msgspec.json.encode(value)) <= _METADATA_CAP  # pyright: ignore[reportUnknownArgumentType]
    except (msgspec.MsgspecError, UnicodeError, RecursionError, OverflowError):
        return False


def _scored(score: float, fields: dict[str, Any]) -> Scored:
    """Optional fields that are wrong are left out and named in `error`: they never break a score."""
    if len(fields) == 1:  # most results are no more than a score, and large runs have many of them
        return Scored(score, success=score == 1.0)
    ignored: list[str] = []

    def take(key: str, valid: bool) -> bool:
        if not valid and fields.get(key) is not None:
            ignored.append(key)
        return valid

    success, steps, cost = (fields.get(key) for key in ("success", "num_steps", "cost_usd"))
    seconds, limit = fields.get("seconds"), fields.get("limit_s")
    error, shots = fields.get("error"), fields.get("screenshots")
    success_given = take("success", isinstance(success, bool))
    steps_given = take("num_steps", type(steps) is int and 0 <= steps <= 10**9)
    cost_given = take("cost_usd", _is_number(cost) and 0 <= cost <= _DEAREST_USD)
    seconds_given = take("seconds", _is_number(seconds) and 0 <= seconds <= _LONGEST_S)
    limit_given = take("limit_s", _is_number(limit) and 0 <= limit <= _LONGEST_S)
    error_given = take("error", isinstance(error, str))
    shots_given = take("screenshots", _are_screenshots(shots))
    measured = _measured(fields, ignored)
    words = [str(error)[:_TEXT_CAP]] if error_given and error else []
    words += [f"ignored in result.json: {', '.join(ignored)}"[:_TEXT_CAP]] if ignored else []
    return Scored(
        score,
        success=bool(success) if success_given else score == 1.0,
        num_steps=cast("int", steps) if steps_given else None,
        cost_usd=float(cast("float", cost)) if cost_given else None,
        error="; ".join(words) or None,
        screenshots=tuple(cast("list[str]", shots)) if shots_given else (),
        limit_s=float(cast("float", limit)) if limit_given else None,
        seconds=float(cast("float", seconds)) if seconds_given else None,
        measured=measured,
    )


def _is_number(value: object) -> TypeGuard[int | float]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 2**1000 and math.isfinite(value)  # beyond, float() of an int overflows


def _are_screenshots(value: object) -> bool:
    if not isinstance(value, list):
        return False
    names = cast("list[object]", value)
    return len(names) <= _SCREENSHOTS_CAP and all(
        isinstance(name, str) and _stays_inside(name) for name in names
    )


def _stays_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _first_line(text: str) -> str:
    return text.partition("\n")[0][:200]


def _with_tail(what: str, detail: str) -> str:
    tail = detail.strip()[-_TEXT_CAP:]
    return f"{what}: {tail}" if tail else what
