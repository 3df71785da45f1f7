"""What `--set` may say to Windows Agent Arena, and how it becomes flags of its client."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from evalfleet.errors import RequestError
from evalfleet.model import LargeFile
from evalfleet.names import hint

from .host.config import ON_MACHINE
from .host.iso import PART_BYTES, problem_of

Origin = Literal["oss", "a11y", "mixed-oss", "omni", "mixed-omni"]
TREE_ORIGINS = ("a11y", "mixed-oss", "mixed-omni")
"""Origins of marks that need the accessibility tree."""
Observation = Literal["screenshot", "a11y_tree", "screenshot_a11y_tree", "som"]
Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=1)]

CLIENT_FLAGS = (
    "som_origin",
    "a11y_backend",
    "observation_type",
    "action_space",
    "screen_width",
    "screen_height",
    "max_steps",
    "max_trajectory_length",
    "temperature",
    "top_p",
    "max_tokens",
    "sleep_after_execution",
    "diff_lvl",
    "emulator_ip",
)
"""Settings that are flags of the client by the same name. It swallows what it does not know."""
OUR_FLAGS = (
    *("agent_name", "model", "domain", "test_all_meta_path", "result_dir", "trial_id"),
    *("worker_id", "num_workers"),
)
"""The client's flags that a run sets itself."""
FREE_FLAGS = ("headless", "test_config_base_dir", "stop_token")
"""The client's flags that nothing here sets: an agent of one's own may want them."""
UNUSED_BY_NAVI = ("screen_width", "screen_height", "max_trajectory_length", "top_p", "max_tokens")

_SECRET = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_SIZE = re.compile(r"[1-9][0-9]*[MG]")
_AGENT = re.compile(r"[A-Za-z0-9_.-]{1,60}")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/@+-]*")
_CHECKED_URL = re.compile(r"https?://[^\s#?]+#sha256=[0-9a-fA-F]{64}")
HERE = "here:"
"""What `golden` begins with that is a folder of this computer."""
_SAMPLES = 64
_HOST_PATH = re.compile(r"[/~][^\s:]+")


class WaaSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of `[benchmarks.waa]` and of `--set`."""

    waa: Annotated[
        str,
        Meta(
            description="a checkout of WindowsAgentArena; default: WindowsAgentArena beside evalfleet.toml, "
            "else the list of tasks that a prepared machine told"
        ),
    ] = ""
    task_list: Annotated[str, Meta(description="which of its lists, such as test_all or test_small")] = (
        "test_all"
    )
    agent: Annotated[str, Meta(description="the client's agent")] = "navi"
    som_origin: Annotated[Origin, Meta(description="where marks on the screen come from")] = "oss"
    a11y_backend: Annotated[Literal["uia", "win32"], Meta(description="win32 is faster, uia sees more")] = (
        "uia"
    )
    observation_type: Annotated[Observation, Meta(description="what the agent is shown")] = "a11y_tree"
    action_space: Annotated[str, Meta(description="how the agent acts")] = "pyautogui"
    screen_width: Annotated[
        int, Meta(ge=1, description="the screen's, in pixels, for a client of your own; navi looks itself")
    ] = 1920
    screen_height: Annotated[int, Meta(ge=1, description="the same, of its height")] = 1200
    max_steps: Annotated[int, Meta(ge=1, le=1000, description="of an agent in a task")] = 15
    max_trajectory_length: Count = 3
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Share = 0.9
    max_tokens: Count = 1500
    sleep_after_execution: Annotated[float, Meta(ge=0, description="seconds after each action")] = 3.0
    diff_lvl: Annotated[Literal["normal", "hard"], Meta(description="hard: tasks start without set-up")] = (
        "normal"
    )
    emulator_ip: Annotated[
        str, Meta(description="the guest, seen from the container; default: the preset's")
    ] = ""
    fresh: Annotated[
        Literal["broken", "each"], Meta(description="Windows is reset after a broken attempt, or before each")
    ] = "broken"
    programs: Annotated[
        Literal["needed", "any"],
        Meta(description="needed: a task whose programs Windows lacks is broken at once; any: it is tried"),
    ] = "needed"
    api: Annotated[
        Literal["openai", "azure", "none"],
        Meta(description="whose key the agent needs: OPENAI_API_KEY, AZURE_API_KEY and AZURE_ENDPOINT, none"),
    ] = "openai"
    base_url: Annotated[str, Meta(description="of an API like OpenAI's; default: OpenAI's own")] = ""
    secrets: Annotated[tuple[str, ...], Meta(description="more variables that the agent needs, by name")] = ()
    preset: Annotated[
        Literal["original", "waa-auto"],
        Meta(
            description="which image yours is like: WAA's own, or openadapt's that downloads Windows itself; "
            "says how it is started, and the defaults of image, version, emulator_ip, ram and disk"
        ),
    ] = "original"
    image: Annotated[str, Meta(description="the container image; default: the preset's")] = ""
    client: Annotated[
        str,
        Meta(
            description="a folder on the machine that takes the place of the image's client, with your agent"
        ),
    ] = ""
    registry_user: Annotated[str, Meta(description="who logs in to the image's registry")] = ""
    registry_password: Annotated[str, Meta(description="the variable that holds the password")] = ""
    golden: Annotated[
        str,
        Meta(
            description="Windows, installed: a folder or a .qcow2, as a URL or a path on the machine; "
            "here:PATH: a folder of this computer, which `pool prepare` sends to azure_ml's datastore once; "
            "`machine`: an image or an earlier set-up left it there; default: it is installed there"
        ),
    ] = ""
    golden_token: Annotated[str, Meta(description="the variable that holds the URL's token (SAS)")] = ""
    storage: Annotated[
        Literal["overlay", "copy"],
        Meta(description="what the container works on: a thin layer over golden, or a whole copy of it"),
    ] = "overlay"
    iso: Annotated[
        str,
        Meta(
            description="what Windows is installed from: a path here, host:PATH on the machine, or "
            "URL#sha256=CHECKSUM"
        ),
    ] = ""
    version: Annotated[str, Meta(description="of Windows, as the image calls it; default: the preset's")] = ""
    ram: Annotated[str, Meta(description="the guest's memory; default: the preset's, 8G")] = ""
    cores: Annotated[int, Meta(ge=0, le=256, description="the guest's; 0: what the machine has, up to 8")] = 0
    disk: Annotated[str, Meta(description="the guest's disk; default: the preset's, 30G or 64G")] = ""
    kvm: Annotated[bool, Meta(description="false: software emulation, which is slower by far")] = True
    data: Annotated[str, Meta(description="the folder on the machine that keeps Windows")] = "~/evalfleet-waa"
    free_gb: Annotated[float, Meta(ge=0, description="what must be free before all is there")] = 80.0
    machine_disk_gb: Annotated[float, Meta(ge=0, description="the machine's disk")] = 128.0
    boot_s: Annotated[float, Meta(gt=0, description="the longest that Windows may take to boot")] = 1500.0
    restart_s: Annotated[float, Meta(gt=0, description="the same, after a restart of its container")] = 420.0
    stop_s: Annotated[int, Meta(ge=0, description="what Windows has to shut down before it is cut off")] = 45
    lately_s: Annotated[
        float,
        Meta(gt=0, description="a task at its limit without a step for so long is stuck, not the agent's"),
    ] = 300.0


PRESETS: Mapping[str, Mapping[str, str]] = {
    "original": {
        "image": "windowsarena/winarena:latest",
        "version": "win11x64-enterprise-eval",
        "emulator_ip": "20.20.20.21",
        "ram": "8G",
        "disk": "30G",
    },
    "waa-auto": {
        "image": "waa-auto:latest",
        "version": "11e",
        "emulator_ip": "172.30.0.2",
        "ram": "8G",
        "disk": "64G",
    },
}


def with_preset(settings: WaaSettings) -> WaaSettings:
    """What was left open, as the preset has it."""
    usual = PRESETS[settings.preset]
    return replace(settings, **{key: getattr(settings, key) or value for key, value in usual.items()})


def check(settings: WaaSettings, where: str) -> None:
    """What types cannot say. Raises RequestError."""
    names = (*settings.secrets, settings.registry_password, settings.golden_token)
    if any(name and not _SECRET.fullmatch(name) for name in names):
        # The value itself may have been written here by mistake: it is not shown.
        raise RequestError(
            f"{where}: secrets, registry_password and golden_token are names of variables, never values"
        )
    if not _AGENT.fullmatch(settings.agent):
        raise RequestError(f"{where}: agent is {settings.agent[:80]!r}; write its name, such as navi")
    for key in ("ram", "disk"):
        if not _SIZE.fullmatch(getattr(settings, key)):
            raise RequestError(f"{where}: {key} is {getattr(settings, key)!r}; write a size such as 8G")
    _check_words(settings, where)
    if settings.registry_password and not settings.registry_user:
        raise RequestError(f"{where}: registry_password needs registry_user; give both or neither")
    _check_golden(settings, where)
    _check_client(settings, where)


def _check_client(settings: WaaSettings, where: str) -> None:
    """What the client of the presets' images cannot do. One of your own may."""
    if settings.client or settings.image not in {preset["image"] for preset in PRESETS.values()}:
        return
    if settings.agent != "navi":
        raise RequestError(
            f"{where}: agent is {settings.agent!r}, and the client of {settings.image} starts with no other "
            "than navi; give an image that has your agent with --set image=NAME, or a folder of the machine "
            "with --set client=PATH"
        )
    if settings.observation_type == "screenshot" and settings.som_origin in TREE_ORIGINS:
        raise RequestError(
            f"{where}: som_origin is {settings.som_origin!r}, which takes marks from the accessibility tree, "
            "and with observation_type 'screenshot' the client fetches none; say observation_type=a11y_tree, "
            "or som_origin=oss"
        )
    usual = WaaSettings()
    for key in UNUSED_BY_NAVI:
        if getattr(settings, key) != getattr(usual, key):
            what = f"{key} is {getattr(settings, key)}, and navi of {settings.image} never uses it"
            raise RequestError(f"{where}: {what}; leave it out")
    if settings.api == "azure":
        raise RequestError(
            f"{where}: api is 'azure', and navi of {settings.image} asks OpenAI's API alone; say api=openai "
            "and base_url=https://NAME.openai.azure.com/openai/v1, with the key in OPENAI_API_KEY"
        )


def _check_words(settings: WaaSettings, where: str) -> None:
    """What becomes a word of a command line, or a folder."""
    if not _WORD.fullmatch(settings.image):
        what = f"image is {settings.image[:80]!r}, which is no name of an image"
        raise RequestError(f"{where}: {what}; write one such as windowsarena/winarena:latest")
    for key in ("version", "emulator_ip", "action_space"):
        value = getattr(settings, key)
        if not _WORD.fullmatch(value) or (key == "action_space" and "/" in value):
            raise RequestError(f"{where}: {key} is {value[:80]!r}; write a name without spaces")
    for key in ("data", "client"):
        path = getattr(settings, key)
        if not _HOST_PATH.fullmatch(path) and (path or key == "data"):
            raise RequestError(
                f"{where}: {key} is {path[:80]!r}; write an absolute path on the machine, or one that starts "
                "with ~/, without spaces and colons"
            )
    if settings.base_url and not settings.base_url.startswith(("https://", "http://")):
        raise RequestError(f"{where}: base_url is {settings.base_url[:80]!r}; write one with https://")


def check_model_name(model: str) -> None:
    """The client makes folders of it, some with slashes in it. Raises RequestError."""
    odd = model.startswith("-") or any(part in ("", ".", "..") for part in model.split("/"))
    if model and (odd or not model.isprintable()):
        raise RequestError(f"--model {model[:80]!r} is no name of a model; write one such as gpt-4o")


def _check_golden(settings: WaaSettings, where: str) -> None:
    golden = settings.golden
    if not golden:
        return
    if golden.startswith(("https://", "http://")):
        if "?" in golden:
            raise RequestError(
                f"{where}: the URL of golden has a token in it, which would be written down: put what is "
                "after the '?' into a variable, and give golden_token=NAME"
            )
    elif not golden.startswith(("/", "~", HERE)) and golden != ON_MACHINE:
        raise RequestError(
            f"{where}: golden is {golden[:80]!r}; write a URL or an absolute path on the machine, {HERE}PATH "
            f"for a folder on this computer, or {ON_MACHINE} if Windows is there already"
        )


def iso_file(settings: WaaSettings, base: Path, where: str) -> LargeFile | None:
    """The ISO, if it is a file here that is to be sent. Raises RequestError for one that cannot be used."""
    iso = settings.iso
    if iso.startswith(("https://", "http://")):
        if not _CHECKED_URL.fullmatch(iso):
            raise RequestError(
                f"{where}: iso is {iso[:80]!r}; write its checksum after it: URL#sha256=64 HEX DIGITS"
            )
        return None
    if iso.startswith("host:"):
        if not _HOST_PATH.fullmatch(iso.removeprefix("host:")):
            raise RequestError(
                f"{where}: iso is {iso[:80]!r}; write host: and an absolute path, without spaces"
            )
        return None
    if not iso:
        return None
    path = (base / Path(iso).expanduser()).resolve()
    if problem := problem_of(str(path)):
        raise RequestError(
            f"{where}: iso: {path} {problem}; name an ISO with Windows on it, or say host:PATH for one that "
            "is on the machine"
        )
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:  # enough to tell one from another, without reading gigabytes each time
        for block in range(_SAMPLES):
            file.seek(size * block // _SAMPLES)
            digest.update(file.read(1 << 16))
    return LargeFile(f"iso-{digest.hexdigest()[:16]}", str(path), size, PART_BYTES)


def secret_names(settings: WaaSettings) -> tuple[str, ...]:
    """All that a run needs: the agent's, the registry's, the golden storage's."""
    others = (settings.registry_password, settings.golden_token)
    return tuple(dict.fromkeys((*agent_secrets(settings), *filter(None, others))))


def agent_secrets(settings: WaaSettings) -> tuple[str, ...]:
    api = {"openai": ("OPENAI_API_KEY",), "azure": ("AZURE_API_KEY", "AZURE_ENDPOINT"), "none": ()}
    return tuple(dict.fromkeys((*api[settings.api], *settings.secrets)))


def runs_models(settings: WaaSettings) -> bool:
    """Does the agent run models of its own on the machine? They take memory: 16 GB are not enough."""
    return settings.agent != "navi" or settings.som_origin != "a11y"


def client_flags(settings: WaaSettings, model: str, agent: Mapping[str, str]) -> list[str]:
    """The client's real flags, but for those of one attempt. Raises RequestError."""
    check_model_name(model)
    flags = ["--agent_name", settings.agent, "--model", model]
    for name in CLIENT_FLAGS:
        value = getattr(settings, name)
        flags += [f"--{name}", f"{value:g}" if isinstance(value, float) else str(value)]
    for name, value in agent.items():
        if settings.agent == "navi":
            options = (*CLIENT_FLAGS, "agent")
            raise RequestError(f"-A {name!r} is nothing that navi takes; use --set: {hint(name, options)}")
        _check_argument(name)
        flags += [f"--{name}", value]
    return flags


def _check_argument(name: str) -> None:
    """Raises RequestError for an agent's argument that the client would take for another flag.

    It takes the beginning of a flag's name for the flag.
    """
    meant = next((flag for flag in (*CLIENT_FLAGS, *OUR_FLAGS, *FREE_FLAGS) if flag.startswith(name)), "")
    if not meant or (meant == name and meant in FREE_FLAGS):
        return
    remedy = f"use --set {meant}=VALUE" if meant in CLIENT_FLAGS else "write another name"
    raise RequestError(f"-A {name!r}: the client takes it for its own flag --{meant}; {remedy}")
