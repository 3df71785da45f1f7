"""What looks wrong in a benchmark's commands but may be meant: told to the user, never refused."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from .spec import PLACEHOLDER, CommandSpec

_BRACES = re.compile(r"(\$?)\{([A-Za-z_][A-Za-z0-9_.-]*)\}")
_SCRIPTS = frozenset({".sh", ".bash", ".py", ".js", ".mjs", ".ts", ".rb", ".pl", ".jl", ".r", ".lua", ".ps1"})
_KNOWN = ("task_id", "domain", "attempt", "params")


def warnings_about(spec: CommandSpec) -> Iterator[str]:
    """One sentence for each, without the file's name."""
    yield from _about_braces(spec.command)
    others = [(f"setup (step {n})", argv) for n, argv in enumerate(spec.setup, start=1)]
    others += [("probe", spec.probe)] if spec.probe else []
    for key, argv in others:
        for match in (match for word in argv for match in PLACEHOLDER.finditer(word)):
            yield f"key {key!r} has {match[0]!r}, which is replaced in the command alone; it stays as it is"
    for key, argv in [("command", spec.command), *others]:
        yield from _about_files(key, argv, spec)


def _about_braces(command: Sequence[str]) -> Iterator[str]:
    for dollar, name in (match.groups() for word in command for match in _BRACES.finditer(word)):
        if PLACEHOLDER.fullmatch(f"{{{name}}}"):
            if dollar:
                yield (
                    f"key 'command' has '${{{name}}}': the value is put after the '$'; "
                    f"write '{{{name}}}', or a variable such as $EVALFLEET_TASK_ID"
                )
            continue
        head, _, rest = name.partition(".")
        close = difflib.get_close_matches(str(head), _KNOWN, n=1, cutoff=0.6)
        if close and not dollar:
            meant = f"params.{rest or 'NAME'}" if close[0] == "params" else close[0]
            yield f"key 'command' has '{{{name}}}', which stays as it is; did you mean '{{{meant}}}'?"


def _about_files(key: str, argv: Sequence[str], spec: CommandSpec) -> Iterator[str]:
    root = Path(spec.root)
    for position, word in enumerate(argv):
        if not _may_be_file(word):
            continue
        path = PurePosixPath(word)
        here = (root / path).is_file()
        listed = any(path == entry or entry in path.parents for entry in map(PurePosixPath, spec.files))
        if not listed and (here or path.suffix.lower() in _SCRIPTS):
            fix = f"add {str(path)!r} to it" if here else "no machine has it unless setup makes it"
            yield f"key {key!r} names {word!r}, which is not in 'files'; {fix}"
        elif position == 0 and listed and here and "/" not in word:
            yield f"key {key!r} starts with the file {word!r}; write {'./' + word!r} to run it"
        elif position == 0 and listed and here and not os.access(root / path, os.X_OK):
            yield f"key {key!r} starts with {word!r}, not executable; chmod +x it or name its interpreter"


def _may_be_file(word: str) -> bool:
    if not word or word.startswith(("-", "/", "~")) or len(word) > 200:
        return False
    return not re.search(r"[\s{}$*?;|&<>=:]", word) and ".." not in PurePosixPath(word).parts
