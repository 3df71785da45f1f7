"""The client's modules as one script: a file on disk cannot import another one, and one answer of the server
is sooner there than two dozen.

No bundler is needed: every module says its imports in one form, and none needs itself.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

CLIENT = Path(__file__).parent / "client"

_IMPORT = re.compile(r'^import\s*(?:\{([^}]*)\}|(\w+))\s*from\s*"([^"]+)";?', re.MULTILINE)
_LAZY = re.compile(r'\bimport\("([^"]+)"\)')
_NAMED = re.compile(r"^export ((?:async )?(?:function|class|const|let)\s+(\w+))", re.MULTILINE)
_LIST = re.compile(r"(?:^|(?<=[;}]))export\s*\{([^}]*)\};?", re.MULTILINE)
_DEFAULT = re.compile(r"(?:^|(?<=[;}]))export default ", re.MULTILINE)


def linked(entry: str, *, base: str | None = None) -> str:
    """A module of the client and all that it imports as one script, each after those that it imports itself.

    `base`: the address of the client's folder. Modules that are imported only when they are needed are asked
    for there then; without it they are in the script, too.
    """
    wrapped = (_wrapped(name, text, base) for name, text in _modules(entry, lazy=base is None).items())
    return "const modules = {};\n" + "".join(wrapped).replace("</script", "<\\/script")


def _modules(entry: str, lazy: bool) -> dict[str, str]:
    found: dict[str, str] = {}

    def add(name: str) -> None:
        if name in found:
            return
        found[name] = ""
        text = (CLIENT / name).read_text("utf-8")
        for other in (*(each[2] for each in _IMPORT.findall(text)), *(_LAZY.findall(text) if lazy else ())):
            add(_beside(name, other))
        del found[name]  # so that it stands after them
        found[name] = text

    add(entry)
    return found


def _wrapped(name: str, text: str, base: str | None) -> str:
    exported: dict[str, str] = {}

    def imported(found: re.Match[str]) -> str:
        names = found[1].replace(" as ", ": ") if found[1] is not None else f"default: {found[2]}"
        return f'const {{{names}}} = modules["{_beside(name, found[3])}"];'

    def imported_later(found: re.Match[str]) -> str:
        other = _beside(name, found[1])
        return f'Promise.resolve(modules["{other}"])' if base is None else f'import("{base}/{other}")'

    def listed(found: re.Match[str]) -> str:
        for item in filter(None, map(str.strip, found[1].split(","))):
            own, _, outer = item.partition(" as ")
            exported[outer or own] = own
        return ""

    def named(found: re.Match[str]) -> str:
        exported[found[2]] = found[2]
        return found[1]

    text = _IMPORT.sub(imported, text)
    text = _LAZY.sub(imported_later, text)
    text = _LIST.sub(listed, _NAMED.sub(named, text))
    if _DEFAULT.search(text):
        exported["default"] = "ownDefault"
        text = _DEFAULT.sub("const ownDefault = ", text)
    names = ", ".join(f"{outer}: {own}" for outer, own in exported.items())
    return f'modules["{name}"] = (() => {{\n{text}\nreturn {{ {names} }};\n}})();\n'


def _beside(name: str, other: str) -> str:
    """The module that `other` names, seen from `name`."""
    parts: list[str] = list(PurePosixPath(name).parent.parts)
    for part in PurePosixPath(other).parts:
        if part == "..":
            parts.pop()
        elif part != ".":
            parts.append(part)
    return "/".join(parts)
