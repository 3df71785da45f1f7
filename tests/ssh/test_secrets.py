"""A secret is seen by the attempt alone: by none of our records, and by nobody else on the host."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.harness import Fleet as Computer
from tests.e2e.harness import task
from tests.e2e.metered import PRICES, metered, serving_models
from tests.folders import below
from tests.planted import UNIQUE, processes_holding
from tests.planted import holding as files_holding
from tests.waiting import until

from .fleet import Fleet, Sshd
from .test_run import start, write

PLANTED = f'planted:{UNIQUE[:6]}-"quoted"\\é-value-' + UNIQUE * 10  # JSON writes it in other ways, too
SHAPES = (PLANTED, json.dumps(PLANTED)[1:-1], json.dumps(PLANTED, ensure_ascii=False)[1:-1], PLANTED[-40:])
FORMS = [shape.encode() for shape in SHAPES]
BENCH = """\
name = "b"
tasks = "tasks.jsonl"
command = ["bash", "run.sh", "{task_id}"]
files = ["run.sh"]
secrets = ["TOKEN"]
timeout_s = 60
"""
SCRIPT = """\
cd "$EVALFLEET_OUT"
say() { python3 -c 'import json, os; print(json.dumps({"score": 1, "error": "with " + os.environ["TOKEN"],
    "screenshots": [os.environ["TOKEN"]]}))'; }
echo "log: $TOKEN"; echo "errors: $TOKEN" >&2; say
say >details.json
mkdir "dir-$TOKEN"; echo fine >"dir-$TOKEN/fine"; echo fine >"name-$TOKEN"; ln -s "$TOKEN" link
head -c 300000 /dev/zero | tr '\\0' x >big; printf %s "$TOKEN" >>big
[ "$1" = light ] && rm big
touch "@/begun-$1"
until [ -e "@/go" ]; do sleep 0.05; done
case $1 in
    fails) printf %s "$TOKEN"; head -c 1900 /dev/zero | tr '\\0' x; exit 3;;  # the end begins in a value
    *) say >result.json;;
esac
"""
AS_NOBODY = """\
import os, sys
needles = [line.encode() for line in sys.stdin.read().split("\\n\\n")]
found = []
for pid in filter(str.isdigit, os.listdir("/proc")):
    for name in ("cmdline", "environ"):
        try:
            with open("/proc/%s/%s" % (pid, name), "rb") as file:
                data = file.read()
        except OSError:
            continue
        if any(needle in data for needle in needles):
            found.append((pid, name))
print(found)
"""


def holding(folder: Path) -> list[Path]:
    """Files below it with the value in their content, and whatever has it in its name or its target."""
    found: list[Path] = []
    for path in below(folder):
        with suppress(FileNotFoundError):  # it has just vanished
            target = os.fsencode(os.readlink(path)) if path.is_symlink() else b""
            data = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
            name = os.fsencode(path.name)
            if any(secret_in(text) for text in (data, name, target)):
                found.append(path)
    return found


def processes() -> Iterator[tuple[int, bytes, bytes]]:
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            yield pid, Path(f"/proc/{pid}/cmdline").read_bytes(), Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue


def secret_in(data: bytes) -> bool:
    return any(form in data for form in FORMS)


def prepare(folder: Path, hosts: Fleet, *ids: str) -> None:
    write(folder, hosts, 0)
    (folder / "b.toml").write_text(BENCH)
    (folder / "run.sh").write_text(SCRIPT.replace("@", str(folder)))
    (folder / "tasks.jsonl").write_text("".join(json.dumps({"id": id}) + "\n" for id in ids))


def check_processes() -> None:
    """Nobody but the attempts has it, and nobody at all in a command line."""
    shown = subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, check=True).stdout
    assert not secret_in(shown)
    holders = 0
    for pid, argv, environ in processes():
        assert not secret_in(argv), pid
        if secret_in(environ):
            assert b"\0EVALFLEET_JOB=" in b"\0" + environ, (pid, argv)
            holders += 1
    assert holders >= 2, "the attempts did not get it"


def check_other_users() -> None:
    nobody = pwd.getpwnam("nobody")
    seen = subprocess.run(
        [shutil.which("python3", path="/usr/bin:/usr/local/bin:/bin") or sys.executable, "-c", AS_NOBODY],
        input="\n\n".join(form.decode() for form in FORMS),
        capture_output=True,
        text=True,
        user=nobody.pw_uid,
        group=nobody.pw_gid,
        extra_groups=(),
        cwd="/",
        check=True,
    )
    assert seen.stdout.strip() == "[]"


def check_host(host: Sshd) -> int:
    """What holds it there is the attempt's own making, and closed to others. How many files that is."""
    machines = list(host.ours.glob("*/*/jobs"))
    found = holding(host.home)
    for path in found:
        inside = path.relative_to(machines[0]).parts
        assert inside[1] == "out" or inside[1:] == ("log",), path
    for job in machines[0].iterdir():
        assert (job / "log").stat().st_mode & 0o777 == 0o600
    for folder in (host.ours, machines[0].parent.parent, machines[0].parent):
        assert folder.stat().st_mode & 0o777 == 0o700, folder
    return len(found)


def test_nobody_sees_it_but_the_attempt(hosts: Fleet, tmp_path: Path) -> None:
    folder = tmp_path / "f"
    prepare(folder, hosts, "light", "heavy", "fails")
    (folder / "keys.env").write_text("TOKEN='" + PLANTED + "'\n")
    (folder / "keys.env").chmod(0o600)
    words = ("run", "b.toml", "--on", "lab3", "--workers", "3", "--name", "r", "--attempts", "1")
    run = start(folder, *words, "--env-file", "keys.env", token=None)
    until(lambda: all((folder / f"begun-{id}").exists() for id in ("light", "heavy", "fails")))
    check_processes()
    if os.geteuid() == 0:
        check_other_users()
    assert sum(check_host(host) for host in hosts.hosts) >= 9
    assert not holding(folder / "results"), "while it runs"
    (folder / "go").touch()
    said = run.finish(1)
    assert not secret_in(said.encode())
    check_records(folder)
    assert not [path for host in hosts.hosts for path in host.home.iterdir()]


def check_records(folder: Path) -> None:
    results = folder / "results"
    assert not holding(results)
    assert (results / "fleet.db").exists()
    told = {task["task_id"]: task for task in json.loads((results / "r/results.json").read_text())["tasks"]}
    assert told["heavy"]["error"] == told["light"]["error"] == "with ***"
    assert "no result.json: ***xxx" in told["fails"]["error"]
    for id in ("light", "heavy"):
        log = (results / f"r/{id}/{id}.0/evalfleet.log").read_text()
        assert log.startswith("log: ***\nerrors: ***\n")
        assert '"error": "with ***"' in log
        left = json.loads((results / f"r/{id}/{id}.0/left_out.json").read_text())
        assert {each["reason"] for each in left} == {"contains a secret"}
        assert not (results / f"r/{id}/{id}.0/details.json").exists()
    shows = (
        ("show", "r"),
        ("show", "r", "fails"),
        ("show", "r", "--json"),
        ("logs", "r"),
        ("logs", "r", "fails"),
    )
    reports = [("report", "r", "--format", format) for format in ("md", "json", "csv")]
    for words in (*shows, *reports, ("ls",), ("watch", "r")):
        said = start(folder, *words, token=None).wait().said
        assert said, words
        assert not secret_in(said.encode()), words


@pytest.mark.parametrize("given", ["environment", ".env", "--env-file", "nothing", "empty"])
def test_where_it_comes_from_and_that_it_must(hosts: Fleet, tmp_path: Path, given: str) -> None:
    folder = tmp_path / "f"
    prepare(folder, hosts, "light")
    (folder / "go").touch()
    more: list[str] = []
    if given == ".env":
        (folder / ".env").write_text(f"TOKEN='{PLANTED}'\n")
    if given == "--env-file":
        (tmp_path / "some.env").write_text(f"TOKEN='{PLANTED}'\n")
        more = ["--env-file", "../some.env"]
    token = {"environment": PLANTED, "empty": ""}.get(given)
    run = start(folder, "run", "b.toml", "--on", "lab3", "--name", "r", *more, token=token)
    said = run.wait().said
    assert not secret_in(said.encode())
    if given in ("nothing", "empty"):
        assert run.wait().code == 2
        assert said.startswith("evalfleet: the benchmark needs TOKEN; set it in the environment, in .env")
        assert not any(host.ours.exists() for host in hosts.hosts)
        assert not (folder / "results/r").exists()
        return
    assert run.wait().code == 0, said
    assert not holding(folder / "results")


@pytest.mark.skipif(os.geteuid() != 0, reason="NO TEST OF MEMORY: only root may read that of others")
def test_a_models_key_is_in_no_file_of_a_host_and_in_no_agents_memory(hosts: Fleet, tmp_path: Path) -> None:
    computer = Computer.at(tmp_path / "f")
    keys = "".join(f"{key} = {json.dumps(value)}\n" for key, value in hosts.settings().items())
    with serving_models(tmp_path) as models:
        tasks = [task("a", "call(); gate('go'); call(); score(1)")]
        metered(computer, models, tasks, f'{PRICES}[places.lab3]\nkind = "ssh"\n{keys}')
        (computer.folder / ".env").write_text(f"OPENAI_API_KEY={computer.environ.pop('OPENAI_API_KEY')}\n")
        (computer.folder / ".env").chmod(0o600)
        run = computer.start_run("--on", "lab3")
        until(lambda: models.sums()["calls"] == 1)
        (pid,) = [path for host in hosts.hosts for path in host.ours.glob("*/*/meter/pid")]
        holders = processes_holding(models.key)
        assert int(pid.read_text().split()[0]) in holders
        agents = [
            holder
            for holder in holders
            if b"EVALFLEET_TASK_ID=" in Path(f"/proc/{holder}/environ").read_bytes()
        ]
        assert not agents, holders
        assert not [path for host in hosts.hosts for path in files_holding(host.home, models.key)]
        computer.open_gate("go")
        assert run.wait().code == 0, run.said
        assert models.sums()["calls"] == 2
    assert not files_holding(computer.home, models.key)
