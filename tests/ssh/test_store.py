"""A run on real hosts is taken over by another computer, which has the store and the hosts' key."""

from __future__ import annotations

from pathlib import Path

from evalfleet.channels.supervisor.files import KEY
from evalfleet.events import AttemptStarted
from tests.desk import Desk
from tests.planted import forms, holding, private_lines
from tests.waiting import until

from .fleet import Fleet
from .test_run import PLANTED, write

SCRIPT = """\
mark=@/begun-$1.$EVALFLEET_ATTEMPT.$$
touch "$mark"
echo "the token is $TOKEN"; echo "$TOKEN" >"$EVALFLEET_OUT/leak"
[ "$1" = t_1 ] || until [ -e @/go ]; do sleep 0.05; done
echo '{"score": 1}' >"$EVALFLEET_OUT/result.json"
"""


def test_another_computer_adopts_what_runs_and_the_store_holds_no_secret(
    hosts: Fleet, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    write(first, hosts, 4)
    (first / "run.sh").write_text(SCRIPT.replace("@", str(tmp_path)))
    (first / "b.toml").write_text((first / "b.toml").read_text().replace("echo ready >ready", "true"))
    one, two = Desk(first, environ={"TOKEN": PLANTED}), Desk(second, environ={"TOKEN": PLANTED})
    (second / "evalfleet.toml").write_text((first / "evalfleet.toml").read_text())

    def begun() -> set[str]:
        return {path.name.rpartition(".")[0] for path in tmp_path.glob("begun-*")}

    words = ("--on", "lab3", "--workers", "3", "--name", "r", "--store", str(bucket))
    run = one.start("run", "b.toml", *words)
    all_started = {f"begun-t_{n}.0" for n in range(1, 5)}
    until(lambda: begun() == all_started, "all four attempts")
    until(lambda: list(bucket.glob("r/artefacts/t_1/t_1.0/evalfleet.log")), "what the first one left")
    machine_keys = [path.read_text() for host in hosts.hosts for path in host.home.rglob(KEY)]
    assert len(machine_keys) == 3
    taken = two.start("resume", "--from", str(bucket))
    until(lambda: two.state().controllers == 2, "the second computer")
    (tmp_path / "go").touch()
    assert run.wait().code == 130
    taken.finish()
    assert two.results()["scored"] == 4
    starts = [event.attempt for event in two.events() if isinstance(event, AttemptStarted)]
    assert sorted(starts) == [f"t_{n}.0" for n in range(1, 5)], "none was started again"
    assert len(list(tmp_path.glob("begun-*"))) == 4, "nor on a host"
    # the masked log is there, so that the search below sees what came from the attempts
    assert "the token is " in (bucket / "r/artefacts/t_2/t_2.0/evalfleet.log").read_text()
    secrets = [*forms(PLANTED), *private_lines(hosts.key), *machine_keys, "PRIVATE KEY"]
    assert holding(bucket, *secrets) == []
    assert holding(hosts.key.parent, *private_lines(hosts.key)), "the search finds what is there"
