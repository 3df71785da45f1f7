"""ps, logs, system df."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time

from . import flags, images
from .inspecting import formatted
from .store import ROOT, Container, containers, find


def ps(argv: list[str]) -> int:
    short = {"a": "all", "q": "quiet", "f": "filter", "n": "last", "l": "latest"}
    switches = ("all", "quiet", "no-trunc", "latest", "size")
    given = flags.parse("ps", argv, switches, ("filter", "format", "last"), short)
    rows = [_row(each) for each in reversed(containers()) if _is_wanted(each, given)]
    if given.has("quiet"):
        print("".join(row["ID"] + "\n" for row in rows), end="")
    elif given.has("format"):
        print("".join(formatted(given.of("format"), row) + "\n" for row in rows), end="")
    else:
        print("CONTAINER ID   IMAGE   COMMAND   CREATED   STATUS   PORTS   NAMES")
        for row in rows:
            print(
                "   ".join(
                    row[key] for key in ("ID", "Image", "Command", "CreatedAt", "Status", "Ports", "Names")
                )
            )
    return 0


def _is_wanted(container: Container, given: flags.Flags) -> bool:
    status = container.state["status"]
    wanted: dict[str, list[str]] = {}
    for text in given.all("filter"):
        wanted.setdefault(text.partition("=")[0], []).append(text.partition("=")[2])
    if not given.has("all") and "status" not in wanted and status != "running":
        return False
    names = [
        re.search(text.lstrip("/").replace("^/", "^"), container.name) for text in wanted.get("name", [])
    ]
    return (
        (not names or any(names))
        and status in wanted.get("status", [status])
        and container.id[:12] in [text[:12] for text in wanted.get("id", [container.id])]
    )


def _row(container: Container) -> dict[str, str]:
    config, state = container.config, container.state
    code = state.get("code", 0)
    words = {"running": "Up", "exited": f"Exited ({code})", "restarting": f"Restarting ({code})"}
    ports = [f"{port['ip']}:{port['host']}->{port['container']}/tcp" for port in config["ports"]]
    return {
        "ID": container.id[:12],
        "Names": config["name"],
        "Image": config["image"],
        "Command": json.dumps(" ".join(config["command"])[:20]),
        "CreatedAt": config["created"],
        "Status": words.get(state["status"], "Created"),
        "State": state["status"],
        "Ports": ", ".join(ports),
    }


def logs(argv: list[str]) -> int:
    switches, values = ("follow", "timestamps", "details"), ("tail", "since", "until")
    given = flags.parse("logs", argv, switches, values, {"f": "follow", "t": "timestamps", "n": "tail"})
    container = find(given.rest[0])
    if not os.path.exists(container.log):
        return 0
    with open(container.log, "rb") as log:
        text = log.read()
        if given.of("tail", "all") != "all":
            count = int(given.of("tail"))
            text = b"".join(text.splitlines(True)[-count:]) if count else b""
        while True:
            sys.stdout.buffer.write(text)
            sys.stdout.buffer.flush()
            if not given.has("follow"):
                return 0
            over = not container.running
            text = log.read()
            if not text:
                if over:
                    return 0
                time.sleep(0.05)


def system_df(argv: list[str]) -> int:
    used = sum(_size(container.rootfs) for container in containers())
    sizes = sum(_size(image["path"]) for image in images.image_list())
    print("TYPE            TOTAL     ACTIVE    SIZE      RECLAIMABLE")
    print(f"Images          {len(images.image_list())}         0         {sizes}B    0B")
    print(f"Containers      {len(containers())}         0         {used}B    0B")
    free = shutil.disk_usage(ROOT).free if os.path.isdir(ROOT) else 0
    print(f"Free            -         -         {free}B    -")
    return 0


def _size(folder: str) -> int:
    found = (os.path.join(path, name) for path, _, names in os.walk(folder) for name in names)
    return sum(os.lstat(path).st_size for path in found)
