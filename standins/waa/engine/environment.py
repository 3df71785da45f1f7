"""What a container's processes find in their environment."""

from __future__ import annotations

import os

from . import flags
from .errors import Failure


def environment(given: flags.Flags, base: list[str]) -> dict[str, str]:
    """`-e NAME` alone takes the caller's value, if there is one."""
    found = dict(line.split("=", 1) for line in base)
    lines: list[str] = []
    for path in given.all("env-file"):
        try:
            with open(path, encoding="utf-8") as file:
                lines += [line.strip() for line in file if line.strip() and not line.lstrip().startswith("#")]
        except OSError as err:
            raise Failure(f"open {path}: {os.strerror(err.errno or 0).lower()}", 125) from err
    for line in [*lines, *given.all("env")]:
        name, equals, value = line.partition("=")
        if equals:
            found[name] = value
        elif name in os.environ:
            found[name] = os.environ[name]
    return found
