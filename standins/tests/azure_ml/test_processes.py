"""Containers that are processes leave nothing on this computer."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from pathlib import Path

import pytest

from evalfleet.channels.supervisor.isolation import machine_groups, remove_groups
from standins.azure_ml import Processes
from tests.waiting import until_seen

MACHINE = 'mkdir machine; printf %s "$GROUPS_MADE" >machine/groups; touch "$WRITTEN"; exec sleep 600'


@pytest.mark.skipif(Processes.missing() is not None, reason=f"NO CONTAINERS: {Processes.missing()}")
def test_control_groups_of_a_machine_are_gone_with_its_container(tmp_path: Path) -> None:
    groups = list(machine_groups(f"evalfleet-machine-{secrets.token_hex(6)}").values())
    if not groups:
        pytest.skip("NO CONTROL GROUPS: they cannot be made here")
    os.mkdir(f"{groups[0]}/job")

    async def main() -> None:
        containers = Processes()
        environ = {"GROUPS_MADE": json.dumps(groups), "WRITTEN": str(tmp_path / "written")}
        await containers.run("j", MACHINE, environ)
        await until_seen((tmp_path / "written").exists, "the machine is there")
        await containers.close()

    try:
        asyncio.run(main())
        assert [path for path in groups if os.path.exists(path)] == []
    finally:
        remove_groups(groups)
