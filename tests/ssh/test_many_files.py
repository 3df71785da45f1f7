"""Artefacts at their caps, and what file systems allow: many, deep, long-named, and no files at all."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest

from evalfleet.channels.artefacts import MOST_LEFT_OUT, Caps, bring_home, tally
from evalfleet.channels.secrecy import Secrets
from evalfleet.model import Collected

from .fleet import Fleet
from .test_files import collected, reasons

CAP = 24 << 20
FEW = "cd $EVALFLEET_OUT; "


@pytest.mark.parametrize(("size", "comes"), [(CAP - 1, True), (CAP, True), (CAP + 1, False)])
async def test_a_file_at_the_cap(hosts: Fleet, tmp_path: Path, size: int, comes: bool) -> None:
    """The standard cap is 2 GiB. The file is sparse there, and goes the way of all that is big."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seen = await collected(hosts, f"{FEW} truncate -s {size} big", tmp_path / "t.0", Caps(bytes=CAP))
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kb < 60_000
    if comes:
        assert seen == Collected(1, size)
        assert (tmp_path / "t.0/big").stat().st_size == size
        return
    assert seen == Collected(0, 0, 1)
    assert reasons(tmp_path / "t.0") == {"big": "too many bytes"}


async def test_what_is_left_below_the_cap_goes_to_the_next(hosts: Fleet, tmp_path: Path) -> None:
    script = f"{FEW} truncate -s {CAP - 1} a; truncate -s 2 b; truncate -s 1 c; echo {{}} >result.json"
    seen = await collected(hosts, script, tmp_path / "t.0", Caps(bytes=CAP + 2))
    assert seen == Collected(2, CAP + 2, 2), "the result, then by name"
    assert reasons(tmp_path / "t.0") == {"b": "too many bytes", "c": "too many bytes"}


async def test_very_many_files(hosts: Fleet, tmp_path: Path) -> None:
    make = "import os\nfor n in range(20000): os.close(os.open(f'm/{n}', os.O_CREAT))"
    script = f'{FEW} mkdir m; echo {{}} >result.json; python3 -c "{make}"'
    seen = await collected(hosts, script, tmp_path / "t.0", Caps(files=500))
    assert (seen.files, seen.left_out) == (500, MOST_LEFT_OUT + 1)
    assert (tmp_path / "t.0/result.json").exists()
    listed = json.loads((tmp_path / "t.0/left_out.json").read_text())
    assert listed[-1]["name"] == "..."
    assert len((tmp_path / "t.0/left_out.json").read_bytes()) < 100_000


def test_very_many_files_on_this_computer(tmp_path: Path) -> None:
    out = tmp_path / "job/out"
    out.mkdir(parents=True)
    (tmp_path / "job/log").touch()
    for n in range(12_000):
        os.close(os.open(out / str(n), os.O_CREAT))
    (out / "zz-secret").write_text("planted-value")
    os.rename(out / "zz-secret", out / "zz-planted-value")
    secrets = Secrets({"KEY": "planted-value"}, ("KEY",))
    seen = bring_home(tmp_path / "job", tmp_path / "into", secrets, Caps(files=500))
    assert (seen.files, seen.left_out) == (500, MOST_LEFT_OUT + 2)
    assert "secret" in seen.problem, "it comes after a thousand others"
    listed = json.loads((tmp_path / "into/left_out.json").read_text())
    assert listed[-1] == {"name": "...", "reason": "and 10,500 more", "bytes": 0}
    assert tally(tmp_path / "into") == seen
    assert len(os.listdir(tmp_path / "job/dropped")) == 11_501


async def test_deep_folders_and_long_names(hosts: Fleet, tmp_path: Path) -> None:
    make = """
import os
def dig(name, depth):
    os.mkdir('top-' + name[:1])
    os.chdir('top-' + name[:1])
    for _ in range(depth):
        os.mkdir(name)
        os.chdir(name)
    open('bottom', 'w').write('here')
    os.chdir(os.environ['EVALFLEET_OUT'])
dig('d', 499)
dig('e', 520)
dig('x' * 255, 40)
open('-' + 'n' * 254, 'w').write('long')
"""
    script = f"{FEW} python3 -c \"$(cat <<'EOF'\n{make}\nEOF\n)\""
    seen = await collected(hosts, script, tmp_path / "t.0")
    into = tmp_path / "t.0"
    assert (into / f"-{'n' * 254}").read_text() == "long"
    assert Path(into, "top-d", *("d" * 499), "bottom").read_text() == "here"
    assert Path(into, "top-e", *("e" * 499)).is_dir()
    found = reasons(into)
    (too_long,) = (reason for name, reason in found.items() if name.startswith("top-x/xxx"))
    assert "name too long" in too_long
    assert found["/".join(["top-e", *("e" * 500)])] == "too deep"
    assert (seen.files, seen.left_out) == (2, 2)


async def test_sockets_devices_and_pipes_stay_behind(hosts: Fleet, tmp_path: Path) -> None:
    device = "mknod device c 1 5;" if os.geteuid() == 0 else ""
    bind = "import socket; socket.socket(socket.AF_UNIX).bind('socket')"
    script = f'{FEW} mkfifo pipe; {device} python3 -c "{bind}"; ln -s pipe link; mkdir d; ln -s ../pipe d/l'
    seen = await collected(hosts, script, tmp_path / "t.0")
    found = reasons(tmp_path / "t.0")
    expected = {"pipe", "socket"} | ({"device"} if device else set())
    assert {name for name, reason in found.items() if reason == "not a file"} == expected
    assert seen.left_out == len(found)
    for path in tmp_path.rglob("*"):
        assert path.is_symlink() or path.is_file() or path.is_dir()


def test_deep_folders_on_this_computer(tmp_path: Path) -> None:
    out = tmp_path / "job/out"
    out.mkdir(parents=True)
    here = os.getcwd()
    for name, depth in (("d", 600), ("x" * 255, 20)):
        os.chdir(out)
        for _ in range(depth):
            os.mkdir(name)
            os.chdir(name)
        Path("bottom").touch()
    os.chdir(here)
    seen = bring_home(tmp_path / "job", tmp_path / "into", Secrets({}, ()), Caps())
    assert Path(tmp_path / "into", *("d" * 500)).is_dir()
    assert not Path(tmp_path / "into", *("d" * 501)).exists()
    assert set(reasons(tmp_path / "into").values()) == {"too deep"}
    assert tally(tmp_path / "into") == seen
