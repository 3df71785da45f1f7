"""HAL's agents in containers: images of a registry that demands a token, and what becomes of that."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from evalfleet.benchmarks.containers import ContainerSettings, image_step
from evalfleet.events import AttemptStarted, MachineRequested
from evalfleet.model import FAILS_EVERYWHERE
from standins.podman import LIMITS, Podman, lacking, podman_with
from standins.registry import USER, Registry, registry
from standins.waa import rootfs
from tests.e2e.harness import Fleet, processes
from tests.e2e.test_hal import Hal
from tests.folders import below
from tests.planted import UNIQUE, holding, processes_holding
from tests.waiting import PATIENCE_S, until


@pytest.fixture
def hal(fleet: Fleet) -> Hal:
    return Hal(fleet)


ENGINE = """#!/bin/sh
printf '%s\\n' "$*" >> "{folder}/asked"
case $1 in
  version) exit 0 ;;
  image) exit 1 ;;
  pull) (cat "$DOCKER_CONFIG/config.json"; stat -c %a "$DOCKER_CONFIG") > "{folder}/login" ;;
  run)
    while [ "$1" != {image} ]; do shift; done
    shift
    exec "$@" ;;
esac
"""


def test_an_image_is_pulled_with_a_token_that_no_agent_sees(
    fleet: Fleet, hal: Hal, say: Callable[..., str]
) -> None:
    image = "europe-docker.pkg.dev/project/agents/quiz"
    (fleet.folder / "bin").mkdir()
    engine = fleet.folder / "bin/docker"
    engine.write_text(ENGINE.format(folder=fleet.folder, image=image), "utf-8")
    engine.chmod(0o755)
    fleet.environ |= {
        "PATH": f"{engine.parent}:{fleet.environ['PATH']}",
        "REGISTRY_TOKEN": "ya29.short-lived",
    }
    fleet.forks = True
    quiz = hal.repo / "agents/quiz/main.py"
    show = "    with open('env.json', 'w') as file: json.dump(dict(os.environ), file)\n    do = "
    quiz.write_text(quiz.read_text("utf-8").replace("    do = ", show), "utf-8")
    words = hal.words("--task", "right", "--task", "wrong", f"--set=image={image}", agent_python="")
    with_token = (*words, "--set=image_token=REGISTRY_TOKEN")
    done = fleet(*with_token, "--json")
    assert done.code == 0, done
    login, mode = (fleet.folder / "login").read_text("utf-8").splitlines()[0].rsplit("}", 1)
    assert mode == "700"
    assert json.loads(login + "}")["auths"] == {
        "europe-docker.pkg.dev": {"auth": b64encode(b"oauth2accesstoken:ya29.short-lived").decode()}
    }
    asked = (fleet.folder / "asked").read_text("utf-8")
    assert [line.count(" ") for line in asked.splitlines() if line.startswith("pull")] == [1]
    assert "ya29" not in asked
    seen = hal.read("right", "task/env.json")
    assert seen.get("EVALFLEET_OUT")
    assert not any("ya29" in value or "REGISTRY" in name for name, value in seen.items())
    shared = [word for word in with_token if not word.startswith("--set=image=")]
    assert "image_token needs an image of a registry" in say(*shared, code=2)
    assert "not for agents" in say(*with_token, "--set=secrets=REGISTRY_TOKEN", code=2)


# -- a real engine, and a registry -------------------------------------------------------------------

PROGRAMS = ("sh", "cat", "/usr/bin/python3")
CANNOT = lacking(PROGRAMS)
real = pytest.mark.skipif(CANNOT is not None, reason=f"NO TEST WITH A REAL CONTAINER ENGINE: {CANNOT}")
TOKEN = f"ya29.a0Af-{UNIQUE}"
"""What `gcloud auth print-access-token` prints begins so."""
MARKS = (TOKEN, *(b64encode(text.encode()).decode() for text in (TOKEN, f"{USER}:{TOKEN}")))
"""It, and how it is written in a file that keeps a login."""
IMAGE, BARE, ABSENT, FOREIGN = (f"project/agents/{name}" for name in ("quiz", "bare", "none", "foreign"))
SEARCH = """
import glob

def search(marks):
    found = [name for name, value in os.environ.items() if any(mark in value.encode() for mark in marks)]
    paths = glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline")
    for folder, folders, names in os.walk("/"):
        folders[:] = [name for name in folders if os.path.join(folder, name) not in ("/proc", "/sys", "/dev")]
        paths += [os.path.join(folder, name) for name in names]
    for path in paths:
        try:
            with open(path, "rb") as file:
                data = file.read()
        except OSError:
            continue
        found += [path] * any(mark in data for mark in marks)
    return found, len(paths)

def run(input, dekram, **kwargs):
    if "right" in input:
        marks = [mark[::-1].encode() for mark in dekram]
        assert len(marks) == 3
        found, looked_at = search(marks)
        with open("planted", "wb") as file:
            file.write(marks[0])
        json.dump({"found": found, "planted": search(marks)[0], "looked_at": looked_at}, open("s.json", "w"))
        os.remove("planted")
        open("waiting", "w").close()
        while not os.path.exists("go"):
            time.sleep(0.05)
    return answer(input, **kwargs)
"""
"""An agent that looks for what it must not see, given to it backwards, and waits before it answers."""


class Images:
    """A real podman that pulls from a registry of the test's own, on loopback."""

    def __init__(self, podman: Podman, registry: Registry) -> None:
        self.podman, self.registry = podman, registry
        rootfs.write_rootfs(podman.folder / "bare.tar", podman.folder / "files", ("sh",))
        podman.ok("import", "-q", str(podman.folder / "bare.tar"), "localhost/bare")
        for image, name in ((IMAGE, "tiny"), (BARE, "bare")):
            registry.images[image] = podman.folder / name
            podman.ok("save", "-q", "--format", "oci-dir", "-o", str(registry.images[image]), name)
            podman.ok("rmi", f"localhost/{name}")
        registry.passwords[TOKEN] = (IMAGE, BARE, ABSENT)
        conf = podman.folder / "registries.conf"
        conf.write_text(f'[[registry]]\nlocation = "{registry.address}"\ninsecure = true\n')
        limits = (*LIMITS, *podman.grouped, "--network=none")
        podman.write_program(podman.folder / "bin/podman", limits, CONTAINERS_REGISTRIES_CONF=str(conf))


@pytest.fixture(scope="module")
def images() -> Iterator[Images]:
    """To make it takes longer than a test does: none is marked as slow, or each would have another worker."""
    with podman_with(PROGRAMS) as podman, registry() as served:
        yield Images(podman, served)


class InImages:
    """Runs of the quiz by an agent that looks around, in images of the registry."""

    def __init__(self, fleet: Fleet, hal: Hal, images: Images) -> None:
        folder = images.podman.folder / "bin"
        (folder / "docker").write_text("#!/bin/sh\nexit 1\n")
        (folder / "docker").chmod(0o755)
        fleet.environ |= {"PATH": f"{folder}:{fleet.environ['PATH']}", "REGISTRY_TOKEN": TOKEN}
        quiz = hal.repo / "agents/quiz/main.py"
        quiz.write_text(quiz.read_text("utf-8").replace("def run(", "def answer(") + SEARCH, "utf-8")
        self.fleet, self.hal, self.images = fleet, hal, images

    def words(self, image: str, name: str, token: str = "REGISTRY_TOKEN") -> list[str]:
        given = self.hal.words("--task", "right", "--task", "crash", "--set=image_token=" + token)
        given[given.index("r")] = name
        more = (f"--set=image={self.images.registry.name(image)}", "-A", "dekram=" + ",".join(MARKS)[::-1])
        return [*(word for word in given if "agent_python" not in word), *more]

    def waiting(self) -> Path:
        """The work directory of the agent that has looked around, once it has."""
        machines = self.fleet.home / ".machines"
        waiting = until(lambda: [path for path in below(machines) if path.match("hal_work/waiting")])
        return waiting[0].parent


@pytest.fixture
def in_images(fleet: Fleet, hal: Hal, images: Images) -> InImages:
    return InImages(fleet, hal, images)


def in_containers(podman: Podman) -> dict[int, str]:
    """Processes in containers of this engine, by their command lines. Other tests may have some, too."""
    found: dict[int, str] = {}
    for pid, argv, _ in processes():
        with suppress(OSError):
            inside = os.readlink(f"/proc/{pid}/ns/pid") != os.readlink("/proc/self/ns/pid")
            if inside and f"/{podman.group}/" in Path(f"/proc/{pid}/cgroup").read_text():
                found[pid] = argv
    return found


@real
def test_agents_run_unchanged_in_an_image_whose_registrys_token_they_never_see(
    fleet: Fleet, hal: Hal, in_images: InImages
) -> None:
    served = in_images.images.registry
    served.failures = 1  # it is busy at first, which is no reason to give up
    run = fleet.start(*in_images.words(IMAGE, "r"))
    work = in_images.waiting()
    inside = in_containers(in_images.images.podman)
    agents = {pid for pid, argv in inside.items() if "run_agent.py" in argv}
    assert agents
    # the agent itself was told backwards what to look for
    assert not processes_holding(TOKEN, set(inside) - agents)
    assert set(processes_holding(TOKEN, agents)) == agents
    (work / "go").touch()
    assert run.wait().code == 0
    assert [fleet.task(name)["score"] for name in ("right", "crash")] == [1.0, 0.0]
    looked = hal.read("right", "task/s.json")
    assert looked["found"] == []
    assert looked["looked_at"] > 500
    assert looked["planted"]  # it would have been seen
    assert set(hal.read("right", "task/input.json")) == {"right"}
    assert hal.read("right", "task/output.json") == {"right": "5"}
    assert (hal.out("crash") / "task/error.log").read_text("utf-8").startswith("ERROR: the agent's own fault")
    statuses = [line.rpartition(" ")[2] for line in served.asked if "manifests/latest" in line]
    assert statuses == ["503", "200"]
    # neither the run's files nor podman's have it, nor the folders where a login would be kept
    folders = (fleet.folder, in_images.images.podman.folder, Path("/run/containers"))
    for folder in (*folders, *(Path.home() / name for name in (".docker", ".config/containers"))):
        assert not holding(folder, *MARKS)
    fleet.settled()


@real
def test_what_no_other_machine_would_do_better_is_told_in_one_line(images: Images, tmp_path: Path) -> None:
    def refused(image: str, told: str, token: str = "REGISTRY_TOKEN", value: str = TOKEN) -> None:
        name = images.registry.name(image)
        step = image_step(ContainerSettings("podman"), [name], token, USER, program="python3")
        environ = {"PATH": f"{images.podman.folder}/bin:{os.defpath}", "REGISTRY_TOKEN": value}
        done = subprocess.run(
            step.command.argv, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert done.returncode == FAILS_EVERYWHERE, done
        assert told.format(name) in done.stdout.splitlines()[-1]
        assert value not in done.stdout + done.stderr

    refused(ABSENT, "the registry has no image {}: push it")
    refused(FOREIGN, "the owner of the token in REGISTRY_TOKEN has no right to pull {}")
    refused(FOREIGN, "the registry wants a login for {}, and there is none: log in to it there", token="")
    refused(BARE, "image {} has no python3 that can be run")
    refused("No Name", "{} cannot be the name of an image")
    images.podman("rmi", "-f", images.registry.name(IMAGE))
    refused(IMAGE, "the registry does not accept the token in REGISTRY_TOKEN", value="ya29.earlier")


@real
@pytest.mark.nightly
def test_an_expired_token_ends_the_run_at_once_and_a_new_one_lets_it_go_on(
    fleet: Fleet, images: Images, in_images: InImages
) -> None:
    images.podman("rmi", "-f", images.registry.name(IMAGE))
    fleet.environ["REGISTRY_TOKEN"] = "ya29.earlier"
    done = fleet(*in_images.words(IMAGE, "r"), "--exclude", "right")
    assert done.code == 4, done
    assert "the token in REGISTRY_TOKEN, which may have expired: put a new one there and resume" in done.out
    kinds = [type(record.event) for record in fleet.records("r")]
    assert AttemptStarted not in kinds
    assert kinds.count(MachineRequested) == 1
    fleet.environ["REGISTRY_TOKEN"] = TOKEN
    again = fleet("resume", "r")
    assert again.code == 0, again
    assert fleet.task("crash")["error"] == "ERROR: the agent's own fault"
    fleet.settled()
    until(lambda: not images.podman.ok("ps", "-aq"), lambda: images.podman.ok("ps", "-a"))


APT = """#!/bin/sh
echo "$*" >> {folder}/asked
case $* in *install*) /bin/ln -s {folder}/engine {folder}/bin/podman ;; esac
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="it mounts a folder: needs root")
def test_a_plain_machine_of_a_cloud_gets_podman_and_that_of_a_person_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("sh", "id", "env", "awk", "tee", "tail", "rm", "timeout", "cat"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name) or "")
    for path, text in (("bin/apt-get", APT.format(folder=tmp_path)), ("engine", "#!/bin/sh\nexit 0\n")):
        (tmp_path / path).write_text(text, "utf-8")
        (tmp_path / path).chmod(0o755)
    argv = image_step(ContainerSettings(), ["any/image"]).command.argv

    def prepare(*mounts: str) -> subprocess.CompletedProcess[str]:
        script = "; ".join((*mounts, f"export PATH={tmp_path}/bin", 'exec "$@"'))
        words = ["unshare", "--mount", "sh", "-ec", script, "sh", *argv]
        return subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)

    without = prepare("mount -t tmpfs none /var/lib")
    assert without.returncode == 1
    assert without.stdout == "neither docker nor podman works here: install one\n"
    assert not (tmp_path / "asked").exists()
    done = prepare("mount -t tmpfs none /var/lib", "mkdir -p /var/lib/cloud/instance")
    assert done.returncode == 0, done
    assert "apt-get installs podman" in done.stdout
    update, install = (tmp_path / "asked").read_text("utf-8").splitlines()
    assert update.endswith(" update")
    assert " install podman " in install
    assert (tmp_path / ".container-engine").read_text("utf-8") == "podman\n"
