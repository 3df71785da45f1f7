"""The registry: names, entry points and dotted paths, found without importing what is not used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from evalfleet.benchmarks.command import CommandBenchmark
from evalfleet.errors import RequestError
from evalfleet.planning.plugins import (
    BUILT_IN,
    Setting,
    benchmark_kind,
    benchmarks,
    known,
    place_kind,
    places,
    settings_of,
)
from evalfleet.ports import PlaceContext

SHED = '''
from typing import Annotated
from msgspec import Meta, Struct, field

class Shed:
    """Machines in the shed.

    More."""
    class Settings(Struct, frozen=True, forbid_unknown_fields=True):
        door: Annotated[str, Meta(description="which door")]
        hosts: tuple[str, ...] = ()
        watts: float | None = None
        extra: dict[str, int] = field(default_factory=dict)
    @classmethod
    def make(cls, name, settings, context): return (name, settings, context)

class NoMake:
    Settings = Shed.Settings

class Loose:
    class Settings(Struct): pass
    @classmethod
    def make(cls, name, settings, context): pass
'''


@pytest.fixture
def shed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An installed distribution with three entry points, one broken and one named as ours."""
    module = "shed_" + "".join(c for c in tmp_path.name if c.isalnum())
    (tmp_path / f"{module}.py").write_text(SHED)
    (tmp_path / f"{module}_broken.py").write_text("raise OSError('no disk')")
    (tmp_path / f"{module}_needs.py").write_text("import not_there_at_all")
    info = tmp_path / "shed-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shed\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[evalfleet.places]\nshed = {module}:Shed\nsad = {module}_broken:Shed\nlocal = {module}:Shed\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return module


def test_built_in_plug_ins_are_found_by_name() -> None:
    assert benchmark_kind("command").Settings is CommandBenchmark.Settings
    assert known("place")["local"] == "evalfleet.places.local:LocalPlace"


def test_entry_points_and_dotted_paths_are_found(shed: str) -> None:
    assert place_kind("shed") == place_kind(f"{shed}:Shed")


def test_ours_win_over_others_of_the_same_name(shed: str) -> None:
    assert known("place")["local"] == BUILT_IN["place"]["local"]
    assert "shed" in known("place")


def test_a_listing_has_settings_with_types_defaults_and_docs(shed: str) -> None:
    found = {plug_in.name: plug_in for plug_in in places()}
    assert found["shed"].summary == "Machines in the shed."
    assert found["shed"].settings == (
        Setting("door", "str", None, "which door"),
        Setting("hosts", "tuple[str, ...]", "[]", ""),
        Setting("watts", "float | None", "null", ""),
        Setting("extra", "dict[str, int]", "{}", ""),
    )
    assert found["shed"].problem == ""


def test_a_broken_plug_in_does_not_hide_the_others(shed: str) -> None:
    found = {plug_in.name: plug_in for plug_in in places()}
    assert found["sad"].problem == (
        f"place '{shed}_broken:Shed' cannot be imported (OSError: no disk); mend or update it"
    )
    assert {"sad", "shed", "local"} <= set(found)


def test_the_settings_of_the_command_benchmark() -> None:
    assert [plug_in.name for plug_in in benchmarks() if not plug_in.problem] == ["command", "hal", "waa"]
    path, given = settings_of(benchmark_kind("command"))
    assert path == Setting("path", "str", None, "the benchmark's TOML file, beside evalfleet.toml")
    assert (given.name, given.type, given.default) == ("set", "Mapping[str, str | int | float | bool]", "{}")


def test_unknown_names_are_refused_with_the_nearest(shed: str) -> None:
    with pytest.raises(RequestError, match="place 'shde' is unknown; did you mean 'shed'"):
        place_kind("shde")
    with pytest.raises(RequestError, match="benchmark 'zz' is unknown; there are command, hal, waa"):
        benchmark_kind("zz")
    with pytest.raises(RequestError, match=r"place 'lab' is unknown; .*lab.place:LabPlace"):
        place_kind("lab")


def test_wrong_dotted_paths_are_refused_with_the_fix(shed: str) -> None:
    cases = {
        "no_such_module_here:X": "place 'no_such_module_here:X' needs the module 'no_such_module_here'; "
        "install it, or set PYTHONPATH to where it is",
        f"{shed}_needs:X": f"place '{shed}_needs:X' needs the module 'not_there_at_all'; "
        "install it, or set PYTHONPATH to where it is",
        f"{shed}:Shad": f"place '{shed}:Shad': {shed} has no 'Shad'; did you mean 'Shed'?",
        f"{shed}:NoMake": f"'{shed}:NoMake' is not a place: it has no 'make'; add it",
        f"{shed}:Loose": f"'{shed}:Loose' is not a place: make its Settings a msgspec.Struct, "
        "forbid_unknown_fields=True",
    }
    for path, message in cases.items():
        with pytest.raises(RequestError) as caught:
            place_kind(path)
        assert str(caught.value) == message


def test_nothing_is_imported_before_it_is_used() -> None:
    code = (
        "import sys, evalfleet.planning.plugins as r; r.known('place'); r.known('benchmark'); "
        "print([m for m in sys.modules if m.startswith('evalfleet.places') or m.endswith('.command')])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_a_context_does_not_show_its_secrets() -> None:
    assert "hunter2" not in repr(PlaceContext(Path("h"), "id", {"KEY": "hunter2"}, {"K": "hunter2"}))
