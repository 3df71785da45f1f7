"""Parcels that no packer of ours would write, and what they must not touch."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any


def file(name: Any, content: bytes = b"evil\n", **fields: Any) -> bytes:
    about = {"file": name, "size": len(content), "mode": 0o600, "mtime": 0, **fields}
    return json.dumps(about).encode() + b"\n" + content


def folder(name: Any) -> bytes:
    return json.dumps({"folder": name, "mode": 0o700}).encode() + b"\n"


def link(name: Any, to: Any) -> bytes:
    return json.dumps({"link": name, "to": to}).encode() + b"\n"


def closed(body: bytes, **end: Any) -> bytes:
    """The parcel with an end whose checksum is right."""
    told = {"end": hashlib.sha256(body).hexdigest(), "changed": [], "left_out": [], **end}
    return body + json.dumps(told).encode() + b"\n"


def parcel(*records: bytes, **end: Any) -> bytes:
    """As a job's parcel begins, with these records in it."""
    start = file("job.json", b'{"secret_names": []}') + file("log", b"logged\n") + folder("out")
    return closed(start + b"".join(records), **end)


def forged(victim: Path) -> dict[str, bytes]:
    """Each way out that we know of, by its name. `victim` is a file outside."""
    outside, absolute = f"../../../{victim.name}", str(victim)
    bare = file("job.json", b"{}") + folder("out")
    return {
        "a file above": parcel(file(outside)),
        "a file below and above": parcel(file(f"out/../../{victim.name}")),
        "an absolute file": parcel(file(absolute)),
        "a folder above": parcel(folder("../made")),
        "an absolute folder": parcel(folder(f"{absolute}-made")),
        "a link above": parcel(link("../made", absolute)),
        "no name": parcel(file("")),
        "only a slash": parcel(file("out/")),
        "two slashes": parcel(file("out//x")),
        "a dot": parcel(file("out/.")),
        "a NUL": parcel(file("out/a\0b")),
        "not Latin-1": parcel(file("out/\u20ac")),
        "a surrogate": parcel(file("out/\udc80")),
        "a name of 300 bytes": parcel(file("out/" + "x" * 300)),
        "a name of 20,000 bytes": parcel(file("out/" + "x/" * 10_000 + "x")),
        "left_out.json at the top": parcel(file("left_out.json", b"[]")),
        "a link left_out.json at the top": parcel(link("left_out.json", absolute), left_out=[["a", "b", 1]]),
        "a link left_out.json.tmp at the top": parcel(
            link("left_out.json.tmp", absolute), left_out=[["a", "b", 1]]
        ),
        "a link log.masked at the top": parcel(link("log.masked", absolute)),
        "a link log": closed(bare + link("log", absolute)),
        "a link job.json": closed(folder("out") + file("log") + link("job.json", absolute)),
        "a link out": closed(file("job.json", b"{}") + file("log") + link("out", str(victim.parent))),
        "a link dropped": parcel(link("dropped", str(victim.parent)), file("out/evalfleet.log")),
        "a link result.json at the top": parcel(link("result.json", absolute)),
        "a folder log": closed(bare + folder("log")),
        "a file through a link": parcel(link("out/d", str(victim.parent)), file(f"out/d/{victim.name}")),
        "a link, then a folder": parcel(link("out/d", str(victim.parent)), folder("out/d")),
        "a folder, then a link": parcel(folder("out/d"), link("out/d", str(victim.parent)), file("out/d/x")),
        "a link twice": parcel(link("out/d", "a"), link("out/d", absolute)),
        "a file twice": parcel(file("out/x"), file("out/x")),
        "a file through a file": parcel(file("out/x"), file("out/x/y")),
        "links out": parcel(link("out/l", absolute), link("out/m", f"../../../{victim.name}")),
        "links to links out": parcel(link("out/l", "m"), link("out/m", absolute)),
        "a link by the name of out": parcel(link("out/s", "."), link("out/l", "s/s/../out/x")),
        "a link to itself": parcel(link("out/l", "l")),
        "a link to nothing": parcel(link("out/l", "")),
        "a link to a NUL": parcel(link("out/l", "a\0b")),
        "a link for our log": parcel(link("out/evalfleet.log", absolute)),
        "a link for our list": parcel(link("out/left_out.json", absolute), left_out=[["a", "b", 1]]),
        "a link for our list's scratch": parcel(
            link("out/left_out.json.tmp", absolute), left_out=[["a", "b", 1]]
        ),
        "our list, forged": parcel(file("out/left_out.json", b'[{"name": "a", "reason": "lies"}]')),
        "our list as a folder": parcel(folder("out/left_out.json"), file("out/left_out.json/x")),
        "changed above": parcel(changed=[outside]),
        "changed absolute": parcel(changed=[absolute]),
        "changed that did not come": parcel(changed=["out/never"]),
        "changed twice": parcel(file("out/x"), changed=["out/x", "out/x"]),
        "changed through a link": parcel(link("out/d", str(victim.parent)), changed=[f"out/d/{victim.name}"]),
        "changed folder": parcel(changed=["out"]),
        "changed is no list": parcel(changed=absolute),
        "changed holds numbers": parcel(changed=[1, None]),
        "changed is not Latin-1": parcel(changed=["\u20ac"]),
        "left_out is no list": parcel(left_out={"a": 1}),
        "left_out holds numbers": parcel(left_out=[1, [2, 3, 4]]),
        "left_out is long": parcel(left_out=[["a", "b", 1]] * 5000),
        "left_out has long words": parcel(left_out=[["a" * 100_000, "b" * 100_000, 1]]),
        "left_out is not Latin-1": parcel(left_out=[["\u20ac", "b", 1]]),
        "a negative size": parcel(file("out/x", size=-1)),
        "a size that is none": parcel(file("out/x", size="many")),
        "an endless size": parcel(file("out/x", size=1 << 70)),
        "no size": parcel(b'{"file": "out/x"}\n'),
        "an odd mode": parcel(file("out/x", mode="rw")),
        "all bits of a mode": parcel(file("out/x", mode=0o7777)),
        "a time beyond time": parcel(file("out/x", mtime=1 << 80)),
        "a time before time": parcel(file("out/x", mtime=-(1 << 80))),
        "an infinite time": parcel(file("out/x").replace(b'"mtime": 0', b'"mtime": 1e999')),
        "a time that is no number": parcel(file("out/x").replace(b'"mtime": 0', b'"mtime": NaN')),
        "a number with 9,000 digits": parcel(b'{"file": "out/x", "size": ' + b"9" * 9000 + b"}\n"),
        "deep JSON": parcel(b'{"file": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"),
        "no UTF-8": parcel(b'{"file": "out/\xff\xfe", "size": 0}\n'),
        "a long record": parcel(link("out/l", "x" * 200_000)),
        "a number": parcel(b"1\n"),
        "a text": parcel(b'"end"\n'),
        "a list": parcel(b'["end"]\n'),
        "nothing": b"",
        "garbage": os.urandom(1000) + b"\n" + os.urandom(1000),
        "no end": parcel()[:-10],
        "a wrong checksum": parcel().replace(b"logged", b"forged"),
        "something after the end": parcel() + file("late"),
        "no job.json": closed(file("log") + folder("out")),
        "job.json is garbage": closed(file("job.json", b"\xff") + file("log") + folder("out")),
        "job.json is deep": closed(file("job.json", b"[" * 100_000) + file("log") + folder("out")),
        "job.json names a secret that is none": closed(
            file("job.json", b'{"secret_names": ["\\u001b[2J' + b"x" * 10_000 + b'"]}')
            + file("log")
            + folder("out")
        ),
    }


def seen(top: Path) -> dict[str, tuple[object, ...]]:
    """Everything below a folder, each with its kind, mode, time and content."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(top.rglob("*")):
        about = path.lstat()
        plain = stat.S_ISREG(about.st_mode)
        content = path.read_bytes() if plain else os.readlink(path) if path.is_symlink() else ""
        found[str(path.relative_to(top))] = (about.st_mode, about.st_mtime_ns if plain else 0, content)
    return found


def check_home(into: Path) -> None:
    """What came home is sound: no link leads outside, and the lists are ours."""
    left = {path.name for path in into.parent.iterdir()} - {into.name}
    assert not left, "a collection left something beside its folder"
    for path in into.rglob("*"):
        if path.is_symlink():
            end = os.path.realpath(path)
            assert Path(end).is_relative_to(os.path.realpath(into)), f"{path} leads outside"
        else:
            assert path.is_dir() or path.is_file(), path
            assert path.stat().st_mode & 0o7000 == 0, path
    log = into / "evalfleet.log"
    assert not log.is_symlink()
    if (into / "left_out.json").exists():
        listed = json.loads((into / "left_out.json").read_bytes())
        assert all(entry["reason"] != "lies" and len(entry["name"]) <= 4096 for entry in listed)
