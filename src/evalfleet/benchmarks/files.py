"""The files that a benchmark puts on every machine: checked, named and digested.

Caches, and what `.gitignore` ignores, stay here.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import msgspec

from evalfleet.errors import RequestError
from evalfleet.model import SetupStep
from evalfleet.toml_tables import reason

_CHUNK = 1 << 20


def check_files(root: Path, entries: Sequence[str], where: str) -> None:
    """Every entry is a regular file or a folder of such, in `root`, readable. RequestError if not.

    A link to a file in `root` is that file; others are refused: places would differ in what they make of
    them. What is ignored is not
    looked at.
    """
    rules = IgnoreRules(root)
    for entry in entries:
        path = PurePosixPath(entry)
        if not path.parts or "\0" in entry:
            raise RequestError(f"{where}: 'files' has {entry!r}, the folder itself; list what is in it")
        if path.is_absolute() or ".." in path.parts:
            raise RequestError(
                f"{where}: 'files' has {entry!r}, outside the benchmark's folder; copy it into {root}"
            )
        ignored: list[PurePosixPath] = []
        try:
            for found in _walk(root, path, rules, ignored):
                _check_file(root, root / found, f"{where}: 'files' has {entry!r}", str(found))
            if ignored and not _has_files(root, path, rules):
                raise RequestError(
                    f"{where}: 'files' has {entry!r}, but .gitignore leaves nothing of it ({ignored[0]} is "
                    "ignored); list the files by their names, which are sent in any case"
                )
        except OSError as e:
            raise RequestError(
                f"{where}: 'files' has {entry!r}, which cannot be read ({reason(e)})"
            ) from None


def ignored_files(root: Path, entries: Sequence[str]) -> list[PurePosixPath]:
    """What stays here of the listed folders because a `.gitignore` says so. Caches are not told of."""
    rules, ignored = IgnoreRules(root), list[PurePosixPath]()
    for entry in covering(entries):
        for _ in _walk(root, PurePosixPath(entry), rules, ignored):
            pass
    return ignored


def covering(entries: Sequence[str]) -> list[str]:
    """The entries (relative paths, as written), sorted; what a listed folder holds is not named again."""
    names = sorted({PurePosixPath(entry) for entry in entries})
    listed = set(names)
    return [str(name) for name in names if not listed.intersection(name.parents)]


def bundle_files(root: Path, entries: Sequence[str]) -> dict[str, Path]:
    """Name on the machine -> path here: files, and folders of which all is sent."""
    rules, files = IgnoreRules(root), dict[str, Path]()
    for entry in covering(entries):
        path = PurePosixPath(entry)
        whole = list(_walk(root, path, None)) if (root / path).is_dir() else [path]
        sent = list(_walk(root, path, rules)) if len(whole) > 1 else whole
        if len(sent) == len(whole) and not any((root / name).is_symlink() for name in sent):
            files[entry] = root / path
        else:  # machines get the target of a link
            files |= {str(name): (root / name).resolve() for name in sent if not (root / name).is_dir()}
    return files


def digest(
    root: Path, names: Iterable[str], steps: Sequence[SetupStep], rules: IgnoreRules | None = None
) -> str:
    """SHA-256 over names, executable bits and contents of all files that are not ignored, and the steps."""
    total = hashlib.sha256(msgspec.json.encode(steps))
    for name in sorted(names):
        try:
            for found in _walk(root, PurePosixPath(name), rules):
                total.update(_record(root / found, found))
        except OSError as e:
            raise RequestError(
                f"{root / name}: cannot be read ({reason(e)}); the benchmark needs it on every machine"
            ) from None
    return total.hexdigest()


def keep_files(root: Path, entries: Sequence[str], target: Path, twin: Path | None) -> None:
    """Copy what machines get into the new folder `target`, at once or not at all. Raises OSError.

    `twin` is a folder that should hold the same: its files are linked instead, where that can be done.
    """
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        rules = IgnoreRules(root)
        source, used = (root, rules) if twin is None else (twin, None)
        for entry in covering(entries):
            for name in _walk(source, PurePosixPath(entry), used):
                if (source / name).is_dir():
                    (scratch / name).mkdir(exist_ok=True)
                else:
                    _link_or_copy(source / name, scratch / name, link=twin is not None)
        os.replace(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _link_or_copy(source: Path, target: Path, *, link: bool) -> None:
    if link:
        with contextlib.suppress(OSError):  # another file system, or one without links
            os.link(source, target, follow_symlinks=False)
            return
    shutil.copy2(source, target)  # a link becomes a copy of its target


def _has_files(root: Path, entry: PurePosixPath, rules: IgnoreRules) -> bool:
    return any(not (root / name).is_dir() for name in _walk(root, entry, rules))


def _walk(
    root: Path,
    entry: PurePosixPath,
    rules: IgnoreRules | None,
    ignored: list[PurePosixPath] | None = None,
) -> Iterator[PurePosixPath]:
    """The entry, the folders above it, and all in it: sorted, links not followed, folders before contents.

    What the rules ignore below the entry is left out, and noted in `ignored` unless it is a cache. Who lists
    an ignored path itself wants it sent.
    """
    yield from reversed([parent for parent in entry.parents if parent.parts])
    waiting = [entry]
    while waiting:
        path = waiting.pop()
        if rules is not None and path != entry:
            if rules.is_cache(path):
                continue
            if rules.ignores(path, stat.S_ISDIR(os.lstat(root / path).st_mode)):
                if ignored is not None:
                    ignored.append(path)
                continue
        yield path
        if stat.S_ISDIR(os.lstat(root / path).st_mode):
            waiting += sorted((path / name for name in os.listdir(root / path)), reverse=True)


def _check_file(root: Path, path: Path, what: str, name: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        raise RequestError(f"{what}, which does not exist; create {path} or take it out") from None
    if stat.S_ISLNK(mode):
        target = Path(os.path.realpath(path))  # `resolve` raises RuntimeError for a loop
        if not target.is_file() or not target.is_relative_to(root.resolve()) or target.name == ".env":
            raise RequestError(
                f"{what}, but {name} is a symbolic link to no file in the benchmark's folder; "
                "put a copy of its target there"
            )
        mode = target.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise RequestError(f"{what}, but {name} is neither a file nor a folder; take it out")
    if path.name == ".env":
        raise RequestError(f"{what}, but {name} holds secrets and is never uploaded; name them in 'secrets'")
    if not os.access(path, os.R_OK | (os.X_OK if stat.S_ISDIR(mode) else 0)):
        raise RequestError(f"{what}, but {name} cannot be read; check its permissions")


def _record(path: Path, name: PurePosixPath) -> bytes:
    """One entry's line: two different trees never give the same sequence of lines."""
    mode = os.stat(path).st_mode
    label = msgspec.json.encode(os.fsencode(name))
    if stat.S_ISDIR(mode):
        return b"d %s\n" % label
    content = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            content.update(chunk)
    executable = b"x" if mode & stat.S_IXUSR else b"-"
    return b"%s %s %s\n" % (executable, label, content.hexdigest().encode())


CACHES = frozenset(
    {
        *("__pycache__", ".git", ".hg", ".svn", ".mypy_cache", ".pytest_cache", ".ruff_cache"),
        *(".ipynb_checkpoints", ".tox", ".nox", ".DS_Store"),
    }
)
"""Names of what tools leave behind. It changes by itself, and no machine needs it."""


@dataclass(frozen=True)
class _Pattern:
    """One line of a `.gitignore`, for paths that are relative to its folder."""

    match: re.Pattern[str]
    negated: bool
    folders_only: bool


class IgnoreRules:
    """What is ignored below a folder: by the ignore files in it, and above it in the same repository.

    What a person's own git ignores (its excludes file) does not matter: a run must not depend on who
    starts it.
    """

    def __init__(self, root: Path) -> None:
        self._root = Path(os.path.abspath(root))
        above = [self._root, *self._root.parents]
        top = next((folder for folder in above if (folder / ".git").exists()), self._root)
        self._above = list(reversed(above[1 : above.index(top) + 1]))
        self._read = functools.cache(_patterns)

    def is_cache(self, path: PurePosixPath) -> bool:
        return path.name in CACHES or path.suffix == ".pyc"

    def ignores(self, path: PurePosixPath, is_folder: bool) -> bool:
        """Does an ignore file say that this path, relative to the root, is not to be sent?

        The last pattern that matches counts, and those of inner folders come last. Whether a folder above it
        is ignored is for the caller to know.
        """
        full = self._root / path
        inner = [self._root / parent for parent in reversed(path.parents)]
        verdict = False
        for folder in (*self._above, *inner):
            relative = full.relative_to(folder).as_posix()
            for pattern in self._read(folder):
                if (is_folder or not pattern.folders_only) and pattern.match.fullmatch(relative):
                    verdict = not pattern.negated
        return verdict


IGNORE_FILES = (".gitignore", ".evalfleetignore")
"""The second one is for what belongs into a repository and not onto machines; it has the last word."""


def _patterns(folder: Path) -> list[_Pattern]:
    lines: list[str] = []
    for name in IGNORE_FILES:
        with contextlib.suppress(OSError):
            lines += (folder / name).read_text("utf-8", "replace").splitlines()
    return [pattern for line in lines if (pattern := _parsed(line)) is not None]


def _parsed(line: str) -> _Pattern | None:
    text = re.sub(r"(?<!\\)\s+$", "", line)
    if not text or text.startswith("#"):
        return None
    negated = text.startswith("!")
    text = text[1:] if negated else text
    folders_only = text.endswith("/")
    text = text.rstrip("/") if folders_only else text
    anchored = "/" in text
    text = text.removeprefix("/")
    if not text:
        return None
    prefix = "" if anchored else "(?:.*/)?"
    try:
        return _Pattern(re.compile(prefix + "".join(_regex(text)), re.DOTALL), negated, folders_only)
    except re.error:  # a range that ends before it begins
        return None


_TOKEN = re.compile(r"^\*\*/|/\*\*/|/\*\*$|\*+|\?|\[[!^]?\]?[^\]]*\]|\\.|.", re.DOTALL)


def _regex(pattern: str) -> Iterator[str]:
    for match in _TOKEN.finditer(pattern):
        token = match[0]
        if token == "**/":
            yield "(?:.*/)?"
        elif token == "/**/":
            yield "/(?:.*/)?"
        elif token == "/**":
            yield "/.+"
        elif token.startswith("*"):
            yield "[^/]*"
        elif token == "?":
            yield "[^/]"
        elif token.startswith("[") and len(token) > 1:
            negated, inner = token[1] in "!^", token[1:-1].lstrip("!^")
            inner = inner.replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]")
            yield f"(?!/)[{'^' if negated else ''}{inner}]"
        else:
            yield re.escape(token[1:] if token.startswith("\\") and len(token) > 1 else token)
