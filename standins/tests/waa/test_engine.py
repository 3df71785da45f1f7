"""The docker of lab hosts does what the original does, in its words."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from lab import Lab
from standins.waa import standin
from tests.lab.clients import needs_lab
from tests.waa.conftest import UP, Docker
from tests.waiting import PATIENCE_S, until

pytestmark = needs_lab
SH = ("--entrypoint", "sh")
SLEEPER = ("run", "-d", "--name", "s", "--entrypoint", "sleep", standin.IMAGE, "1000")


def test_versions(docker: Docker) -> None:
    assert docker.ok("--version").startswith("Docker version ")
    assert docker.ok("version", "--format", "{{.Server.Version}}").strip().count(".") == 2
    assert docker.ok("info", "-f", "{{.Driver}}") == "overlay2\n"
    assert "Images" in docker.ok("system", "df")


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (("frobnicate",), 1, "docker: 'frobnicate' is not a docker command."),
        (("run", "--gpu", standin.IMAGE), 125, "unknown flag: --gpu"),
        (("run", "-Z", standin.IMAGE), 125, "unknown shorthand flag: 'Z'"),
        (("run", "--name"), 125, "flag needs an argument: --name"),
        (("run", "-d", "no/such"), 125, "docker: Error response from daemon: pull access denied for no/such"),
        (
            ("run", "-d", "--device=/dev/nothing", standin.IMAGE),
            125,
            'error gathering device information while adding custom device "/dev/nothing": no such file',
        ),
        (("run", "-d", "--env-file", "/nope", standin.IMAGE), 125, "open /nope: no such file or directory"),
        (("pull", "no/such"), 1, "Error response from daemon: pull access denied for no/such, repository"),
        (("pull", "windowsarena/winarena:old"), 1, "manifest for windowsarena/winarena:old not found"),
        (("image", "inspect", "no/such"), 1, "Error: No such image: no/such"),
        (("inspect", "nobody"), 1, "Error: No such object: nobody"),
        (("exec", "nobody", "true"), 1, "Error response from daemon: No such container: nobody"),
        (("logs", "nobody"), 1, "No such container: nobody"),
        (("stop", "nobody"), 1, "No such container: nobody"),
        (("cp", "nobody:/a", "/tmp"), 1, "No such container: nobody"),
        (("rm", "nobody"), 1, "No such container: nobody"),
    ],
)
def test_refusals(docker: Docker, argv: tuple[str, ...], code: int, words: str) -> None:
    done = docker(*argv)
    assert (done.returncode, words in done.stderr) == (code, True), done.stderr


def test_a_container_says_how_it_is(docker: Docker) -> None:
    identity = docker.ok(*SLEEPER).strip()
    assert len(identity) == 64
    assert (
        docker.ok("inspect", "-f", "{{.State.Running}} {{.State.Status}} {{.Name}}", "s")
        == "true running /s\n"
    )
    assert json.loads(docker.ok("inspect", identity[:12]))[0]["Config"]["Image"] == standin.IMAGE
    assert docker.ok("ps", "-q") == identity[:12] + "\n"
    assert docker.ok("ps", "--filter", "name=^/s$", "--format", "{{.Names}} {{.State}}") == "s running\n"
    assert docker.ok("ps", "--filter", "name=^x$", "-q") == ""
    docker.ok("kill", "s")
    assert docker.ok("inspect", "-f", "{{.State.Running}} {{.State.ExitCode}}", "s") == "false 137\n"
    assert docker.ok("ps", "-q") == ""
    assert "Exited (137)" in docker.ok("ps", "-a")


def test_a_name_is_taken_until_it_is_removed(docker: Docker) -> None:
    docker.ok(*SLEEPER)
    again = docker(*SLEEPER)
    assert again.returncode == 125
    assert 'Conflict. The container name "/s" is already in use by container' in again.stderr
    running = docker("rm", "s")
    assert (running.returncode, "container is running" in running.stderr) == (1, True)
    docker.ok("rm", "-f", "s")
    docker.ok(*SLEEPER)


def test_what_runs_in_it_is_killed_whole(docker: Docker) -> None:
    docker.ok("run", "-d", "--name", "s", *SH, standin.IMAGE, "-c", "sleep 4321 & sleep 4321 & wait")
    docker.ok("exec", "-d", "s", "setsid", "sleep", "4321")

    def sleepers() -> int:
        found = docker.host.run(["pgrep", "-fx", "sleep 4321"], check=False).stdout
        return len(found.split())

    until(lambda: sleepers() == 3)
    docker.ok("rm", "-f", "s")
    until(lambda: sleepers() == 0)


def test_exit_codes_of_exec(docker: Docker) -> None:
    docker.ok(*SLEEPER)
    assert docker("exec", "s", "sh", "-c", "exit 7").returncode == 7
    absent = docker("exec", "s", "nope")
    assert (absent.returncode, "executable file not found in $PATH" in absent.stderr) == (127, True)
    assert docker("exec", "s", "/client/settings.json").returncode == 126
    assert docker("exec", "-w", "/nowhere", "s", "true").returncode == 126
    assert docker("exec", "s", "sh", "-c", "kill -9 $$").returncode == 137


def test_what_exec_gives_to_its_command(docker: Docker) -> None:
    docker.host.run(["sh", "-c", "mkdir -p /data; printf '# mine\\nA=1\\nB=2\\n' > /data/env"])
    docker.ok(*SLEEPER)
    script = 'echo "$A$B$C"; pwd; cat; echo oops >&2'
    flags = ("--env-file", "/data/env", "-e", "B=3", "-e", "C=4", "-w", "/client", "-i")
    done = docker("exec", *flags, "s", "sh", "-c", script, text="said\n")
    assert (done.stdout, done.stderr) == ("134\n/client\nsaid\n", "oops\n")
    assert docker.ok("exec", "s", "cat", text="not for you") == ""


def test_to_kill_exec_leaves_its_command_running(docker: Docker) -> None:
    docker.ok(*SLEEPER)
    began = "until docker exec s test -s /tmp/mark; do sleep 0.05; done"
    script = f"docker exec s sh -c 'echo began > /tmp/mark; sleep 2468' & {began}; kill -9 $!; wait $!"
    assert docker.host.run(["sh", "-c", script], check=False).returncode == 137
    assert docker.ok("exec", "s", "cat", "/tmp/mark") == "began\n"
    assert docker.host.run(["pgrep", "-fx", "sleep 2468"]).stdout
    assert docker("exec", "s", "pkill", "-fx", "sleep 2468").returncode == 0
    until(lambda: not docker.host.run(["pgrep", "-fx", "sleep 2468"], check=False).stdout, "it is killed")


def test_a_container_that_is_killed_ends_its_execs(docker: Docker) -> None:
    docker.ok(*SLEEPER)
    began = "until docker exec s test -e /tmp/mark; do sleep 0.05; done"
    script = f"({began}; docker kill s) & docker exec s sh -c 'touch /tmp/mark; exec sleep 1000'"
    assert docker.host.run(["sh", "-c", script], check=False).returncode == 137


def test_the_environment_of_the_caller_stays_out(docker: Docker) -> None:
    """A supervisor that ends what carries its mark must not find containers."""
    docker.host.run(["sh", "-c", "MARK=caller docker " + " ".join(SLEEPER)])
    docker.host.run(["sh", "-c", "MARK=caller docker exec -d s sleep 1357"])
    found = docker.host.run(["sh", "-c", "grep -l MARK=caller /proc/*/environ 2>/dev/null | wc -l"])
    assert found.stdout.strip() == "0"
    assert "MARK" not in docker.ok("exec", "s", "env")


def test_copying(docker: Docker) -> None:
    docker.host.run(["sh", "-c", "mkdir -p /data/a/b; echo hi > /data/a/b/c; echo one > /data/one"])
    docker.ok(*SLEEPER)
    docker.ok("cp", "/data/one", "s:/tmp")
    docker.ok("cp", "/data/a", "s:/new")
    docker.ok("cp", "/data/a/.", "s:/tmp")
    assert docker.ok("exec", "s", "cat", "/tmp/one", "/new/b/c", "/tmp/b/c") == "one\nhi\nhi\n"
    docker.ok("kill", "s")
    docker.ok("cp", "s:/new", "/data/back")
    docker.ok("cp", "s:/tmp/one", "/data/two")
    assert docker.host.run(["cat", "/data/back/b/c", "/data/two"]).stdout == "hi\none\n"
    listed = docker.host.run(["sh", "-c", "docker cp s:/new - | tar t"]).stdout
    assert "new/b/c" in listed
    missing = docker("cp", "s:/nothing", "/data")
    assert (missing.returncode, "Could not find the file /nothing in container s" in missing.stderr) == (
        1,
        True,
    )


def test_logs(docker: Docker) -> None:
    docker.ok(
        "run",
        "-d",
        "--name",
        "s",
        *SH,
        standin.IMAGE,
        "-c",
        "for n in 1 2 3; do echo $n; done; sleep 0.5; echo 4",
    )
    assert docker.ok("logs", "-f", "--tail", "2", "s").splitlines()[-1] == "4"
    assert docker.ok("logs", "--tail", "2", "s") == "3\n4\n"
    assert docker.ok("logs", "s") == "1\n2\n3\n4\n"


def test_in_the_foreground(docker: Docker) -> None:
    done = docker("run", "--rm", *SH, standin.IMAGE, "-c", "echo out; exit 3")
    assert (done.returncode, done.stdout) == (3, "out\n")
    assert docker.ok("ps", "-aq") == ""


def test_stopping_takes_its_time_when_nobody_listens(docker: Docker) -> None:
    docker.ok(
        "run",
        "-d",
        "--name",
        "s",
        "--stop-timeout",
        "1",
        *SH,
        standin.IMAGE,
        "-c",
        "while :; do sleep 1; done",
    )
    began = time.monotonic()
    docker.ok("stop", "s")
    assert time.monotonic() - began > 1
    assert docker.ok("inspect", "-f", "{{.State.ExitCode}}", "s") == "137\n"
    docker.ok("start", "s")
    docker.ok("stop", "-t", "0", "s")


def test_a_listener_ends_at_once(docker: Docker) -> None:
    script = "trap 'echo bye; exit 4' TERM; echo listens; while :; do sleep 0.1; done"
    docker.ok("run", "-d", "--name", "s", "--stop-timeout", "120", *SH, standin.IMAGE, "-c", script)
    until(lambda: docker.ok("logs", "s") == "listens\n", "the trap to be set")
    docker.ok("stop", "s")
    assert docker.ok("inspect", "-f", "{{.State.ExitCode}}", "s") == "4\n"
    assert docker.ok("logs", "s") == "listens\nbye\n"


def test_restarting(docker: Docker) -> None:
    docker.ok(
        "run", "-d", "--name", "s", "--restart", "on-failure:2", *SH, standin.IMAGE, "-c", "echo x; exit 1"
    )
    until(lambda: docker.ok("inspect", "-f", "{{.State.Status}}", "s") == "exited\n")
    assert docker.ok("logs", "s") == "x\nx\nx\n"
    assert docker.ok("inspect", "-f", "{{.RestartCount}}", "s") == "2\n"


def test_after_a_power_loss(lab: Lab, kit: Path) -> None:
    host = lab.add()[0]
    try:
        standin.equip(host, kit)
        docker = Docker(host)
        sleeps = ("--entrypoint", "sleep", standin.IMAGE, "1000")
        docker.ok("run", "-d", "--name", "gone", *sleeps)
        docker.ok("run", "-d", "--name", "back", "--restart", "unless-stopped", *sleeps)
        host.reboot()
        assert docker.ok("ps", "--format", "{{.Names}}") == "back\n"
        assert docker.ok("inspect", "-f", "{{.State.Running}} {{.State.ExitCode}}", "gone") == "false 255\n"
    finally:
        lab.remove(host)


def test_ports_are_the_hosts(docker: Docker, storage: Callable[..., None]) -> None:
    storage()
    docker.up()
    docker.await_guest()
    address = "ip addr show to 20.20.20.21"
    script = f"curl -s localhost:8006; {address}; docker exec winarena {address}"
    shown = docker.host.run(["sh", "-c", script]).stdout
    assert "noVNC" in shown
    assert shown.count("20.20.20.21/32") == 1
    taken = docker("run", "-d", "--name", "other", "-p", "5000:5000", standin.IMAGE, "-c", "true")
    assert taken.returncode == 125
    assert "Bind for 0.0.0.0:5000 failed: port is already allocated." in taken.stderr
    docker.ok("restart", "-t", "0", "winarena")
    docker.await_guest()


def test_rights_must_be_asked_for(docker: Docker, storage: Callable[..., None]) -> None:
    storage()
    flags = [flag for flag in UP if flag not in ("--cap-add", "NET_ADMIN")]
    docker.ok(*flags, standin.IMAGE, "-c", "./entry.sh")
    until(lambda: "--cap-add NET_ADMIN" in docker.ok("logs", "winarena"))


def test_without_kvm(docker: Docker, storage: Callable[..., None]) -> None:
    storage()
    flags = [flag for flag in UP if not flag.startswith("--device")]
    docker.ok(*flags, standin.IMAGE, "-c", "./entry.sh")
    until(lambda: "KVM acceleration is not available" in docker.ok("logs", "winarena"))


def test_a_private_registry(docker: Docker, kit: Path) -> None:
    reference = "arena.example.org/waa:1"
    folder = standin.publish(kit / "registry", reference, private=True, pull_s=0.3)
    settings = {"registry": str(folder.parent), "logins": {"arena.example.org": {"me": "secret"}}}
    _configure(docker, settings)
    refused = docker("pull", reference)
    assert (refused.returncode, "unauthorized: authentication required" in refused.stderr) == (1, True)
    login = ("login", "arena.example.org", "-u", "me", "--password-stdin")
    wrong = docker(*login, text="guess\n")
    assert (wrong.returncode, "unauthorized" in wrong.stderr) == (1, True)
    assert "Login Succeeded" in docker.ok(*login, text="secret\n")
    lines = docker.ok("pull", reference).splitlines()
    assert lines[0] == "1: Pulling from arena.example.org/waa"
    assert lines[-2] == f"Status: Downloaded newer image for {reference}"
    assert "Image is up to date" in docker.ok("pull", reference)
    docker.ok("rmi", reference)
    docker.ok("logout", "arena.example.org")
    _configure(docker, {"registry": str(folder.parent)})


def test_a_pull_that_breaks_off(docker: Docker, kit: Path) -> None:
    words = "error pulling image configuration: download failed after attempts=6: unexpected EOF"
    standin.publish(kit / "registry", "flaky/image:latest", pull_fails=words)
    done = docker("pull", "flaky/image")
    assert (done.returncode, done.stderr.strip()) == (1, words)
    assert docker("image", "inspect", "flaky/image").returncode == 1


def test_no_daemon(docker: Docker, kit: Path) -> None:
    _configure(docker, {"daemon": False})
    done = docker("ps")
    assert (done.returncode, "Is the docker daemon running?" in done.stderr) == (1, True)
    _configure(docker, {"registry": str(kit / "registry")})


def test_only_root(docker: Docker, lab: Lab) -> None:
    user = docker.host.users[-1]
    done = subprocess.run(
        lab.client.ssh(docker.host, "docker ps", user=user),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, "permission denied while trying to connect" in done.stderr) == (1, True)


def _configure(docker: Docker, settings: Mapping[str, object]) -> None:
    script = f"cat > {standin.ENGINE_ROOT}/engine.json"
    docker.host.run(["sh", "-c", script], text=json.dumps(settings))
