"""Scripts that are run inside a virtual machine through Azure's API: the action `runCommand`.

Microsoft's documentation and what users report of it: one at a time, only while the machine runs and may have
extensions, as root, with at most 90 minutes. Three things here are guesses, which nobody has seen Azure do:
the refusals of an unknown command and of a body that is no command, and the words for a script that failed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from standins.cloud.words import Answer, Call, Json

from .store import Resource
from .vm_rules import dig
from .vms import Vm
from .words import ArmError

if TYPE_CHECKING:
    from .cloud import Cloud
    from .power import Power

SHELL = "RunShellScript"
FIELDS = {"commandId", "script", "parameters"}


class RunCommands:
    """The action `runCommand` of virtual machines that run Linux."""

    def __init__(self, cloud: Cloud, power: Power) -> None:
        self._cloud = cloud
        self._power = power
        self._running: set[str] = set()
        """The machines on which a script runs."""

    async def invoke(self, resource: Resource, call: Call, hold_s: float) -> Answer:
        assert isinstance(resource, Vm)
        script = _script(call.body)
        self._check(resource)

        async def run(vm: Vm) -> Json:
            try:
                await self._cloud.pause(self._cloud.timing.run_command_s)
                with self._cloud.clock.hold():
                    code, out, err = await self._cloud.machines.execute(str(vm.id), script)
            finally:
                self._running.discard(vm.id.key)
            return {"value": [_status(code, out, err)]}

        operation = self._power.begin(resource, run, hold_s)
        self._running.add(resource.id.key)
        return Answer(202, None, self._cloud.operations.headers(call, operation, location=True))

    def _check(self, vm: Vm) -> None:
        if vm.id.key in self._running:
            raise ArmError(
                409,
                "Conflict",
                "Run command extension execution is in progress. Please wait for completion before invoking "
                "a run command.",
            )
        if vm.power != "running":
            raise ArmError(
                409, "OperationNotAllowed", "Cannot modify extensions in the VM when the VM is not running."
            )
        profile = dig(vm.properties, "osProfile") or {}
        agent = dig(profile, "linuxConfiguration.provisionVMAgent")
        if profile.get("allowExtensionOperations") is False or agent is False:
            raise ArmError(
                409,
                "OperationNotAllowed",
                "This operation cannot be performed when extension operations are disallowed. To allow, "
                "please ensure VM Agent is installed on the VM and the osProfile.allowExtensionOperations "
                "property is true.",
            )


def _script(body: Json) -> str:
    command = body.get("commandId")
    if not isinstance(command, str):
        raise ArmError(400, "InvalidParameter", "Required parameter 'commandId' is missing (null).")
    if command.lower() != SHELL.lower():
        raise ArmError(400, "InvalidParameter", f"The command '{command}' is not one of a Linux machine.")
    if unknown := sorted(set(body) - FIELDS):
        told = f"Could not find member '{unknown[0]}' on object of type 'RunCommand'."
        raise ArmError(400, "InvalidRequestContent", told)
    lines: object = body.get("script") or []
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise ArmError(400, "InvalidRequestContent", "The script must be a list of lines.")
    return "\n".join(lines)


def _status(code: int, out: str, err: str) -> Json:
    """What the script said; one that failed has failed the extension, and not the operation."""
    told = "Enable succeeded: "
    if code:
        told = f"Enable failed: failed to execute command: command terminated with exit status={code}"
    return {
        "code": "ProvisioningState/succeeded" if code == 0 else "ProvisioningState/failed/0",
        "level": "Info" if code == 0 else "Error",
        "displayStatus": "Provisioning succeeded" if code == 0 else "Provisioning failed",
        "message": f"{told}\n[stdout]\n{out}\n[stderr]\n{err}",
    }
