"""Where WAA's list of tasks is: a checkout, a saved image, a machine of the pool, the image's registry."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec

from evalfleet.benchmarks.loaded import Machines, Outside
from evalfleet.errors import RequestError
from evalfleet.images.manifests import DIGEST
from evalfleet.images.reference import Reference, parse
from evalfleet.images.streams import Unreadable, Window
from evalfleet.toml_tables import reason

from .files import FOLDER, LIST, Folder, Held, TaskFiles, held, interest
from .kept import TOLD, Kept
from .settings import WaaSettings

CHECKOUT = "WindowsAgentArena"
_INSIDE = ("", "src/win-arena-container/client/evaluation_examples_windows", "evaluation_examples_windows")
_CLONE = "git clone https://github.com/microsoft/WindowsAgentArena, then --set waa=WindowsAgentArena"
MOST_SENT = 64 << 20
LOOK_S = 20.0
READ_S = 120.0
_DOCKER = 'd=docker; docker version >/dev/null 2>&1 || d="sudo -n docker"'
LOOK = f'{_DOCKER}; exec $d image inspect -f "{{{{json .RepoDigests}}}}" "$1"'
READ = f"""{_DOCKER}
id=$($d create --pull never --network none "$1") || exit
trap '$d rm -f "$id" >/dev/null' EXIT
$d cp "$id:/{FOLDER}" -"""


def task_files(settings: WaaSettings, base: Path, outside: Outside | None) -> TaskFiles:
    """RequestError says what to do where there is none."""
    root = base / Path(settings.waa or CHECKOUT).expanduser()
    for inside in _INSIDE:
        if (root / inside / LIST).is_file():
            return Folder(root / inside)
    if settings.waa:
        return _saved(settings, root, outside)
    if outside is None:
        raise RequestError(f"benchmark 'waa' needs a checkout of WAA for its list of tasks: {_CLONE}")
    return _of_image(settings, outside)


# -- a saved image ---------------------------------------------------------------------------------


def _saved(settings: WaaSettings, path: Path, outside: Outside | None) -> TaskFiles:
    from evalfleet.images.archive import is_layout, open_archive
    from evalfleet.images.reading import all_files

    where = f"--set waa={settings.waa}: {path}"
    if not path.is_dir() and not path.is_file():
        raise RequestError(f"{where} is no folder and no file; name a checkout of WAA: {_CLONE}")
    if path.is_dir() and not is_layout(path):
        raise RequestError(f"{where} has no {LIST}; name a checkout of WAA: {_CLONE}")
    kept = Kept(None if outside is None else outside.home)
    try:
        image = open_archive(path, settings.image)
        found = kept.find(str(path), image.digest)
        found = found or held(str(path), image.digest, all_files(image, FOLDER, interest))
    except (Unreadable, OSError) as err:
        told = reason(err) if isinstance(err, OSError) else str(err)
        raise RequestError(f"{where} cannot be read: {told}; {_save(settings.image)} makes one") from None
    if LIST not in found.texts:
        raise RequestError(f"{where} is an image without /{FOLDER}/{LIST}; it is none of WAA's")
    kept.keep(found)
    return found


def _save(image: str) -> str:
    return f"`docker save -o waa.tar {image}`"


# -- the image that machines will use ----------------------------------------------------------------


def _of_image(settings: WaaSettings, outside: Outside) -> TaskFiles:
    try:
        reference = parse(settings.image)
    except Unreadable as err:
        raise RequestError(_untold(settings.image, err)) from None
    found = None
    if outside.machines is not None:
        found = _on_machine(settings.image, outside.machines, Kept(outside.home, TOLD))
    return found or _in_registry(reference, settings, outside, Kept(outside.home))


def _on_machine(image: str, machines: Machines, kept: Kept) -> Held | None:
    """Nothing, if none has the image. No program of ours need be there."""
    from evalfleet.images.overlay import Overlay

    told = machines.output(("sh", "-c", LOOK, "sh", image), MOST_SENT, LOOK_S)
    if told is None:
        return None
    digest = _digest_in(told)
    if known := kept.find(image, digest):
        return known
    sent = machines.output(("sh", "-c", READ, "sh", image), MOST_SENT, READ_S)
    overlay = Overlay(FOLDER.rpartition("/")[2], interest)
    try:
        overlay.add(Window(io.BytesIO(sent or b""), 0, len(sent or b"")))
    except Unreadable:
        return None
    found = held(image, digest, overlay.files)
    if LIST not in found.texts:
        return None
    kept.keep(found)
    return found


def _digest_in(told: bytes) -> str:
    """Of what Docker knows an image by in registries; one that was never in any has none."""
    try:
        names = msgspec.json.decode(told, type=tuple[str, ...] | None) or ()
    except msgspec.MsgspecError:
        return ""
    digests = [name.partition("@")[2] for name in names]
    return digests[0] if digests and DIGEST.fullmatch(digests[0]) else ""


def _in_registry(reference: Reference, settings: WaaSettings, outside: Outside, kept: Kept) -> Held:
    from evalfleet.images.asking import Login
    from evalfleet.images.reading import likely_files
    from evalfleet.images.registry import Registry

    image = settings.image
    if reference.digest and (known := kept.find(image, reference.digest)):
        return known
    registry = Registry(reference, Login(settings.registry_user, _password(settings, outside)))
    try:
        if known := kept.find(image, registry.digest()):
            kept.keep(known)
            return known
        offered = registry.image()
        files = likely_files(offered, FOLDER, interest, lambda files: LIST in files)
    except Unreadable as err:
        if known := kept.last(image):
            return msgspec.structs.replace(known, doubt=f"{err}: the tasks are those of the last time")
        raise RequestError(_untold(image, err)) from None
    found = held(image, offered.digest, files)
    kept.keep(found)
    return found


def _password(settings: WaaSettings, outside: Outside) -> str:
    name = settings.registry_password
    if name and not outside.environ.get(name):
        raise RequestError(f"benchmark 'waa' needs {name}, the password of {settings.registry_user}; set it")
    return outside.environ[name] if name else ""


def _untold(image: str, err: Unreadable) -> str:
    """What is wrong, and both ways around it."""
    hints = {
        401: "check image, registry_user and registry_password; or ",
        403: "check image, registry_user and registry_password; or ",
        404: "check image; or ",
        429: "log in with registry_user and registry_password, or wait; or ",
    }
    ways = f"{_CLONE}; or {_save(image)} where the image is, then --set waa=waa.tar"
    hint = hints.get(getattr(err, "code", 0), "")
    return f"the list of tasks cannot be read from {image}: {err}; {hint}{ways}"
