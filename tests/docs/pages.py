"""What a page of the docs holds that can be run: files, commands with the output they should have, code.

A page is read from top to bottom. `<!-- file: NAME -->` before a fenced block makes that block a file;
`<!-- file: NAME from PATH -->` copies one of the repository's. In a ```console block a line `$ COMMAND` is
run, and the lines after it are what it should print, if there are any: `...` stands for anything, and alone
on a line for any lines. Times and durations are compared as such, not by their values. `# exit N` after a
command is the exit code it should have. Blocks of other kinds are not run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

_STEP = re.compile(
    r"^<!-- file: (?P<copied>\S+) from (?P<source>\S+) -->$"
    r"|^(?:<!-- file: (?P<file>\S+) -->\n)?```(?P<kind>[a-z]*)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_EXIT = re.compile(r"\s+# exit (\d+)$")
_VOLATILE = (
    (re.compile(r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)?"), "<instant>"),
    (re.compile(r"\b\d{8}-\d{6}\b"), "<stamp>"),
    (re.compile(r"\b\d\d:\d\d:\d\d\b"), "<time>"),
    (re.compile(r"\b(\d+(\.\d+)?s|\d+m\d\ds|\d+h\d\dm)\b"), "<duration>"),  # a busy computer takes longer
    (re.compile(r"\d+(\.\d+)? a minute"), "<pace>"),
    (re.compile(r" +"), " "),
)


@dataclass(frozen=True)
class File:
    name: str
    content: str


@dataclass(frozen=True)
class Shell:
    """A command, what it should print (None: that is not said), and its exit code."""

    command: str
    expected: str | None
    exit_code: int


@dataclass(frozen=True)
class Code:
    source: str


Step = File | Shell | Code


def steps(page: Path) -> Iterator[Step]:
    for match in _STEP.finditer(page.read_text(encoding="utf-8")):
        if match["copied"]:
            yield File(match["copied"], (ROOT / match["source"]).read_text(encoding="utf-8"))
        elif match["file"]:
            yield File(match["file"], match["body"])
        elif match["kind"] == "console":
            yield from _commands(match["body"])
        elif match["kind"] == "python":
            yield Code(match["body"])


def _commands(body: str) -> Iterator[Shell]:
    for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
        line, _, rest = part.partition("\n")
        code = _EXIT.search(line)
        yield Shell(_EXIT.sub("", line), rest or None, int(code[1]) if code else 0)


def matches(expected: str, printed: str) -> bool:
    """Is this what the page says, but for times and what `...` stands for?"""
    pattern = ""
    for line in _settled(expected).splitlines():
        if line.strip() == "...":
            pattern += r"(?:.*\n)*?"
        else:
            pattern += ".*".join(re.escape(part) for part in line.split("...")) + "\n"
    return re.fullmatch(pattern, _settled(printed)) is not None


def _settled(text: str) -> str:
    for volatile, name in _VOLATILE:
        text = volatile.sub(name, text)
    return "".join(f"{line.rstrip()}\n" for line in text.strip("\n").splitlines())
