"""What a run is asked to be, by flags, environment, profile and defaults, settled into one value a flag."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct, field

from evalfleet.model import ScheduleName, Verdict

from . import values
from .config import ENVIRONMENT, Config

Number = int | float | str
"""As a flag gives it ('2h', '$5', '5%') or as Python does (7200, 5, 0.05)."""


class RunRequest(Struct, frozen=True, kw_only=True):
    """What `evalfleet run` was given; None is 'not given'. Nothing is checked yet."""

    benchmark: str
    on: str | Sequence[str] | None = None
    pool: str | None = None
    workers: int | str | None = None
    tasks: int | str | None = None
    seed: int | str | None = None
    first: int | str | None = None
    task_ids: Sequence[str] | None = None
    domains: Sequence[str] | None = None
    repeat: int | str | None = None
    model: str | None = None
    settings: Mapping[str, Any] | None = None
    agent: Mapping[str, Any] | None = None
    budget: Number | None = None
    max_duration: Number | None = None
    task_timeout: Number | None = None
    attempts: int | str | None = None
    schedule: str | None = None
    canary: int | str | None = None
    spot: bool | None = None
    keep: bool | None = None
    allow_broken: Number | None = None
    fail_under: Number | None = None
    name: str | None = None
    config: str | Path | None = None
    profile: str | None = None
    env_file: str | Path | None = None


class Flags(Struct, frozen=True, kw_only=True):
    """Every flag settled and checked; the defaults here are the built-in ones."""

    on: tuple[str, ...] = ("local",)
    workers: int = 1
    tasks: int | None = None
    seed: int = 0
    first: int | None = None
    task: tuple[str, ...] = ()
    domain: tuple[str, ...] = ()
    repeat: int = 1
    model: str = ""
    set: Mapping[str, str] = field(default_factory=dict[str, str])
    agent: Mapping[str, str] = field(default_factory=dict[str, str])
    budget: float | None = None
    max_duration: float | None = None
    task_timeout: float | None = None
    attempts: int = 3
    schedule: ScheduleName = "dynamic"
    canary: int | None = None
    spot: bool = False
    keep: bool = False
    allow_broken: Verdict = Verdict()
    fail_under: float | None = None


class _Given(NamedTuple):
    """A raw value and who gave it."""

    value: Any
    where: str


_Layer = dict[str, _Given]
_SPELLING = {"task_ids": "task", "domains": "domain", "settings": "set"}
_CHOICE = frozenset({"tasks", "first", "task"})
"""Ways to choose tasks, of which a run has one: a nearer layer's replaces all of a farther one's."""


def _count(low: int, high: int) -> Callable[[Any, str], int]:
    return lambda value, where: values.parse_count(value, where, low, high)


def _strings(value: Any, where: str) -> tuple[str, ...]:
    """A list as it is (ids may hold commas); a single string is a list of one."""
    return values.parse_names([value] if isinstance(value, str) else value, where)


_PARSERS: Mapping[str, Callable[[Any, str], Any]] = {
    "on": values.parse_names,
    "workers": _count(1, 10_000),
    "tasks": _count(1, 10**9),
    "seed": _count(-(10**17), 10**17),
    "first": _count(1, 10**9),
    "task": _strings,
    "domain": _strings,
    "repeat": _count(1, 1000),
    "model": values.parse_line,
    "set": values.parse_table,
    "agent": values.parse_table,
    "budget": values.parse_usd,
    "max_duration": values.parse_duration,
    "task_timeout": values.parse_duration,
    "attempts": _count(1, 100),
    "schedule": values.parse_schedule,
    "canary": _count(0, 1000),
    "spot": values.parse_switch,
    "keep": values.parse_switch,
    "allow_broken": values.parse_allow_broken,
    "fail_under": values.parse_share,
}


def settle(request: RunRequest, environ: Mapping[str, str], config: Config, profile: str) -> Flags:
    """Flags, then EVALFLEET_* variables, then the profile, then [defaults], then built in.

    `set` and `agent` are joined key by key; of everything else the nearest that was given counts.
    """
    layers = [_from_request(request), _from_environ(environ)]
    if profile:
        table = values.choose(profile, config.profiles, str(config.path or "no evalfleet.toml"), "profile")
        layers.append(_from_table(table, f"{config.path}: [profiles.{profile}]"))
    layers.append(_from_table(config.defaults, f"{config.path}: [defaults]"))
    settled: dict[str, Any] = {}
    for layer in layers:
        choice_made = bool(_CHOICE & settled.keys())
        for key, given in layer.items():
            if key in _CHOICE and choice_made:
                continue
            value = _PARSERS[key](given.value, given.where)
            if key in ("set", "agent"):
                settled[key] = {**value, **settled.get(key, {})}
            else:
                settled.setdefault(key, value)
    return Flags(**settled)


def _from_request(request: RunRequest) -> _Layer:
    spelt = {_SPELLING.get(name, name): getattr(request, name) for name in request.__struct_fields__}
    return {
        key: _Given(value, f"--{key.replace('_', '-')}")
        for key, value in spelt.items()
        if value is not None and key in _PARSERS
    }


def _from_environ(environ: Mapping[str, str]) -> _Layer:
    names = ((key, f"EVALFLEET_{key.upper()}") for key in sorted(ENVIRONMENT))
    return {key: _Given(environ[name], name) for key, name in names if environ.get(name)}


def _from_table(table: Mapping[str, Any], where: str) -> _Layer:
    return {key: _Given(value, f"{where} key {key!r}") for key, value in table.items()}
