"""The stand-in for Azure as a place of `evalfleet`, in an environment that has what it needs."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .environments import NoEnvironment, python_of
from .result import Figures, Result
from .workspace import ROOT, environment

if TYPE_CHECKING:
    from standins.azure import StandIn

PLACE = "azure"
GROUP = "bench"
SIZE, REGION = "Standard_D4ds_v5", "eastus"
NEEDED = ("aiohttp", "asyncssh", "azure.identity", "azure.mgmt.resource", "cryptography", "yaml")
LIMIT_S = 900.0


def where_it_can(bench: str, quick: bool, measure: Callable[[bool], Result]) -> Result:
    """Here, if all that the place and the stand-in need is installed; else in an environment of its own."""
    if all(map(_is_installed, NEEDED)):
        return measure(quick)
    try:
        python = python_of("azure")
    except NoEnvironment as err:
        return Result(bench, {"error": str(err)}, {})
    words = [str(python), "-m", "bench.clouds", bench, *(["--quick"] if quick else [])]
    paths = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    done = subprocess.run(
        words,
        cwd=ROOT,
        env=environment(PYTHONPATH=paths),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        timeout=LIMIT_S,
        check=True,
    )
    result = pickle.loads(done.stdout)  # from ourselves
    assert isinstance(result, Result)
    return result


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


# -- the place ------------------------------------------------------------------------------------


def settings(azure: StandIn, endpoint: str) -> dict[str, Any]:
    """Of a place `azure_vm`; everything else is as users have it."""
    return {
        "subscription": azure.subscription,
        "resource_group": GROUP,
        "sizes": [SIZE],
        "regions": [REGION],
        "ssh_from": ["*"],
        "owner": "bench",
        "endpoint": endpoint,
        "ca": str(azure.ca),
    }


def credentials(azure: StandIn, endpoint: str) -> dict[str, str]:
    """A service principal's."""
    return {
        "AZURE_TENANT_ID": azure.tenant,
        "AZURE_CLIENT_ID": azure.client_id,
        "AZURE_CLIENT_SECRET": azure.client_secret,
        "AZURE_AUTHORITY_HOST": endpoint,
    }


def write_place(folder: Path, azure: StandIn, endpoint: str, more: Mapping[str, Any] | None = None) -> None:
    """With its credentials in the file .env, which commands read by themselves."""
    given = {**settings(azure, endpoint), **(more or {})}
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in given.items())
    (folder / "evalfleet.toml").write_text(f'[places.{PLACE}]\nkind = "azure_vm"\n{lines}')
    secrets = credentials(azure, endpoint).items()
    (folder / ".env").write_text("".join(f"{key}={value}\n" for key, value in secrets))


def import_figures(rounds: int) -> Figures:
    """What the place costs before it is used, in CPU; the least of some rounds."""
    return {
        "place_import_ms": _import_ms("evalfleet.places.azure", "evalfleet", rounds),
        "first_request_import_ms": _import_ms(
            "azure.identity.aio, azure.mgmt.resource.resources.aio", "evalfleet.places.azure", rounds
        ),
        "azure_modules_after_import_of_evalfleet": _strangers("evalfleet, evalfleet.api.runs, evalfleet.cli"),
        "azure_modules_after_import_of_the_place": _strangers("evalfleet.places.azure"),
    }


def _import_ms(modules: str, before: str, rounds: int) -> float:
    code = (
        f"import {before}, time; t = time.process_time(); import {modules}; "
        "print(1000 * (time.process_time() - t))"
    )
    return round(min(float(_python(code)) for _ in range(rounds)), 1)


def _strangers(modules: str) -> int:
    """How many modules of the clouds' libraries are loaded with these."""
    names = "('azure', 'aiohttp', 'asyncssh', 'msal', 'cryptography')"
    code = f"import {modules}, sys; print(sum(name.split('.')[0] in {names} for name in sys.modules))"
    return int(_python(code))


def _python(code: str) -> str:
    paths = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH", ""))))
    argv = [sys.executable, "-c", code]
    return subprocess.run(
        argv, env=environment(PYTHONPATH=paths), capture_output=True, text=True, check=True, timeout=60
    ).stdout


def main() -> None:
    """In that environment."""
    module = importlib.import_module(f"bench.{sys.argv[1].replace('-', '_')}")
    sys.stdout.buffer.write(pickle.dumps(module.measure("--quick" in sys.argv)))


if __name__ == "__main__":
    main()
