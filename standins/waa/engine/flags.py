"""Flags as docker reads them: before the first word that is no flag, `--a=b` or `--a b`, `-it`, `-eA=b`."""

from __future__ import annotations

from .errors import Failure, bad_flag

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Flags:
    """What was given. `of` is the last value, `all` every one."""

    def __init__(self) -> None:
        self.given: dict[str, list[str]] = {}
        self.rest: list[str] = []

    def of(self, name: str, default: str = "") -> str:
        return self.given.get(name, [default])[-1]

    def all(self, name: str) -> list[str]:
        return self.given.get(name, [])

    def has(self, name: str) -> bool:
        return self.of(name, "false") not in ("false", "0")


def parse(
    verb: str,
    argv: Sequence[str],
    switches: Sequence[str] = (),
    values: Sequence[str] = (),
    short: Mapping[str, str] | None = None,
    *,
    anywhere: bool = True,
) -> Flags:
    """`short` maps letters to long names. Not `anywhere`: what follows the first word is not ours."""
    found, left = Flags(), list(argv)
    while left:
        word = left.pop(0)
        if word == "--":
            found.rest += left
            break
        if not word.startswith("-") or word == "-":
            found.rest.append(word)
            if not anywhere:
                found.rest += left
                break
        elif word.startswith("--"):
            _long(found, verb, word, left, switches, values)
        else:
            _short(found, verb, word, left, switches, short or {})
    return found


def _long(found: Flags, verb: str, word: str, left: list[str], switches: object, values: object) -> None:
    name, equals, value = word[2:].partition("=")
    if name in switches:  # type: ignore[operator]
        found.given.setdefault(name, []).append(value if equals else "true")
    elif name in values:  # type: ignore[operator]
        found.given.setdefault(name, []).append(value if equals else _next(verb, word, left))
    else:
        raise bad_flag(f"--{name}", verb)


def _short(
    found: Flags, verb: str, word: str, left: list[str], switches: Sequence[str], short: Mapping[str, str]
) -> None:
    letters = word[1:]
    while letters:
        letter, letters = letters[0], letters[1:]
        if letter not in short:
            raise bad_flag(f"-{letter}", verb)
        name = short[letter]
        if name in switches:
            found.given.setdefault(name, []).append("true")
            continue
        found.given.setdefault(name, []).append(letters.lstrip("=") if letters else _next(verb, word, left))
        return


def _next(verb: str, word: str, left: list[str]) -> str:
    if not left:
        raise Failure(f"flag needs an argument: {word}\nSee 'docker {verb} --help'.", 125)
    return left.pop(0)
