"""WAA's lists of tasks, as the container image on this machine has them."""

from __future__ import annotations

import io
import json
import os
import re
import tarfile

from .shell import say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .config import HostConfig
    from .docker import Docker

FOLDER = "/client/evaluation_examples_windows"
LIST = re.compile(r"test_[\w.-]*\.json")
DEFINITION = re.compile(r"examples\w*/[^/]+/[^/]+\.json")
COPY_S = 300.0


def tell_tasks(config: HostConfig, engine: Docker) -> int:
    """Writes the lists, and which tasks are defined, into result.json."""
    texts: dict[str, str] = {}
    defined: list[str] = []
    with tarfile.open(fileobj=io.BytesIO(_folder(config.image, engine))) as archive:
        for member in archive:
            name = member.name.lstrip("./").partition("/")[2]
            source = archive.extractfile(member) if member.isfile() else None
            if source is not None and LIST.fullmatch(name):
                texts[name] = source.read().decode("utf-8", "replace")
            elif source is not None and DEFINITION.fullmatch(name):
                defined.append(name)
    digest = _digest(config.image, engine)
    told = {"name": config.image, "digest": digest, "texts": texts, "defined": sorted(defined)}
    with open(os.path.join(os.environ["EVALFLEET_OUT"], "result.json"), "w") as file:
        json.dump(told, file)
    say(f"{config.image} has {len(texts)} lists of tasks")
    return 0


def _digest(image: str, engine: Docker) -> str:
    """The one that registries know it by. An image that was never in a registry has only its id."""
    about = json.loads(engine.do("image", "inspect", image).out)[0]
    for name in about.get("RepoDigests") or ():
        return str(name).rpartition("@")[2]
    return "sha256:" + str(about["Id"]).rpartition(":")[2]


def _folder(image: str, engine: Docker) -> bytes:
    """As a tar archive. Not from the container with Windows, in which agents have worked."""
    made = engine.do("create", "--pull", "never", "--network", "none", image).out.strip()
    try:
        return engine.do("cp", f"{made}:{FOLDER}", "-", timeout_s=COPY_S).raw
    finally:
        engine.try_("rm", "-f", made)
