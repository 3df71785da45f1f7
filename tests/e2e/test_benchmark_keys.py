"""Keys of a benchmark file that commands on machines can notice: variables, files and set-up of a task."""

from __future__ import annotations

import os
import sys

import pytest

from tests.e2e.harness import Fleet, task, toml

ROOT = os.geteuid() == 0 and sys.platform.startswith("linux")
ISOLATIONS = ["none", *(["user"] if ROOT else [])]


def test_variables_reach_command_setup_and_probe_and_a_tasks_own_win(fleet: Fleet) -> None:
    fleet.bench(
        [
            task("a_1", 'echo "$COLOUR $SIZE $(cat made)" | note; score 1'),
            task("a_2", 'echo "$COLOUR $SIZE $(cat made)" | note; score 1', env={"COLOUR": "blue"}),
        ],
        env={"COLOUR": "red", "SIZE": 3},
        setup=[["sh", "-c", 'echo "$COLOUR" > made']],
        probe=["sh", "-c", 'test "$SIZE" = 3'],
    )
    assert fleet.run().code == 0
    assert fleet.note("a_1") == "red 3 red\n"
    assert fleet.note("a_2") == "blue 3 red\n"


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_files_and_setup_of_a_task_are_for_its_attempts_alone(fleet: Fleet, isolation: str) -> None:
    (fleet.folder / "one").mkdir()
    (fleet.folder / "one" / "question").write_text("what is 6 * 7?")
    (fleet.folder / "two").write_text("the other one's")
    count = f'echo "$EVALFLEET_TASK_ID $EVALFLEET_PARAMS" >> {fleet.folder}/set-up; cat one/question > copy'
    show = "ls | sort | tr '\\n' ' '; cat one/question copy 2>/dev/null; score 1"
    fleet.bench(
        [
            task("a_1", show, files=["one/"], setup=[["sh", "-c", count]]),
            task("a_2", show, files=["two"]),
            task("a_3", show),
        ]
    )
    done = fleet.run("--repeat", "2", "--set", f"isolation={isolation}")
    assert done.code == 0, done
    logs = [fleet("logs", "r", f"a_{n}~2").out.split("\n")[-1] for n in (1, 2, 3)]
    assert logs == ["copy one run.sh what is 6 * 7?what is 6 * 7?", "run.sh two ", "run.sh "]
    # once on the machine, however many attempts there are
    (line,) = (fleet.folder / "set-up").read_text().splitlines()
    assert line.startswith('a_1 {"do":')


def test_a_tasks_own_setup_that_fails_breaks_that_task_alone(fleet: Fleet) -> None:
    fleet.bench([task("a_1", setup=[["sh", "-c", "echo no wheel for it; exit 3"]]), task("a_2")])
    done = fleet.run("--attempts", "2")
    assert done.code == 1, done
    broken = fleet.task("a_1")
    assert (broken["cause"], broken["attempts"]) == ("setup", 2)
    assert "no wheel for it" in broken["error"]
    assert fleet.task("a_2")["score"] == 1


def test_secrets_of_setup_are_not_the_commands_and_the_other_way_round(fleet: Fleet) -> None:
    show = 'echo "${SETUP_TOKEN:-none} ${AGENT_TOKEN:-none}"'
    fleet.bench(
        [task("a_1", show + "; cat made; score 1")],
        setup=[["sh", "-c", 'echo "${#SETUP_TOKEN} ${AGENT_TOKEN:-none}" > made']],
        setup_secrets=["SETUP_TOKEN"],
        secrets=["AGENT_TOKEN"],
    )
    fleet.run().refused("needs AGENT_TOKEN, SETUP_TOKEN")
    fleet.forks = True
    done = fleet.run(env={"SETUP_TOKEN": "st-123456", "AGENT_TOKEN": "at-98765432"})
    assert done.code == 0, done
    assert fleet("logs", "r", "a_1").out == "none ***\n9 none\n"


def test_a_step_of_setup_is_ended_at_its_time_limit(fleet: Fleet) -> None:
    fleet.bench([task("a_1")], setup=[["sleep", "600"]], setup_timeout_s=0.5)
    done = fleet.run("--workers", "1")
    assert done.code == 4, done
    assert "not done after 0.5 s" in done.out + done.err


def test_a_dataset_is_run_as_it_is_by_a_mapping_of_its_columns(fleet: Fleet) -> None:
    path = fleet.bench([])
    mapping = {"path": "data.csv", "id": "name", "domain": "kind", "params": {"do": "script"}}
    path.write_text(path.read_text().replace('tasks = "tasks.jsonl"', f"tasks = {toml(mapping)}"))
    (fleet.folder / "data.csv").write_text('name,kind,script\nx,easy,score 1\ny,hard,"score 0; echo a,b"\n')
    assert fleet.run().code == 0
    assert {name: counts["succeeded"] for name, counts in fleet.results()["by_domain"].items()} == {
        "easy": 1,
        "hard": 0,
    }


def test_a_link_to_a_file_in_the_folder_is_that_file_on_machines(fleet: Fleet) -> None:
    (fleet.folder / "data").mkdir()
    (fleet.folder / "data" / "link").symlink_to("../target")
    (fleet.folder / "target").write_text("what it leads to")
    fleet.bench([task("a_1", "cat data/link; test ! -L data/link && score 1")], files=["run.sh", "data/"])
    done = fleet.run()
    assert done.code == 0, done
    assert fleet("logs", "r", "a_1").out == "what it leads to"


def test_a_task_that_needs_what_no_machine_has_is_refused_before_anything_starts(fleet: Fleet) -> None:
    fleet.bench([task("a_1"), task("a_2", needs={"gpus": 512})])
    fleet.run().failed(4, "the 512 GPUs that task a_2 needs", "choose another place with --on")
    assert not (fleet.home / "r").exists()
    assert fleet.run("--task", "a_1").code == 0, "what was not chosen needs nothing"
    fleet.bench([task("a_1"), task("a_2", needs={"gpus": 512, "strict": False})])
    assert fleet.run("--name", "s").code == 0
