"""Windows Agent Arena: 154 tasks in Windows, one Windows a machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from evalfleet.benchmarks.files import digest
from evalfleet.benchmarks.loaded import Appliance, HostVerb, Loaded, Screen
from evalfleet.benchmarks.results import outcome_of
from evalfleet.benchmarks.steps import read_steps
from evalfleet.clock import WallClock
from evalfleet.errors import RequestError
from evalfleet.model import (
    AttemptId,
    Broken,
    Bundle,
    Cause,
    Command,
    Ended,
    KeptFiles,
    LargeFile,
    Metering,
    Micros,
    Needs,
    Outcome,
    SetupStep,
    Task,
    Trajectory,
    decodable,
)
from evalfleet.names import safe_name
from evalfleet.ports import Check, Guest

from .golden_files import golden_files
from .host.config import CONTAINER, POINTER, PORTS, SENT
from .host.iso import WHERE
from .model import check_model
from .past_results import WaaResultReader, WaaResultWriter
from .settings import (
    HERE,
    WaaSettings,
    agent_secrets,
    check,
    client_flags,
    iso_file,
    runs_models,
    secret_names,
    with_preset,
)
from .task_folder import TRAJECTORY
from .tasks import (
    ReadTasks,
    ask_for_all_programs,
    keep_licence,
    keep_list,
    licence_end,
    licence_warnings,
    read_tasks,
    task_files,
)

TIMEOUT_S = 900.0
MODEL_USD = (15.0 / 154, 100.0 / 154)
"""Of a task: a full run is said to cost $15 to $100 for the model. The client tells no prices."""
USUAL_S = {
    "libreoffice_calc": 384.0,
    "libreoffice_writer": 277.0,
    "vlc": 274.0,
    "chrome": 217.0,
    "msedge": 217.0,
    "vs_code": 197.0,
    "": 249.0,
}
"""By what people have told: 10 to 32 s a step (40 to 61 in a quarter of the spreadsheets), and 1.4 to 4.3
times the steps of a human, which are known for five domains, at most 15. Geometric means."""

STEPS = {
    "kvm": 120.0,
    "disk": 120.0,
    "room": 120.0,
    "iso": 7200.0,
    "docker": 2400.0,
    "image": 3 * 5400.0,
    "golden": 7800.0,
    "container": 600.0,
    "windows": 0.0,
}
"""Set-up, in order, with the longest that each may take; `windows` takes `boot_s`."""

MACHINE_KEYS = (
    *("image", "preset", "registry_user", "registry_password", "golden", "golden_token", "storage", "client"),
    *("version", "ram", "cores", "disk", "kvm", "data", "free_gb", "boot_s", "restart_s", "stop_s"),
)
USUAL_SETUP_S = 5400.0
INSTALL_S = 7200.0
SEND_RATE = 1_000_000.0
"""Bytes of an ISO in a second, if it is to be sent over a slow line."""
COPY_S = 900.0
PROGRAM = ("__init__.py", "task_folder.py", "task_log.py", "tracebacks.py")
FOLDER = Path(__file__).parent
NO_WINDOWS = 3


def _command(verb: str) -> tuple[str, ...]:
    """A verb of the program that set-up left there; exit code `NO_WINDOWS` where it left none."""
    enter = f'cd "$(cat {POINTER})/program"'
    program = f"{{ {enter}; }} 2>/dev/null || exit {NO_WINDOWS}; exec python3 -S -m waa.host {verb}"
    return ("sh", "-c", program)


WAA_APPLIANCE = Appliance(
    what="Windows",
    absent=NO_WINDOWS,
    verbs={
        "reset": HostVerb(
            does="bring Windows back to its golden state; what is in it now is lost",
            command=_command("reset"),
            limit_s=2 * 3600.0,
            says={0: "{machine}: Windows is as it was installed, and answers"},
        ),
        "clean": HostVerb(
            does="undo what setting up WAA left: its container, image and Windows, some 60 GB. Docker stays, "
            "and golden storage that was there before",
            command=_command("clean"),
            limit_s=3600.0,
            says={0: "{machine} is clean", NO_WINDOWS: "{machine} had nothing of WAA on it"},
            asks="delete Windows and all else of WAA",
            undoes=True,
        ),
    },
    probe=_command("answers"),
    rest=_command("rest"),
    screen=Screen(PORTS["vnc"], PORTS["guest"], "/screenshot", _command("screenshot")),
    tunnel=(PORTS["guest"] + 1, PORTS["guest"]),
    registry={"docker_container": CONTAINER},
    ready_key="waa_ready",
)


class WaaSpec(Struct, frozen=True):
    """What makes the benchmark again."""

    settings: WaaSettings
    iso: LargeFile | None = None
    """The ISO to be sent to machines, if it is a file here."""
    golden: KeptFiles | None = None
    """Golden storage to be sent to the place's storage, if it is a folder here."""


AROUND_GUEST, CLIENT_GB = 1.5, 4.0
"""So many times the guest's memory a machine must have, and so much more than it."""


class WaaBenchmark:
    """Windows Agent Arena: tasks in real Windows, in a container on machines with KVM."""

    Settings = WaaSettings
    machine_names = "waa-eval"
    appliance = WAA_APPLIANCE
    result_reader = WaaResultReader()
    result_writer = WaaResultWriter()
    steps = TRAJECTORY
    """The client's. It is copied out of the container as it grows: see `host/results.py`."""

    def __init__(
        self,
        settings: WaaSettings,
        *,
        model: str = "",
        agent: Mapping[str, str] | None = None,
        iso: LargeFile | None = None,
        golden: KeptFiles | None = None,
    ) -> None:
        self._settings = with_preset(settings)
        self._model = model
        self._iso, self._golden = iso, golden
        self._flags = client_flags(self._settings, model, agent or {})

    def read_steps(self, data: bytes) -> Trajectory:
        """Its lines have `step_num`, `action_timestamp`, `action`, `screenshot_file`; the last may be an
        `Error`."""
        return read_steps(data)

    @classmethod
    def load(cls, name: str, settings: WaaSettings, base: Path, home: Path) -> Loaded:
        settings = with_preset(settings)
        check(settings, f"benchmark {name!r}")
        iso = iso_file(settings, base, f"benchmark {name!r}")
        golden = golden_files(settings, base, home, f"benchmark {name!r}")
        ready_s = settings.restart_s + settings.boot_s + COPY_S
        found, missing = ReadTasks((), ()), ""
        try:
            files = task_files(settings, base, home)
            found = read_tasks(files, settings.task_list, settings.diff_lvl == "hard", TIMEOUT_S, ready_s)
        except RequestError as err:
            missing = str(err)
        install_s = 0.0 if settings.golden else INSTALL_S
        return Loaded(
            name=name,
            spec=msgspec.to_builtins(WaaSpec(settings, iso, golden)),
            tasks=found.tasks,
            tasks_missing=missing,
            secrets=secret_names(settings),
            files=tuple(FOLDER / each for each in PROGRAM),
            warnings=(*found.warnings, *licence_warnings(home, settings.golden, WallClock().now())),
            setup_s=USUAL_SETUP_S + settings.boot_s + install_s + (iso.bytes / SEND_RATE if iso else 0.0),
            setup_missing=_setup_missing(settings),
            model_usd=MODEL_USD,
            usual_s=USUAL_S,
            isolation="own",  # a container each, with a virtual machine in it
            settle=ask_for_all_programs,
            model_urls={"OPENAI_API_KEY": settings.base_url} if settings.base_url else {},
            in_containers=True,
        )

    @classmethod
    def from_spec(
        cls, spec: Mapping[str, Any], *, model: str, agent: Mapping[str, str], settings: Mapping[str, str]
    ) -> WaaBenchmark:
        made = msgspec.convert(spec, decodable(WaaSpec))
        return cls(made.settings, model=model, agent=agent, iso=made.iso, golden=made.golden)

    @property
    def name(self) -> str:
        return "waa"

    @property
    def needs(self) -> Needs:
        cpus, memory_gb = (8, 32.0) if runs_models(self._settings) else (4, 16.0)
        memory_gb = max(memory_gb, self._least_memory_gb())
        # set-up itself insists on what a run cannot do without: memory, room and KVM
        return Needs(cpus, memory_gb, self._settings.machine_disk_gb, self._settings.kvm, strict=False)

    @property
    def guest(self) -> Guest:
        """Windows, of which the benchmark itself knows all there is to know."""
        return self

    @property
    def least_needs(self) -> Needs:
        """The guest's own, 4 GB for the client and the system around it, and what set-up insists on."""
        needs, insisted_gb = self.needs, self._least_memory_gb()
        return msgspec.structs.replace(
            needs,
            cpus=min(needs.cpus, max(2, self._settings.cores)),
            memory_gb=max(insisted_gb, insisted_gb / AROUND_GUEST + CLIENT_GB),
        )

    async def examine(self, secrets: Mapping[str, str], metering: Metering | None = None) -> Sequence[Check]:
        """One cheap call to the model's API."""
        return await check_model(self._settings, self._model, secrets, metering)

    # -- on the machine --------------------------------------------------------------------------

    @cached_property
    def bundle(self) -> Bundle:
        names = [*PROGRAM, *sorted(f"host/{path.name}" for path in FOLDER.glob("host/*.py"))]
        files = {f"waa/{name}": str(FOLDER / name) for name in names}
        steps = tuple(
            SetupStep(
                name,
                self._command(name, *self._step_secrets(name)),
                limit_s or self._settings.boot_s + 60,
                self._iso if name == "iso" else None,
                self._golden if name == "golden" else None,
            )
            for name, limit_s in STEPS.items()
        )
        return Bundle(digest(FOLDER, names, steps), files, steps)

    @property
    def probe(self) -> Command | None:
        return self._command("probe")

    @property
    def list_tasks(self) -> Command:
        return self._command("tasks")

    def keep_tasks(self, listed: bytes, home: Path) -> None:
        keep_list(home, self._settings.image, listed)
        keep_licence(home, self._settings.golden, listed)

    def good_until(self, listed: bytes) -> Micros | None:
        return licence_end(listed)

    def command(self, task: Task, attempt: AttemptId) -> Command:
        settings = self._settings
        order: dict[str, Any] = {
            "attempt": safe_name(attempt),
            "domain": task.domain,
            "task": task.id,
            "limit_s": task.timeout_s,
            "lately_s": settings.lately_s,
            "fresh": settings.fresh == "each",
            "programs": task.params.get("programs", {}) if settings.programs == "needed" else {},
            "model": self._model,
            "action_space": settings.action_space,
            "observation_type": settings.observation_type,
            "marks_from_tree": settings.som_origin == "a11y",
            "flags": self._flags,
            "secrets": agent_secrets(settings),
            "environ": [f"OPENAI_BASE_URL={settings.base_url}"] if settings.base_url else [],
        }
        command = self._command("attempt", *agent_secrets(settings))
        env = {**command.env, "EVALFLEET_WAA_ATTEMPT": msgspec.json.encode(order).decode()}
        return msgspec.structs.replace(command, env=env)

    def outcome(self, task: Task, ended: Ended, healthy: bool) -> Outcome:
        if ended.reason == "timed_out" and ended.result is None:
            # the client's own limit was kept on the machine: it was not the agent that took so long
            return Broken(Cause.STUCK, f"Windows was not made ready in time: {ended.detail.strip()[-1000:]}")
        return outcome_of(task, ended, healthy)

    def _command(self, verb: str, *secrets: str) -> Command:
        argv = ("python3", "-S", "-m", "waa.host", verb)  # -S: what is installed there is not needed
        return Command(argv, {"EVALFLEET_WAA": msgspec.json.encode(self._machine()).decode()}, secrets)

    def _machine(self) -> dict[str, Any]:
        """What shapes a machine. Not in it: what may differ from run to run on the same machine."""
        told = {key: getattr(self._settings, key) for key in MACHINE_KEYS}
        iso, file = self._settings.iso, self._iso
        if file is not None:
            iso = f"sent:{file.name}:{-(-file.bytes // file.part_bytes)}:{file.bytes}"
        if self._golden is not None:
            told["golden"] = f"{SENT}{self._golden.name}"
        return {**told, "iso": iso, "memory_gb": self._least_memory_gb()}

    def _least_memory_gb(self) -> float:
        """The guest's, and what is left for the client. More is asked of places than is insisted on."""
        guest, unit = int(self._settings.ram[:-1]), self._settings.ram[-1]
        return guest * (1.0 if unit == "G" else 1 / 1024) * AROUND_GUEST

    def _step_secrets(self, step: str) -> tuple[str, ...]:
        named = {"image": self._settings.registry_password, "golden": self._settings.golden_token}
        return tuple(filter(None, (named.get(step),)))


def _setup_missing(settings: WaaSettings) -> str:
    if settings.golden.startswith(HERE):
        return (
            f"golden={settings.golden} is sent to a place's storage by `evalfleet pool prepare POOL waa`: "
            "make a pool, prepare it, and say --pool POOL"
        )
    if settings.golden or settings.iso or settings.preset != "original":
        return ""
    return (
        f"{settings.image} holds no Windows and downloads none: {WHERE}. Where the machines have Windows "
        "already, from an image or an earlier set-up, say --set golden=machine"
    )
