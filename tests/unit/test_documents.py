"""The JSON documents that programs read keep their schemas, and their schemas keep their keys."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from evalfleet.api.documents import (
    DOCUMENTS,
    belonging_row,
    image_belonging_row,
    image_row,
    pool_document,
    prices_documents,
    schema,
)
from evalfleet.api.places import FoundBelonging, FoundImage, Listed
from evalfleet.api.pool_machine import ActionResult
from evalfleet.cli import DEVELOPER_VERBS, VERBS, main, parser_of
from evalfleet.cli.pool import VERBS as POOL_VERBS
from evalfleet.cli.pool import add_verb_arguments
from evalfleet.errors import RequestError
from evalfleet.events import Record
from evalfleet.model import MachineId
from evalfleet.named_pools import PoolView
from evalfleet.planning import plugins
from evalfleet.ports import Belonging, Image, Price, PriceTable
from evalfleet.views.lines import json_lines
from evalfleet.views.live import live
from evalfleet.views.results import results, task_detail
from evalfleet.views.tasks import aggregated, by_machine
from sim.scenario import draw
from sim.simulate import simulate
from tests.unit.views_feed import a_mixed_run

GOLDEN = Path(__file__).with_name("documents.json")
"""The keys of every document. They may be added to; a key that is gone breaks somebody's program."""


def strict(value: Any) -> Any:
    """The schema, for which a key that it does not name is an error."""
    if isinstance(value, dict):
        closed = {"additionalProperties": False} if "properties" in value else {}
        return {**{key: strict(part) for key, part in value.items()}, **closed}
    return [strict(part) for part in value] if isinstance(value, list) else value


@functools.cache
def validator(name: str, kind: str = "") -> jsonschema.Draft202012Validator:
    whole = strict(schema(name))
    return jsonschema.Draft202012Validator(
        {"$ref": f"#/$defs/{kind}", "$defs": whole["$defs"]} if kind else whole
    )


def check(name: str, *documents: object) -> None:
    for document in documents:
        found = validator(name).iter_errors(json.loads(json.dumps(document)))
        problems = [f"{error.json_path}: {error.message[:200]}" for error in found]
        assert not problems, (name, problems[:3])


def check_lines(records: Iterable[Record]) -> None:
    """Each by the schema of its kind, which is quicker than by that of all, and says more when it fails."""
    for line in map(json.loads, json_lines(records)):
        kind: str = line["kind"]
        part = f"{kind}Line" if kind in ("RunPlanned", "TasksPlanned") else kind
        assert not [error.message[:200] for error in validator("events", part).iter_errors(line)], line


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 5, 8])
def test_what_is_told_of_any_run_keeps_its_schema(seed: int) -> None:
    sim = simulate(draw(seed))
    state = sim.state
    document = results(state, Path(f"/h/{state.plan.run}"))
    check("results", document)
    check("task", *(task_detail(state, task) for task in list(state.tasks)[:20]))
    check("live", live(state, state.last_at, {m: {"cpu_percent": 1.0} for m in state.ready}))
    check("aggregated", aggregated(document))
    check("worker", *by_machine(document).values())
    check_lines(itertools.islice(sim.store.read(), 2000))


def test_what_is_told_of_a_run_made_by_hand_keeps_its_schema() -> None:
    feed = a_mixed_run()
    check("results", results(feed.state, Path("/h/run1")))
    check_lines(feed.records)
    check("events", *map(json.loads, json_lines(feed.records[:3])))


def test_a_pool_keeps_its_schema() -> None:
    state = a_mixed_run().state
    view = PoolView("p", state, {})
    now, answers = state.last_at, [ActionResult(machine) for machine in state.machines.values()]
    check("pool", pool_document(view, now), pool_document(view, now, answers))
    check("pools", [], [pool_document(view, now)])


def test_what_exists_at_places_keeps_its_schema() -> None:
    belonging = Belonging(MachineId("r-h-1"), "h", "me", "east", 1_767_364_252_000_000, ("vm", "disk"))
    image = FoundImage("cloud", Image("i", "h", "me", "image = 'i'", "ready", ("east",), 3.5, 0.2), True)
    check(
        "machines",
        [belonging_row(FoundBelonging("cloud", belonging, True, "expired")), image_belonging_row(image)],
    )
    check("images", [image_row(image)])
    prices = (Price("D4", "east", 0.2, 0.05), Price("D8", "west", 0.4, estimated=True))
    check("prices", prices_documents(Listed(("cloud",), PriceTable("2026-01-01", "x", prices), frozenset())))


BENCHMARK = """
name = "b"
command = ["sh", "-c", "echo said; cp answer.txt $EVALFLEET_OUT"]
files = ["answer.txt"]
score = ["sh", "-c", "echo '{\\"score\\": 1}' > $EVALFLEET_OUT/result.json"]
timeout_s = 600
[[tasks]]
id = "t"
[[tasks]]
id = "u"
"""
PRINTS = (
    ("new-benchmark", "init --name start"),
    ("plan", "run b.toml --dry-run"),
    ("forecast", "plan b.toml --workers 2 --deadline 10h"),
    ("results", "run b.toml --name r --workers 2"),
    ("results", "resume r --regrade"),
    ("results", "run --from r --task t --name again"),
    ("results", "cancel again"),
    ("results", "show r"),
    ("task", "show r t"),
    ("results", "report r"),
    ("results", "watch r --content"),
    ("log", "watch r t"),
    ("log", "logs r t"),
    ("events", "logs r"),
    ("events", "logs r worker-1"),
    ("runs", "ls"),
    ("verify", "ls --verify"),
    ("usage", "ls --size"),
    ("exported", "export r -o r.tgz"),
    ("results", "import r.tgz --name back"),
    ("comparisons", "compare r back again"),
    ("", "traces r"),
    ("", "alerts r"),
    ("deleted", "gc again --yes"),
    ("deleted", "gc --older 1s --keep-scores --dry-run"),
    ("deleted", "gc --older 300d"),
    ("", "report --schema"),
    ("machines", "machines"),
    ("machines", "reap --dry-run"),
    ("images", "machines --images"),
    ("doctor", "doctor local"),
    ("prices", "prices"),
    ("places", "places"),
    ("places", "benchmarks"),
    ("pool", "pool create p --workers 1"),
    ("pools", "pool ls"),
    ("pool", "pool status p --probe"),
    ("pool", "pool prepare p b.toml"),
    ("answers", "pool restart p {machine}"),
    ("pool", "pool set p --workers 2"),
    ("pool", "pool start p"),
    ("pool", "pool set p --expires 2d"),
    ("events", "pool logs p"),
    ("deleted-pool", "pool delete p --yes"),
)
"""What to type -> what each line is that it prints; where there are several, the last one."""
PRINT_NO_FACTS = {
    "metrics",  # what Prometheus reads
    "serve",  # what a browser reads
    "controller",  # nothing: nobody types it
    "pool ssh",  # whatever the machine's shell prints
}
TRIED_ELSEWHERE = {
    "hal-eval",  # in a checkout of HAL: tests/e2e/test_hal.py
    "alerts",  # of runs that have some: tests/e2e/test_alerts.py
    *(
        "set",
        "end",
        "drain",
    ),  # of live runs: tests/e2e/test_steering.py
    "cost",  # of machines that cost something: tests/unit/test_reconcile.py
    "demo",  # it fetches packages: tests/demo
    "pool do",  # of a benchmark's own: tests/e2e/test_pool_appliance.py
    *("pool stop", "pool tunnel", "pool vnc"),  # of hosts: tests/lab/test_tunnels.py
}


def parsed(text: str) -> list[Any]:
    """One document, or one a line."""
    try:
        return [json.loads(text)]
    except ValueError:
        return [json.loads(line) for line in text.splitlines()]


def commands() -> dict[str, argparse.ArgumentParser]:
    found = {verb: parser_of(verb) for verb in (*VERBS, *DEVELOPER_VERBS) if verb != "pool"}
    for verb in POOL_VERBS:
        found[f"pool {verb}"] = argparse.ArgumentParser()
        add_verb_arguments(found[f"pool {verb}"], verb)
    return found


def test_every_command_that_prints_facts_can_print_them_as_json() -> None:
    without = {name for name, parser in commands().items() if "--json" not in parser.format_help()}
    assert without == PRINT_NO_FACTS
    tried = {" ".join(words.split()[: 1 + words.startswith("pool ")]) for _, words in PRINTS}
    assert tried | PRINT_NO_FACTS | TRIED_ELSEWHERE == set(commands()), "a new command belongs into PRINTS"


def test_what_the_command_line_prints_keeps_its_schema(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVALFLEET_HOME", str(tmp_path / "home"))
    (tmp_path / "b.toml").write_text(BENCHMARK)
    (tmp_path / "answer.txt").write_text("42")
    machine = ""
    for document, words in PRINTS:
        code = main([*words.format(machine=machine).split(), "--json"])
        told = capfd.readouterr()
        assert code == 0, (words, told.err)
        lines = parsed(told.out)
        assert lines, words
        if document == "events":
            assert [line["seq"] for line in lines] == sorted({line["seq"] for line in lines})
        elif document:
            check(document, lines[-1])
        if words.startswith("pool create"):
            machine = lines[-1]["machines"][0]["name"]
    check("live", json.loads((tmp_path / "home" / "parallel_live.json").read_bytes()))
    assert plugins.places()


def test_no_key_of_a_document_is_ever_gone() -> None:
    golden: dict[str, dict[str, list[str]]] = json.loads(GOLDEN.read_text())
    now = {name: keys_of(schema(name)) for name in DOCUMENTS}
    assert sorted(now) == sorted(golden)
    for name, parts in golden.items():
        for part, keys in parts.items():
            gone = set(keys) - set(now[name].get(part, ()))
            assert not gone, f"{name}: {part} no longer has {sorted(gone)}"


def keys_of(whole: dict[str, Any]) -> dict[str, list[str]]:
    """Part of the document -> its keys, in order."""
    parts: dict[str, Any] = whole.get("$defs", {})
    return {part: sorted(found["properties"]) for part, found in parts.items() if "properties" in found}


def test_an_unknown_document_is_refused_with_the_nearest() -> None:
    with pytest.raises(RequestError, match="did you mean 'results'"):
        schema("result")
