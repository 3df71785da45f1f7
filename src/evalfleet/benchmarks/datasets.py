"""Datasets that tasks are read from: rows of JSONL, JSON and CSV files, each with where it stands."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from evalfleet.errors import RequestError
from evalfleet.toml_tables import reason

KINDS = (".jsonl", ".json", ".csv", ".tsv")
Row = tuple[str, dict[str, Any]]
"""Where it stands (`data.csv:3`), and its fields."""


def read_rows(path: Path, key: str) -> Iterator[Row]:
    """Every row of a dataset, with where it stands. RequestError says what is wrong with which."""
    kind = kind_of(path, key)
    if kind == ".jsonl":
        for place, line in lines_of(path, key):
            row = read_json(line, place, 'write one object a line, such as {"id": "a_1"}')
            yield place, _object(row, place, "a JSON object, one a line")
    elif kind == ".json":
        yield from _json_rows(path, key)
    else:
        yield from _table_rows(path, key, "\t" if kind == ".tsv" else ",")


def _json_rows(path: Path, key: str) -> Iterator[Row]:
    """A list of objects, alone or as the only list of an object; or an object of objects, by their ids."""
    data = read_json(read_bytes(path, key), str(path), "write a list of objects")
    rows = _rows_in(data)
    if rows is None:
        raise RequestError(f"{path}: must be a list of objects, or an object with one such list")
    for number, row in enumerate(rows, start=1):
        place = f"{path}: task {number}"
        yield place, _object(row, place, "a JSON object")


def _rows_in(data: object) -> Sequence[object] | None:
    if isinstance(data, list):
        return cast("list[object]", data)
    if not isinstance(data, dict):
        return None
    table = cast("dict[str, Any]", data)
    lists = [cast("list[object]", value) for value in table.values() if isinstance(value, list)]
    if len(lists) == 1:
        return lists[0]
    if table and all(isinstance(value, dict) for value in table.values()):
        return [{"id": name, **value} for name, value in table.items()]
    return None


def _table_rows(path: Path, key: str, delimiter: str) -> Iterator[Row]:
    try:
        text = read_bytes(path, key).decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise RequestError(f"{path}: byte {e.start} is not UTF-8; save the file as UTF-8") from None
    csv.field_size_limit(1 << 30)
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        head = next(rows, list[str]())
        if not any(head):
            raise RequestError(f"{path}:1: has no line with the names of its columns; write one")
        for cells in rows:
            if not any(cells):
                continue
            place = f"{path}:{rows.line_num}"
            if len(cells) != len(head):
                raise RequestError(f"{place}: has {len(cells)} cells, but there are {len(head)} columns")
            yield place, dict(zip(head, cells, strict=True))
    except csv.Error as e:
        raise RequestError(f"{path}:{rows.line_num}: not CSV ({e})") from None


def lines_of(path: Path, key: str) -> Iterator[tuple[str, bytes]]:
    # Split by hand: splitlines would also split at characters that JSON allows in strings.
    for number, line in enumerate(read_bytes(path, key).removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if line.strip():
            yield f"{path}:{number}", line


def kind_of(path: Path, key: str) -> str:
    """The kind of a file by its name; a name that tells nothing means JSONL, as it always did."""
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() != ".gz"]
    kind = suffixes[-1] if suffixes else ".jsonl"
    if kind == ".parquet":
        raise RequestError(f"{key}: {path} is a Parquet file; write it as .jsonl or .csv")
    return kind if kind in KINDS else ".jsonl"


def read_bytes(path: Path, key: str) -> bytes:
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if path.suffix.lower() == ".gz" else raw
    except FileNotFoundError:
        raise RequestError(f"{key}: {path} does not exist; create it or correct the key") from None
    except (OSError, EOFError, zlib.error) as e:
        raise RequestError(f"{key}: {path} cannot be read ({reason(e)})") from None


def read_json(raw: bytes, place: str, fix: str) -> Any:
    try:
        return msgspec.json.decode(raw.removeprefix(b"\xef\xbb\xbf"))
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as e:
        what = str(e).removeprefix("JSON is malformed: ")
        raise RequestError(f"{place}: not JSON ({what}); {fix}") from None


def _object(row: Any, place: str, what: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise RequestError(f"{place}: must be {what}")
    return cast("dict[str, Any]", row)
