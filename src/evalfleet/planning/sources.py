"""Where a request's benchmark and places come from: a file, evalfleet.toml, or the registry."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin

import msgspec
from msgspec import Struct

from evalfleet.benchmarks.loaded import BenchmarkKind, Loaded
from evalfleet.errors import RequestError
from evalfleet.model import decodable
from evalfleet.names import hint
from evalfleet.toml_tables import check_finite, convert

from .config import Config
from .plugins import MOVED, PlaceKind, benchmark_kind, is_known, known, place_kind, unknown
from .values import as_text

NO_BENCHMARKS = {"evalfleet.toml", "pyproject.toml"}
SPOT = "spot"
"""The setting of places that have machines which may be taken back."""


class BenchmarkSource(Struct, frozen=True):
    """A benchmark found, not yet read. `where` is who named its settings."""

    name: str
    kind_name: str
    kind: BenchmarkKind
    settings: Mapping[str, Any]
    base: Path
    where: str

    def load(self, home: Path) -> Loaded:
        check_finite(self.settings, self.where)
        settings = convert(dict(self.settings), self.kind.Settings, self.where)
        return self.kind.load(self.name, settings, self.base, home)


class PlaceSpec(Struct, frozen=True, omit_defaults=True):
    """An entry of `Plan.place_specs`, from which the place is made again. `base` is where its relative paths
    start."""

    kind: str
    base: str
    settings: Mapping[str, Any]


class PlaceSource(Struct, frozen=True):
    """A place found, its settings checked."""

    name: str
    kind_name: str
    kind: PlaceKind
    settings: Mapping[str, Any]
    base: Path
    where: str

    @property
    def default_canary(self) -> int:
        return self.kind.default_canary

    @property
    def listed(self) -> int:
        """How many machines its settings list; 0 where they list none."""
        if self.kind.machine_list is None:
            return 0
        machines, each = self.kind.machine_list
        return len(self.settings.get(machines, ())) * int(self.settings.get(each, 1))


class SettingsSplit(Struct, frozen=True):
    """Where the settings of `--set` went. `free` are those of the benchmark, as the plan records them."""

    benchmark: BenchmarkSource
    places: tuple[PlaceSource, ...]
    free: Mapping[str, str]


def benchmark_source(name: str, config: Config, cwd: Path) -> BenchmarkSource:
    """A file if it looks like one, then evalfleet.toml's, then an installed one."""
    if name.endswith(".toml") or (name.startswith((".", "/", "~")) and ":" not in name):
        return _installed_benchmark(name, "command", {"path": name}, cwd, name)
    if name in config.benchmarks:
        table = dict(config.benchmarks[name])
        kind = table.pop("kind", "command" if "path" in table else name)
        where = f"{config.path}: [benchmarks.{name}]"
        return _installed_benchmark(name, _kind_name(kind, where), table, config.base, where)
    if ":" not in name and not is_known("benchmark", name):
        if (cwd / f"{name}.toml").is_file():
            raise RequestError(f"benchmark {name!r} is unknown; did you mean the file {name}.toml?")
        folder = Path(name).parent
        files = {str(folder / path.name) for path in (cwd / folder).glob("*.toml")} - NO_BENCHMARKS
        raise RequestError(
            f"benchmark {name!r} is unknown; {hint(name, {*config.benchmarks, *known('benchmark'), *files})}"
        )
    return _installed_benchmark(name, name, {}, cwd, f"benchmark {name!r}")


def place_sources(names: Sequence[str], config: Config) -> tuple[PlaceSource, ...]:
    """The places in the order given, lists of `[tiers]` as the places that they name. Raises RequestError."""
    if not names:
        raise RequestError("--on names no place; write one such as local")
    listed = dict.fromkeys(place for name in names for place in config.tiers.get(name, (name,)))
    return tuple(_place_source(name, config) for name in listed)


def lent_sources(specs: Mapping[str, PlaceSpec]) -> tuple[PlaceSource, ...]:
    """The places of a pool, as its plan has them: a run that borrows its machines changes nothing there."""
    return tuple(
        PlaceSource(name, spec.kind, place_kind(spec.kind), spec.settings, Path(spec.base), f"place {name!r}")
        for name, spec in specs.items()
    )


def place_settings(given: Mapping[str, str], places: Sequence[PlaceSource]) -> tuple[PlaceSource, ...]:
    """Hand each setting to the places that have it, where there is no benchmark. Raises RequestError."""
    by_place = {place.name: dict(place.settings) for place in places}
    for key, text in given.items():
        takers = _takers(key, places)
        if not takers:
            options = {name for place in places for name in _types(place.kind.Settings)}
            raise RequestError(f"--set {key!r} is no setting of the place; {hint(key, options)}")
        for place, name in takers:
            by_place[place.name][name] = _coerced(text, _types(place.kind.Settings)[name], key)
    return tuple(_checked(place, by_place[place.name]) for place in places)


def spot_sources(places: Sequence[PlaceSource], *, strict: bool) -> tuple[PlaceSource, ...]:
    """With spot machines, where there are any. `strict`: RequestError if no place has them."""
    able = [SPOT in _types(place.kind.Settings) for place in places]
    if strict and not any(able):
        names = ", ".join(place.name for place in places)
        raise RequestError(f"--spot: {names} has no spot machines; leave it out, or choose another place")
    return tuple(
        msgspec.structs.replace(place, settings={**place.settings, SPOT: True}) if has_them else place
        for place, has_them in zip(places, able, strict=True)
    )


def give_settings(
    given: Mapping[str, str],
    benchmark: BenchmarkSource,
    places: Sequence[PlaceSource],
    declared: Collection[str] = (),
) -> SettingsSplit:
    """Hand each setting to whom it belongs.

    `PLACE.KEY` is that place's; a KEY of the benchmark's Settings, or one that its file or evalfleet.toml
    declares, is the benchmark's; a KEY of a chosen place's is that of all who have it; any other is an error.
    """
    by_place = {place.name: dict(place.settings) for place in places}
    own = {} if benchmark.kind.declares_settings else _types(benchmark.kind.Settings)
    settings = dict(benchmark.settings)
    free = _defaults(benchmark)
    declared = {*declared, *free}
    for key, text in given.items():
        if key in own:
            settings[key] = _coerced(text, own[key], key)
            free[key] = text
        elif key in declared:
            free[key] = text
        elif takers := _takers(key, places):
            for place, name in takers:
                by_place[place.name][name] = _coerced(text, _types(place.kind.Settings)[name], key)
        else:
            raise _unknown_setting(key, {*own, *declared}, benchmark, places)
    checked = tuple(_checked(place, by_place[place.name]) for place in places)
    return SettingsSplit(msgspec.structs.replace(benchmark, settings=settings), checked, free)


def _unknown_setting(
    key: str, own: Collection[str], benchmark: BenchmarkSource, places: Sequence[PlaceSource]
) -> RequestError:
    head, _, rest = key.rpartition(".")
    for place in places:
        if place.name == head:
            nearest = hint(rest, _types(place.kind.Settings))
            return RequestError(f"--set {key!r}: place {head!r} has no setting {rest!r}; {nearest}")
    options = {*own, *(name for place in places for name in _types(place.kind.Settings))}
    problem = f"--set {key!r} is no setting of benchmark or place; {hint(key, options)}"
    if benchmark.kind.declares_settings:
        problem += (
            f"; one that the command reads is declared in the benchmark's file: settings = {{{key} = ...}}"
        )
    return RequestError(problem)


def _takers(key: str, places: Sequence[PlaceSource]) -> list[tuple[PlaceSource, str]]:
    """The places that a setting is for, each with the setting's name there."""
    head, _, rest = key.rpartition(".")
    named = [(place, rest) for place in places if place.name == head and rest in _types(place.kind.Settings)]
    return named or [(place, key) for place in places if key in _types(place.kind.Settings)]


def _installed_benchmark(
    name: str, kind_name: str, settings: Mapping[str, Any], base: Path, where: str
) -> BenchmarkSource:
    return BenchmarkSource(name, kind_name, benchmark_kind(kind_name), settings, base, where)


def _place_source(name: str, config: Config) -> PlaceSource:
    if name not in config.places:
        if ":" not in name and not is_known("place", name):
            options = {*known("place"), *config.places, *config.tiers}
            raise unknown("place", name, options)
        return PlaceSource(name, name, place_kind(name), {}, config.base, f"place {name!r}")
    table = dict(config.places[name])
    where = f"{config.path}: [places.{name}]"
    if "kind" not in table and name in MOVED:
        raise RequestError(f"{where}: place {name!r} is unknown; {MOVED[name]}")
    if "kind" not in table and not is_known("place", name):
        raise RequestError(
            f"{where}: key 'kind' is missing; write one of {', '.join(sorted(known('place')))}"
        )
    kind_name = _kind_name(table.pop("kind", name), where)
    return PlaceSource(name, kind_name, _place_kind_at(kind_name, where), table, config.base, where)


def _place_kind_at(kind_name: str, where: str) -> PlaceKind:
    try:
        return place_kind(kind_name)
    except RequestError as e:
        raise RequestError(f"{where}: key 'kind': {e}") from e


def _kind_name(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{where}: key 'kind' must be a string")
    return value


def _checked(place: PlaceSource, settings: dict[str, Any]) -> PlaceSource:
    """Required keys may have come by `--set`, so the whole is checked once all are here."""
    check_finite(settings, place.where)
    convert(settings, place.kind.Settings, place.where)
    return msgspec.structs.replace(place, settings=settings)


def _types(settings: type[Struct]) -> dict[str, Any]:
    return {info.encode_name: info.type for info in msgspec.structs.fields(settings)}


def _defaults(benchmark: BenchmarkSource) -> dict[str, str]:
    """What evalfleet.toml gives the command; `load` checks its form."""
    found = benchmark.settings.get("set") if benchmark.kind.declares_settings else None
    table = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    return {key: as_text(value, f"{benchmark.where} key 'set.{key}'") for key, value in table.items()}


def _coerced(text: str, type_: Any, key: str) -> Any:
    """The text as the setting's type: numbers and booleans as they are spelt, lists split at commas."""
    plain = type_.__origin__ if hasattr(type_, "__metadata__") else type_
    origin, lists = get_origin(plain), (list, tuple, set, frozenset)
    listed = text.split(",") if text else []
    value: Any = listed if origin in lists else text
    if origin in (Union, UnionType):  # a word with a meaning, or a list
        words = [option for part in get_args(plain) for option in _options(part)]
        if words and text not in words and any(get_origin(part) in lists for part in get_args(plain)):
            value = listed
    try:
        made = msgspec.to_builtins(msgspec.convert(value, decodable(type_), strict=False))
    except msgspec.ValidationError as e:
        if options := _options(type_):
            raise RequestError(f"--set {key!r} is {text[:80]!r}; write one of {', '.join(options)}") from None
        raise RequestError(f"--set {key!r} is {text[:80]!r}{_wanted(str(e))}") from None
    if isinstance(made, float) and not math.isfinite(made):
        raise RequestError(f"--set {key!r} is {text[:80]!r}; write a finite number")
    return made


def _wanted(complaint: str) -> str:
    """What to write instead, by msgspec's own words."""
    for name, words in (("bool", "true or false"), ("int", "a whole number"), ("float", "a number")):
        if complaint == f"Expected `{name}`, got `str`":
            return f"; write {words}"
    return f": {complaint[:1].lower()}{complaint[1:]}"


def _options(type_: Any) -> list[str]:
    """Those of a Literal."""
    plain = getattr(type_, "__origin__", type_) if hasattr(type_, "__metadata__") else type_
    return [str(option) for option in get_args(plain)] if get_origin(plain) is Literal else []
