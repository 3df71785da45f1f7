"""Several places, with real processes: the first one breaks what it is given, and the next one goes on."""

from __future__ import annotations

from tests.e2e.harness import Fleet, tasks
from tests.waiting import until

PLACES = """
[places.first]
kind = "local"
[places.second]
kind = "local"
[tiers]
both = ["first", "second"]
"""


def test_a_place_that_breaks_all_is_left_and_a_killed_controller_is_followed_by_one_that_knows(
    fleet: Fleet,
) -> None:
    (fleet.folder / "evalfleet.toml").write_text(PLACES)
    broken = fleet.folder / "broken"
    broken.mkdir()
    # the first four attempts leave no result: all of them are at the first place, which has the only machine
    break_it = f"touch {broken}/$EVALFLEET_TASK_ID.$EVALFLEET_ATTEMPT; exit 1"
    body = f"if [ $(ls {broken} | wc -l) -lt 4 ]; then {break_it}; fi; gate go; score 1"
    fleet.bench(tasks(6, body))
    run = fleet.start_run("--workers", "1", "--on", "both")
    until(lambda: [c.phase for c in fleet.state().circuits.values()][:1] == ["open"])
    until(lambda: any(m.offer.place == "second" for m in fleet.state().machines.values()))
    run.kill()
    fleet.open_gate("go")
    assert fleet("resume", "r").code == 0
    found = fleet.results()
    assert found["scored"] == 6
    by_place = {use["place"]: use for use in found["by_place"]}
    assert (by_place["first"]["scored"], by_place["first"]["broken"]) == (0, 4)
    assert by_place["second"]["scored"] == 6
    assert by_place["first"]["changes"][-1]["why"].startswith("4 of the last 4 attempts and machines there")
    assert "## Places" in fleet("report", "r").out
    fleet.settled()
