"""What a benchmark's machines can do, by the benchmark's own words: of one that nobody here knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from evalfleet.api.pools import keep_plan
from evalfleet.model import Plan
from tests.e2e.harness import Fleet, tasks
from tests.e2e.pools import machines, pool, registry, say

RADIO = '''
from msgspec import Struct
from evalfleet.benchmarks.loaded import Appliance, HostVerb
from evalfleet.benchmarks.loaded import Bare, Loaded
from evalfleet.model import Task

class Radio(Bare):
    """Listens."""
    name = "radio"
    machine_names = "mast"
    appliance = Appliance(
        what="radio",
        absent=9,
        verbs={
            "tune": HostVerb("find a station", ("sh", "-c", "cat ON || exit 9"), 60.0, {0: "{machine} on"}),
            "scrap": HostVerb("away with it", ("sh", "-c", "rm ON"), 60.0, {0: "scrapped"}, "scrap it", True),
        },
        probe=("sh", "-c", "exit $(cat ON || echo 9)"),
    )
    class Settings(Struct, frozen=True, forbid_unknown_fields=True):
        pass
    @classmethod
    def load(cls, name, settings, base, home):
        return Loaded(name=name, spec={}, tasks=(Task("t"),))
    @classmethod
    def from_spec(cls, spec, *, model, agent, settings):
        return cls()
'''


@pytest.fixture
def radio(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that says how the radio is."""
    module = f"radio_{fleet.folder.parent.name}"  # modules are imported once a process
    on = fleet.folder / "on"
    (fleet.folder / f"{module}.py").write_text(RADIO.replace("ON", str(on)))
    monkeypatch.syspath_prepend(str(fleet.folder))
    fleet.config(f'[benchmarks.radio]\nkind = "{module}:Radio"\n')
    return on


def test_its_verbs_and_its_probe(fleet: Fleet, radio: Path) -> None:
    pool(fleet, "create", "--prefix", "mast")
    pool(fleet, "prepare", "radio")
    done = say(fleet, "pool", "do", "p", "tune")
    assert done.code == 1
    assert (
        done.err
        == "evalfleet: mast-vm: there is no radio on it; `evalfleet pool prepare p radio` sets it up\n"
    )
    assert pool(fleet, "status", "--probe").out.rstrip().endswith("ok")
    radio.write_text("0")
    assert pool(fleet, "do", "tune").out == "mast-vm on\n"
    radio.write_text("1")
    told = say(fleet, "pool", "status", "p", "--probe")
    assert (told.code, "radio does not answer" in told.out) == (1, True)
    say(fleet, "pool", "do", "p", "scrap").refused("this would scrap it on mast-vm: say --yes")
    assert machines(fleet)["mast-vm"]["prepared"] == "radio"
    (scrapped,) = pool(fleet, "do", "scrap", "--yes", "--json").json
    assert (scrapped["machine"], scrapped["said"], scrapped["problem"]) == ("mast-vm", "scrapped", None)
    assert machines(fleet)["mast-vm"]["prepared"] is None
    pool(fleet, "delete", "--yes")


def test_what_a_benchmark_cannot_do_is_said_in_one_line(fleet: Fleet, radio: Path) -> None:
    pool(fleet, "create")
    prepared = pool(fleet, "prepare", "radio")
    assert "worker-vm is called mast-vm now" in prepared.out + prepared.err
    assert [worker["name"] for worker in registry(fleet, "p")["workers"]] == ["mast-vm"]
    say(fleet, "pool", "do", "p", "tuna").refused("radio has no verb 'tuna'; did you mean 'tune'?")
    say(fleet, "pool", "do", "p", "reset", "mast-vm").refused("radio has no verb 'reset'", "--benchmark")
    say(fleet, "pool", "vnc", "p").refused("radio has no screen; --benchmark names another")
    say(fleet, "pool", "vnc", "p", "--save", ".").refused("radio has no screen")
    say(fleet, "pool", "tunnel", "p").refused("radio has no port of its own: name one with --port")
    say(fleet, "pool", "vnc", "p", "--benchmark", "command").refused("command has no screen")
    say(fleet, "pool", "vnc", "p", "--benchmark", "nobody").refused("benchmark 'nobody' is unknown")
    fleet.bench(tasks(1))
    pool(fleet, "prepare", "./b.toml")
    say(fleet, "pool", "do", "p", "clean", "--yes").refused(
        "b has no verb 'clean'; --benchmark names another"
    )
    assert pool(fleet, "status", "--probe").out.rstrip().endswith("ok"), "nothing more is asked"
    pool(fleet, "delete", "--yes")


def test_a_pool_that_a_run_keeps_is_named_as_its_benchmark_names_machines() -> None:
    assert keep_plan(Plan("r", "radio", machine_names="mast-{n}"), "r-pool").machine_names == "mast"
