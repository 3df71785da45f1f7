"""evalfleet.toml, .env files and the home: found, read and checked. Knows files, not what they are for."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta, Struct, field
from msgspec.structs import replace

from evalfleet import alert_rules
from evalfleet.errors import RequestError
from evalfleet.model import NOBODY, Alerting, AlertRule, Notify
from evalfleet.names import hint
from evalfleet.toml_tables import check_keys, convert, expand, read_text, read_toml

from .flags import file_keys, variables
from .models import ModelTable, read_model_table

FILE_NAME = "evalfleet.toml"
HOME_NAME = "benchmark_results"
SECTIONS = frozenset(
    {"defaults", "places", "benchmarks", "profiles", "notify", "model", "alerts", "cost", "tiers"}
)
REMOVED = {"owners": "give each run a --budget, or set a budget in the cloud's own billing"}
"""Sections that no longer exist, with the replacement of each."""

_NOT_FLAGS = (
    "HOME",
    "CONFIG",
    "PROFILE",
    "ENV_FILE",
    "NOTIFY_COMMAND",
    "NOTIFY_WEBHOOK",
    "NOTIFY_APPRISE",
)
_TASKS_OWN = ("TASK_ID", "ATTEMPT", "PARAMS", "OUT", "AGENT", "SETTINGS", "REPEAT")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,59}")
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "$": "$"}

Table = Mapping[str, Any]


class CostSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """How bills differ from list prices: `[cost]` of evalfleet.toml."""

    discount: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """What a contract takes off the list prices of machines, as a share."""
    rates: Mapping[str, Annotated[float, Meta(gt=0)]] = field(default_factory=dict[str, float])
    """Currency, such as EUR -> how many dollars one is."""
    reserved: tuple[str, ...] = ()
    """Sizes whose regular machines a reservation or commitment has paid: only their disks and addresses are
    billed."""


class Config(Struct, frozen=True):
    """The checked contents of an evalfleet.toml, or of none. `base` is where its relative paths start."""

    base: Path
    path: Path | None = None
    defaults: Table = field(default_factory=dict[str, Any])
    profiles: Mapping[str, Table] = field(default_factory=dict[str, Table])
    places: Mapping[str, Table] = field(default_factory=dict[str, Table])
    benchmarks: Mapping[str, Table] = field(default_factory=dict[str, Table])
    notify: Notify = NOBODY
    model: ModelTable | None = None
    cost: CostSettings = CostSettings()
    tiers: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Lists of places, in the order in which they are tried, by a name that `--on` takes."""


def _tiers(table: Table, places: Table, where: str) -> dict[str, tuple[str, ...]]:
    tiers: dict[str, tuple[str, ...]] = {}
    for name, value in table.items():
        _check_name(name, f"{where}: {name}")
        listed = cast("list[object]", value) if isinstance(value, list) else []
        names = [each for each in listed if isinstance(each, str)]
        if not names or len(names) != len(listed):
            raise RequestError(f'{where}: {name!r} is {value!r}; write places, such as ["mine", "cloud"]')
        if name in places:
            raise RequestError(f"{where}: {name!r} is a place, too; give one of them another name")
        if lists := [each for each in names if each in table]:
            raise RequestError(f"{where}: {name!r} names the list {lists[0]!r}; write the places themselves")
        tiers[name] = tuple(names)
    return tiers


def find_config(cwd: Path, environ: Mapping[str, str] | None = None) -> Path | None:
    """What $EVALFLEET_CONFIG names, else the nearest evalfleet.toml, in this folder or one above."""
    if given := (environ or {}).get("EVALFLEET_CONFIG"):
        return cwd / expand(given)
    candidates = (folder / FILE_NAME for folder in (cwd, *cwd.parents))
    return next((path for path in candidates if path.is_file()), None)


def load_config(path: Path | None, cwd: Path) -> Config:
    """RequestError names the file, the key and the nearest known one."""
    if path is None:
        return Config(base=cwd)
    data = read_toml(path)
    for name in REMOVED.keys() & data.keys():
        raise RequestError(f"{path}: [{name}] was removed; {REMOVED[name]}")
    check_keys(data, SECTIONS, str(path))
    sections = {name: _table(data.get(name, {}), f"{path}: [{name}]") for name in SECTIONS}
    for name in ("places", "benchmarks", "profiles"):
        for key, value in sections[name].items():
            _table(value, f"{path}: [{name}.{key}]")
            _check_name(key, f"{path}: [{name}.{key}]")
    return Config(
        base=path.parent,
        path=path,
        defaults=_flags(sections["defaults"], f"{path}: [defaults]"),
        profiles={
            name: _flags(table, f"{path}: [profiles.{name}]") for name, table in sections["profiles"].items()
        },
        places=sections["places"],
        benchmarks=sections["benchmarks"],
        notify=replace(
            _notify(sections["notify"], f"{path}: [notify]"),
            alerting=_alerting(sections["alerts"], f"{path}: [alerts]") if "alerts" in data else None,
        ),
        model=read_model_table(sections["model"], f"{path}: [model]") if "model" in data else None,
        cost=convert(sections["cost"], CostSettings, f"{path}: [cost]"),
        tiers=_tiers(sections["tiers"], sections["places"], f"{path}: [tiers]"),
    )


def notify_of(config: Config, environ: Mapping[str, str]) -> Notify:
    """The environment goes before the file, where an address that is a secret need not stand."""
    names = ("COMMAND", "WEBHOOK", "APPRISE")
    command, webhook, apprise = (environ.get(f"EVALFLEET_NOTIFY_{name}") for name in names)
    try:
        argv = None if command is None else shlex.split(command)
    except ValueError:
        raise RequestError("EVALFLEET_NOTIFY_COMMAND has a quote that is not closed") from None
    given = {"command": argv, "webhook": webhook}
    nearer = _notify({key: value for key, value in given.items() if value is not None}, "EVALFLEET_NOTIFY_*")
    return Notify(
        config.notify.command if argv is None else nearer.command,
        config.notify.webhook if webhook is None else nearer.webhook,
        config.notify.apprise if apprise is None else tuple(apprise.split()),
        config.notify.alerting,
    )


def _notify(table: Table, where: str) -> Notify:
    """Errors do not show the address."""
    check_keys(dict(table), frozenset({"command", "webhook", "apprise"}), where)
    apprise = table.get("apprise", [])
    urls = cast("list[object]", apprise) if isinstance(apprise, list) else [None]
    if not all(isinstance(url, str) and "://" in url for url in urls):
        raise RequestError(
            f"{where}: 'apprise' must be a list of Apprise's addresses, such as [\"slack://...\"]"
        )
    command, webhook = table.get("command", []), table.get("webhook", "")
    words = cast("list[object]", command) if isinstance(command, list) else [None]
    if not all(isinstance(word, str) for word in words):
        raise RequestError(f'{where}: \'command\' must be a list of words, such as ["notify-send", "evals"]')
    if not isinstance(webhook, str) or (webhook and not webhook.startswith(("https://", "http://"))):
        raise RequestError(f"{where}: 'webhook' must be an address that begins with https://")
    return Notify(tuple(str(word) for word in words), webhook, tuple(str(url) for url in urls))


def _alerting(table: Table, where: str) -> Alerting:
    """The rules as the file changes them. RequestError names a rule that is unknown, and the nearest."""
    cool_down_s = table.get("cool_down_s", Alerting().cool_down_s)
    if isinstance(cool_down_s, bool) or not isinstance(cool_down_s, int | float) or cool_down_s < 0:
        raise RequestError(f"{where}: 'cool_down_s' is {str(cool_down_s)[:80]!r}; write seconds such as 1800")
    dashboard = table.get("dashboard", "")
    if not isinstance(dashboard, str) or (dashboard and not dashboard.startswith(("https://", "http://"))):
        raise RequestError(f"{where}: 'dashboard' must be an address that begins with https://")
    rules: dict[str, AlertRule] = {}
    for name, changes in table.items():
        if name in ("cool_down_s", "dashboard"):
            continue
        if name in alert_rules.REMOVED:
            raise RequestError(f"{where}: the alert {name!r} was removed; {alert_rules.REMOVED[name]}")
        if name not in alert_rules.DEFAULTS:
            raise RequestError(f"{where}: there is no alert {name!r}; {hint(name, alert_rules.DEFAULTS)}")
        usual: dict[str, Any] = msgspec.to_builtins(alert_rules.DEFAULTS[name])
        given = _table(changes, f"{where[:-1]}.{name}]")
        rule = rules[name] = convert({**usual, **given}, AlertRule, f"{where[:-1]}.{name}]")
        machines = dict.fromkeys(("drain", "replace"), alert_rules.ABOUT_A_MACHINE)
        about = {"end": alert_rules.ABOUT_AN_ATTEMPT, "auto": alert_rules.AUTOMATIC, **machines}
        if rule.act in about and name not in about[rule.act]:
            can = ", ".join(sorted(about[rule.act]))
            raise RequestError(f"{where[:-1]}.{name}]: act = {rule.act!r} is only for {can}")
    return Alerting(float(cool_down_s), rules, dashboard.rstrip("/"))


def home_of(environ: Mapping[str, str], cwd: Path) -> Path:
    """Where runs are kept: EVALFLEET_HOME, else benchmark_results/ beside evalfleet.toml, else the nearest.

    Where there is no evalfleet.toml, the nearest is a home of ours in this folder or one above, else here.
    Depends on nothing that only `run` is told, so that `ls` and `show` look in the same place.
    """
    if given := environ.get("EVALFLEET_HOME"):
        return cwd / expand(given)
    config = find_config(cwd)
    if config is None:
        homes = (folder / HOME_NAME for folder in (cwd, *cwd.parents))
        return next((home for home in homes if _is_our_home(home)), cwd / HOME_NAME)
    given = read_dotenv(config.parent).get("EVALFLEET_HOME")
    return config.parent / (expand(given) if given else HOME_NAME)


def _is_our_home(folder: Path) -> bool:
    """Were runs kept there, by us? A folder that others can write to must not lead us into their home."""
    from evalfleet.journal.database import FILE

    try:
        return (folder / FILE).stat().st_uid == os.geteuid()
    except OSError:
        return False


def read_dotenv(folder: Path) -> dict[str, str]:
    """The `.env` in this folder; nothing if there is none."""
    path = folder / ".env"
    return read_env_file(path) if path.is_file() else {}


def read_env_file(path: Path) -> dict[str, str]:
    """KEY=VALUE lines. Errors name the file and the line and never show what stands there."""
    values: dict[str, str] = {}
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        text = line.strip().removeprefix("export ").lstrip()
        if not text or text.startswith("#"):
            continue
        key, equals, value = text.partition("=")
        if not equals or not _KEY.fullmatch(key.strip()):
            raise RequestError(f"{path}:{number}: not KEY=VALUE; write a name, '=' and its value on one line")
        values[key.strip()] = _env_value(value.strip(), f"{path}:{number}")
    return values


def env_file_of(given: str | Path | None, environ: Mapping[str, str], cwd: Path) -> Path | None:
    """The file that `--env-file` or $EVALFLEET_ENV_FILE names."""
    chosen = given or environ.get("EVALFLEET_ENV_FILE")
    return cwd / expand(chosen) if chosen else None


def environment(
    environ: Mapping[str, str], cwd: Path, config: Config, env_file: str | Path | None = None
) -> dict[str, str]:
    """The environment with more: `--env-file` goes before it, a `.env` beside evalfleet.toml after it."""
    beside = read_dotenv(config.path.parent) if config.path else {}
    path = env_file_of(env_file, environ, cwd)
    return {**beside, **environ, **(read_env_file(path) if path else {})}


def readable_by_others(names: Iterable[str], config: Config, env_file: Path | None) -> list[str]:
    """Of the files that hold one of these: those that not only their owner can read, and what to do."""
    beside = [config.path.parent / ".env"] if config.path else []
    return [
        f"{path} holds secrets and others can read it: chmod 600 {shlex.quote(str(path))}"
        for path in (*beside, *([env_file] if env_file else []))
        if path.is_file() and path.stat().st_mode & 0o044 and set(names) & read_env_file(path).keys()
    ]


def environment_warnings(environ: Mapping[str, str]) -> list[str]:
    """EVALFLEET_* variables that look like a misspelt flag: silently ignored, they would cost money."""
    known = variables()
    others = {f"EVALFLEET_{name}" for name in (*_NOT_FLAGS, *_TASKS_OWN)}
    suspects = sorted(
        key for key in environ if key.startswith("EVALFLEET_") and key not in known.keys() | others
    )
    hints = ((key, hint(key.removeprefix("EVALFLEET_").lower(), known.values())) for key in suspects)
    return [f"variable {key} is ignored; {text}" for key, text in hints if text.startswith("did you mean")]


def _env_value(text: str, where: str) -> str:
    if "\0" in text:
        raise RequestError(f"{where}: has a NUL character; take it out")
    if text[:1] not in ("'", '"'):
        return re.split(r"(?:^|\s)#", text, maxsplit=1)[0].rstrip()
    pattern = r"'([^']*)'" if text[0] == "'" else r'"((?:[^"\\]|\\.)*)"'
    match = re.fullmatch(pattern + r"\s*(?:#.*)?", text)
    if not match:
        raise RequestError(f"{where}: quotes not closed, or text after them; close them on this line")
    if text[0] == "'":
        return match[1]
    return re.sub(r"\\(.)", lambda found: _ESCAPES.get(found[1], found[0]), match[1])


def _flags(table: Table, where: str) -> dict[str, Any]:
    """Keys may be spelt as the flags are (`max-duration`)."""
    flags = {key.replace("-", "_"): value for key, value in table.items()}
    check_keys(flags, file_keys(), where)
    return flags


def _table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"{where} must be a table; write its keys under a line {where.partition(': ')[2]}")
    return value  # pyright: ignore[reportUnknownVariableType]


def _check_name(name: str, where: str) -> None:
    if not _NAME.fullmatch(name):
        raise RequestError(
            f"{where}: the name {name[:80]!r} cannot be used; write letters, digits, '.', '_' or '-', "
            "the first a letter or digit"
        )


def config_of(given: str | Path | None, environ: Mapping[str, str], cwd: Path) -> Config:
    """The file that was named, else the one that is found."""
    return load_config(cwd / expand(given) if given else find_config(cwd, environ), cwd)
