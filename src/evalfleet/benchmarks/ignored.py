"""Which files in a benchmark's folders stay here: caches, and what `.gitignore` ignores."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

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
    """What is ignored below a folder: by the `.gitignore` files in it, and above it in the same repository.

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
        """Does a `.gitignore` say that this path, relative to the root, is none of the repository's?

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


def _patterns(folder: Path) -> list[_Pattern]:
    try:
        lines = (folder / ".gitignore").read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
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
