"""Reads what people wrote in TOML: an error names the file, the line or key, and what to write."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard, TypeVar, get_args

import msgspec

from .errors import RequestError
from .model import decodable
from .names import hint

T = TypeVar("T")

_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
    "null": "nothing",
}
_AT = re.compile(r"(?P<what>.*?)(?: - at `\$?\.?(?P<path>.*)`)?", re.DOTALL)
_EXPECTED = re.compile(r"Expected `(?P<wanted>[^`]*)`, got `(?P<got>[^`]*)`")
_MISSING = re.compile(r"missing required field `(?P<key>[^`]*)`")


def read_text(path: Path) -> str:
    """The text of a file a person wrote."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise RequestError(f"{path}: no such file; check the path") from None
    except IsADirectoryError:
        raise RequestError(f"{path}: is a folder; name a file in it") from None
    except UnicodeDecodeError as e:
        raise RequestError(f"{path}: byte {e.start} is not UTF-8; save the file as UTF-8") from None
    except (OSError, ValueError) as e:
        raise RequestError(f"{path}: cannot be read ({reason(e)}); check its permissions") from None


def expand(path: str | Path) -> Path:
    """The path with a leading `~` or `~user` replaced. Raises RequestError for a user nobody knows."""
    try:
        return Path(path).expanduser()
    except RuntimeError as e:
        raise RequestError(f"{path}: there is no such user here; write the folder out") from e


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as e:
        what = re.sub(r" \(at .*\)$", "", str(e))
        line = re.search(r"at line (\d+)", str(e))
        place = f"{path}:{line[1]}" if line else f"{path}: at its end"
        raise RequestError(f"{place}: not valid TOML: {what[:1].lower()}{what[1:]}") from None
    except RecursionError:
        raise RequestError(f"{path}: not valid TOML: nested too deeply") from None


def reason(error: Exception) -> str:
    """What the operating system says, without the path that the message names already."""
    return (getattr(error, "strerror", None) or str(error)).lower()


def convert(raw: Any, type_: type[T], where: str, *, strict: bool = True) -> T:
    """`raw` as `type_`; RequestError that starts with `where` and names the key.

    Not strict: strings become the numbers and booleans they spell (`--set`, environment).
    """
    _check_keys(raw, type_, where, "")
    try:
        return msgspec.convert(raw, decodable(type_), strict=strict)
    except msgspec.ValidationError as e:
        raise RequestError(f"{where}: {explain(str(e))}") from None


def check_finite(table: Mapping[str, Any], where: str) -> None:
    """RequestError for a number that TOML can write and JSON, which plans are kept as, cannot."""
    for key, value in table.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise RequestError(f"{where}: {_key(key)} is no finite number; write one")


def check_keys(raw: Mapping[str, Any], known: frozenset[str] | set[str], where: str) -> None:
    """RequestError for the first key that is not known."""
    for key in raw:
        if key not in known:
            raise RequestError(f"{where}: key {key!r} is unknown; {hint(key, known)}")


def explain(message: str) -> str:
    """msgspec's account of a wrong value, as a sentence about a key."""
    match = _AT.fullmatch(message)
    what, path = (match["what"], match["path"] or "") if match else (message, "")
    if missing := _MISSING.search(what):
        key = f"{path}.{missing['key']}" if path else missing["key"]
        return f"{_key(key)} is missing; add it"
    if expected := _EXPECTED.search(what):
        return f"{_key(path)} must be {_words(expected['wanted'])}, not {_words(expected['got'])}"
    return f"{_key(path)}: {what[:1].lower()}{what[1:]}"


def _key(path: str) -> str:
    if not path:
        return "the value"
    name, *indices = re.split(r"\[(\d+)\]$", path)
    return f"entry {int(indices[0]) + 1} of key {name!r}" if indices else f"key {path.replace('[...]', '')!r}"


def _words(types: str) -> str:
    return " or ".join(_WORDS.get(part, part) for part in types.split(" | ") if part != "null")


def _check_keys(raw: Any, type_: Any, where: str, prefix: str) -> None:
    if not (is_struct_type(type_) and isinstance(raw, dict)):
        return
    fields = {field.encode_name: field.type for field in msgspec.structs.fields(type_)}
    table: dict[Any, Any] = raw  # pyright: ignore[reportUnknownVariableType]
    for key, value in table.items():
        if key in fields:
            for option in _options(fields[key]):
                _check_keys(value, option, where, f"{prefix}{key}.")
        elif (instead := getattr(type_, "REMOVED", {}).get(key)) is not None:
            raise RequestError(f"{where}: key {f'{prefix}{key}'!r} was removed; {instead}")
        elif type_.__struct_config__.forbid_unknown_fields:
            raise RequestError(f"{where}: key {f'{prefix}{key}'!r} is unknown; {hint(str(key), fields)}")


def _options(type_: Any) -> Iterator[Any]:
    """The type and all that it is made of: `Annotated[A | None, ...]` has A."""
    yield type_
    for part in get_args(type_):
        yield from _options(part)


def is_struct_type(type_: Any) -> TypeGuard[type[msgspec.Struct]]:
    return isinstance(type_, type) and issubclass(type_, msgspec.Struct)
