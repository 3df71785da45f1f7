"""A run as one file to send: the dashboard's client with its data inside. It opens from disk, offline.

`site` is the same as a folder, with the images beside it: for screenshots that are too large for one file.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

import msgspec

from evalfleet.errors import RequestError
from evalfleet.model import Broken, Scored
from evalfleet.names import artefacts_folder
from evalfleet.version import __version__
from evalfleet.views.format import plural, url_part, user_of

from .client_script import CLIENT, linked
from .files import Logs, attempt_document, read_image
from .hub import Hub
from .triage import Triage
from .watched import WatchedRun

if TYPE_CHECKING:
    from evalfleet.planning.workspace import Workspace
    from evalfleet.state import AttemptState, RunState, TaskState

Screens = Literal["none", "last", "all"]
SCREENS: tuple[Screens, ...] = ("none", "last", "all")
MOST_MB = 25.0
DETAILED = 2000
"""Tasks whose attempts, steps and logs are in the file, those that failed first. All are in its table."""
LOG_END = 20_000
"""Bytes of a log in the file: its end."""
SHARE = 0.6
"""What documents may take of the file: the rest is for images."""
SUFFIXES = {"image/png": "png", "image/jpeg": "jpg", "image/webp": "webp"}


@dataclass(frozen=True)
class Shot:
    """A screenshot that belongs into the file."""

    url: str
    """What the client asks for."""
    root: Path
    path: str


@dataclass
class ExportContents:
    """What a file holds, and what it does not."""

    documents: dict[str, Any] = field(default_factory=dict[str, Any])
    """By the address at which the client would ask a server for it."""
    shots: list[Shot] = field(default_factory=list[Shot])
    left_out: list[str] = field(default_factory=list[str])
    """What is not there for its size, in words."""


async def write_report(
    workspace: Workspace,
    run: str,
    format: str,
    path: str | None,
    screens: str | None,
    most_mb: float | None,
) -> str:
    """Write the run as `html` or `site`, as a command line asks for it. Raises RequestError."""
    which = screens or ("last" if format == "html" else "all")
    if which not in SCREENS:
        raise RequestError(f"--screens {screens}: say {', '.join(SCREENS[:-1])} or {SCREENS[-1]}")
    if format == "site":
        if most_mb is not None:
            raise RequestError("--most-mb is for --format html: a site is as large as its screenshots")
        return await write_site(workspace, run, Path(path or f"{run}-site"), which)
    if most_mb is not None and not 0.5 <= most_mb <= 500:
        raise RequestError(f"--most-mb {most_mb:g}: say a number from 0.5 to 500")
    return await write_html(workspace, run, Path(path or f"{run}.html"), which, most_mb or MOST_MB)


async def write_html(
    workspace: Workspace, run: str, path: Path, screens: Screens, most_mb: float = MOST_MB
) -> str:
    """Write the one file, and tell how large it is and what it does not hold. Raises RequestError."""
    contents = _contents(await Hub(workspace).open(run), screens)
    most = int(most_mb * 1_000_000)
    packed = _packed_documents(contents, int(most * SHARE))
    head, tail = _shell("img-src data: blob:")
    room = most - len(head) - len(tail) - len(packed) - 1000
    images: dict[str, dict[str, str]] = {}
    blocks: list[bytes] = []
    missing = 0
    for shot in contents.shots:
        image = _image(shot)
        if image is None:
            continue
        block = b'<script type="application/octet-stream" id="image-%d">%s</script>\n' % (
            len(images),
            base64.b64encode(image[0]),
        )
        if len(block) > room:
            missing += 1
            continue
        room -= len(block)
        images[shot.url] = {"type": image[1], "id": f"image-{len(images)}"}
        blocks.append(block)
    if missing:
        contents.left_out.append(plural(missing, "screenshot"))
    data = _data(workspace, run, contents, images)
    _write(path, b"".join((head, data, *blocks, tail)))
    return _told(path, path.stat().st_size, contents)


async def write_site(workspace: Workspace, run: str, folder: Path, screens: Screens) -> str:
    """Write a folder that any web server can show, or a browser from disk. Raises RequestError."""
    contents = _contents(await Hub(workspace).open(run), screens)
    head, tail = _shell("img-src 'self' file: data: blob:")
    images: dict[str, dict[str, str]] = {}
    size = 0
    for shot in contents.shots:
        if (image := _image(shot)) is not None:
            name = f"images/{len(images)}.{SUFFIXES[image[1]]}"
            images[shot.url] = {"type": image[1], "url": name}
            size += _write(folder / name, image[0])
    size += _write(folder / "index.html", head + _data(workspace, run, contents, images) + tail)
    return _told(folder, size, contents)


def _told(path: Path, size: int, contents: ExportContents) -> str:
    without = f", without {' and '.join(contents.left_out)}" if contents.left_out else ""
    return f"report written to {path}: {size / 1_000_000:.1f} MB{without}"


def _write(path: Path, content: bytes) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as err:
        raise RequestError(f"cannot write {path}: {err.strerror}") from err
    return len(content)


# -- contents ------------------------------------------------------------------------------------------


def _contents(watched: WatchedRun, screens: Screens) -> ExportContents:
    contents = ExportContents()
    run, state, logs = watched.run(), watched.board.state, Logs()
    base = _address("runs", watched.board.run)
    documents = contents.documents
    documents[base] = msgspec.json.decode(gzip.decompress(watched.snapshot()))
    documents[f"{base}/triage"] = Triage(watched.board.folder).groups(state)
    for machine in state.machines:
        documents[f"{base}/machines/{url_part(machine)}"] = watched.machine(machine)
    tasks = sorted(state.tasks.values(), key=lambda task: _rank(state, task))
    if len(tasks) > DETAILED:
        contents.left_out.append(f"the attempts of {plural(len(tasks) - DETAILED, 'task')}")
    more: list[Shot] = []
    for task in tasks[:DETAILED]:
        detail = run.task(task.task.id)
        documents[f"{base}/tasks/{url_part(task.task.id)}"] = detail
        for id in task.attempts:
            attempt = state.attempts[id]
            document = attempt_document(run, attempt)
            address = f"{base}/attempts/{url_part(id)}"
            documents[address] = document
            if attempt.collected is not None:
                documents[f"{address}/log"] = logs.piece(run, attempt, -LOG_END, LOG_END)
            shots = list(_shots(watched, attempt, address, document))
            decides = id == (detail["decided_by"] or task.attempts[-1])
            if screens != "none" and shots and decides:
                contents.shots.append(shots[-1])
            if screens == "all":
                more += shots[:-1] if decides else shots
    contents.shots += more
    logs.close()
    contents.documents = _portable(documents, state, watched.board.home)
    return contents


def _portable(documents: dict[str, Any], state: RunState, home: Path) -> dict[str, Any]:
    """Return the documents with paths relative to the home, and users without the names of computers."""
    changes = {f"{home}/": "", f"{home.resolve()}/": ""}
    changes |= {event.by: user_of(event.by) for _, event in state.steered if event.by}
    text = msgspec.json.encode(documents)
    for old, new in changes.items():
        text = text.replace(msgspec.json.encode(old)[1:-1], msgspec.json.encode(new)[1:-1])
    return msgspec.json.decode(text, type=dict[str, Any])


def _rank(state: RunState, task: TaskState) -> int:
    """What needs a look comes first: broken, then failed, then the others."""
    outcomes = [state.attempts[id].outcome for id in task.attempts]
    last = outcomes[-1] if outcomes else None
    if isinstance(last, Broken):
        return 0
    if isinstance(last, Scored) and not last.success:
        return 1
    return 2 if last is not None else 3


def _shots(
    watched: WatchedRun, attempt: AttemptState, address: str, document: dict[str, Any]
) -> Iterator[Shot]:
    root = watched.board.folder / artefacts_folder(attempt.task, attempt.id)
    for step in document["steps"]:
        if path := step["image"]:
            parts = "/".join(map(_quoted, PurePosixPath(path).parts))
            yield Shot(f"{address}/image/{parts}", root, path)


def _image(shot: Shot) -> tuple[bytes, str] | None:
    """An image that a browser can show; None for what an agent only called so."""
    try:
        return read_image(shot.root, shot.path)
    except RequestError:
        return None


def _address(*parts: str) -> str:
    return "/api/" + "/".join(map(url_part, parts))


def _quoted(text: str) -> str:
    """Return the text as `encodeURIComponent` does it."""
    return quote(text, safe="!~*'()")


def _packed_documents(contents: ExportContents, most: int) -> bytes:
    """The documents, compressed; what is too much goes: logs first, then steps of attempts."""
    for what, ends in (("logs", "/log"), ("the steps of attempts", "/attempts/")):
        packed = base64.b64encode(gzip.compress(msgspec.json.encode(contents.documents), 5))
        if len(packed) <= most:
            return packed
        kept = {
            path: document
            for path, document in contents.documents.items()
            if not (path.endswith(ends) if ends == "/log" else ends in path)
        }
        if len(kept) < len(contents.documents):
            contents.left_out.append(what)
        contents.documents = kept
    return base64.b64encode(gzip.compress(msgspec.json.encode(contents.documents), 5))


def _data(
    workspace: Workspace, run: str, contents: ExportContents, images: dict[str, dict[str, str]]
) -> bytes:
    about = {
        "made": workspace.now() // 1000,
        "version": __version__,
        "runs": [run],
        "left_out": f"without {' and '.join(contents.left_out)}" if contents.left_out else None,
    }
    data = {"about": about, "documents": contents.documents, "images": images}
    packed = base64.b64encode(gzip.compress(msgspec.json.encode(data), 5))
    return b'<script type="application/octet-stream" id="data">%s</script>\n' % packed


# -- the client in one file ------------------------------------------------------------------------------


def _shell(pictures: str) -> tuple[bytes, bytes]:
    """What stands before the data, and after it. Nothing but what is written here may run, or be loaded."""
    style = (CLIENT / "style.css").read_text("utf-8")
    script = linked("app.js")
    rules = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; {pictures}; "
        "base-uri 'none'; form-action 'none'"
    )
    icon = base64.b64encode((CLIENT / "icon.svg").read_bytes()).decode()
    page = (CLIENT / "index.html").read_text("utf-8")
    page = page.replace(
        '<meta charset="utf-8">',
        f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{rules}">',
    )
    page = page.replace("/client/icon.svg", f"data:image/svg+xml;base64,{icon}")
    page = page.replace('<link rel="stylesheet" href="/client/style.css">', f"<style>{style}</style>")
    page = page.replace('<script type="module" src="/client/app.js"></script>\n', "")
    head, _, tail = page.partition("</body>")
    # After the data: a script sees only what stands before it.
    return head.encode(), f'<script type="module">{script}</script>\n</body>{tail}'.encode()


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
