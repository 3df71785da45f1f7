"""inspect, version, info, and the templates that shape what is shown."""

from __future__ import annotations

import json
import re
import sys

from . import flags, images
from .commands import VERSION
from .errors import Failure
from .store import ROOT, Container, containers, find

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_FIELD = re.compile(r"\{\{\s*(json\s+)?(\.[\w.]*|index\s+\.[\w.]+\s+\"[^\"]+\")\s*\}\}")


def formatted(template: str, what: Any) -> str:
    """As much of Go's templates as people use: {{.A.B}}, {{json .A}}, {{index .A "b"}}."""

    def replace(found: re.Match[str]) -> str:
        value = _value(found.group(2), what)
        if found.group(1):
            return json.dumps(value)
        return (
            str(value).lower() if isinstance(value, bool) else "<no value>" if value is None else str(value)
        )

    text = _FIELD.sub(replace, template)
    if "{{" in text:
        raise Failure(
            f"template parsing error: template: :1: this engine does not know {text[text.index('{{') :]}", 64
        )
    return text


def _value(path: str, what: Any) -> Any:
    if path.startswith("index"):
        _, inner, key = path.split(None, 2)
        return _value(inner, what)[json.loads(key)]
    for name in filter(None, path.split(".")):
        if not isinstance(what, dict) or name not in what:
            raise Failure(f'template: :1:2: executing "" at <{path}>: map has no entry for key "{name}"')
        what = what[name]
    return what


def described(container: Container) -> dict[str, Any]:
    config, state = container.config, container.state
    status = state["status"]
    ports: dict[str, Any] = {}
    for port in config["ports"]:
        bound = {"HostIp": port["ip"], "HostPort": str(port["host"])}
        ports.setdefault(f"{port['container']}/tcp", []).append(bound)
    return {
        "Id": container.id,
        "Name": "/" + config["name"],
        "Created": config["created"],
        "Path": config["command"][0] if config["command"] else "",
        "Args": config["command"][1:],
        "RestartCount": state.get("restarts", 0),
        "State": {
            "Status": status,
            "Running": status == "running",
            "Paused": False,
            "Restarting": status == "restarting",
            "OOMKilled": False,
            "Dead": False,
            "Pid": state.get("pid", 0),
            "ExitCode": state.get("code", 0),
            "Error": state.get("error", ""),
            "StartedAt": state.get("started", "0001-01-01T00:00:00Z"),
            "FinishedAt": state.get("ended") or "0001-01-01T00:00:00Z",
        },
        "Config": {
            "Image": config["image"],
            "Env": [f"{key}={value}" for key, value in config["env"].items()],
            "WorkingDir": config["workdir"],
            "Labels": config["labels"],
            "StopTimeout": config["stop_timeout"],
        },
        "HostConfig": {
            "Binds": [f"{mount['source']}:{mount['target']}" for mount in config["mounts"]],
            "CapAdd": config["cap_add"],
            "Devices": [{"PathOnHost": device.partition(":")[0]} for device in config["devices"]],
            "RestartPolicy": {"Name": config["restart"].partition(":")[0]},
            "NetworkMode": config["network"],
            "PortBindings": ports,
        },
        "Mounts": [
            {"Type": "bind", "Source": m["source"], "Destination": m["target"], "RW": m["mode"] != "ro"}
            for m in config["mounts"]
        ],
        "NetworkSettings": {"Ports": ports if status == "running" else {}, "IPAddress": ""},
    }


def inspect(argv: list[str], kind: str = "") -> int:
    verb = f"{kind} inspect".strip()
    given = flags.parse(verb, argv, ("size",), ("format", "type"), {"f": "format", "s": "size"})
    kind = kind or given.of("type")
    found: list[Any] = []
    missing: list[str] = []
    for name in given.rest:
        thing = _thing(name, kind)
        if thing is None:
            missing.append(name)
        else:
            found.append(thing)
    if given.has("format"):
        for thing in found:
            print(formatted(given.of("format"), thing))
    else:
        print(images.dump(found))
    for name in missing:
        what = {"container": "container", "image": "image"}.get(kind, "object")
        print(f"Error: No such {what}: {name}", file=sys.stderr)
    return 1 if missing else 0


def inspect_image(argv: list[str]) -> int:
    return inspect(argv, "image")


def inspect_container(argv: list[str]) -> int:
    return inspect(argv, "container")


def _thing(name: str, kind: str) -> dict[str, Any] | None:
    if kind != "image":
        try:
            return described(find(name))
        except Failure:
            if kind == "container":
                return None
    image = images.local(name)
    return None if image is None else images.described(image)


def version(argv: list[str]) -> int:
    given = flags.parse("version", argv, (), ("format",), {"f": "format"})
    facts = {"Client": {"Version": VERSION}, "Server": {"Version": VERSION, "Os": "linux", "Arch": "amd64"}}
    if given.has("format"):
        print(formatted(given.of("format"), facts))
    else:
        print(f"Client:\n Version:    {VERSION}\n")
        print(f"Server: Docker Engine - Community\n Engine:\n  Version:  {VERSION}")
    return 0


def info(argv: list[str]) -> int:
    given = flags.parse("info", argv, (), ("format",), {"f": "format"})
    some = containers()
    facts = {
        "ServerVersion": VERSION,
        "DockerRootDir": ROOT,
        "Containers": len(some),
        "ContainersRunning": sum(each.running for each in some),
        "Images": len(images.image_list()),
        "Driver": "overlay2",
        "CgroupDriver": "cgroupfs",
    }
    if given.has("format"):
        print(formatted(given.of("format"), facts))
    else:
        print("Server:", *(f" {key}: {value}" for key, value in facts.items()), sep="\n")
    return 0
