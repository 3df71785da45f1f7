"""What Azure demands of a virtual machine before it makes one."""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Any

from standins.cloud.words import Json

from .catalog import IMAGES, REGIONS, Image, Size
from .kind import check_keys, invalid, reference
from .network import NIC
from .store import Resource
from .vm_shape import BAD_USERS, DISK_SKUS, FIXED, KNOWN
from .words import ArmError, ResourceId, parse_id

if TYPE_CHECKING:
    from .cloud import Cloud

MOST_CUSTOM_DATA = 65536


def dig(value: Any, path: str) -> Any:
    """None where there is nothing."""
    for word in path.split("."):
        value = value.get(word) if isinstance(value, dict) else None
    return value


def zone_of(extra: Json) -> str:
    zones = extra.get("zones") or []
    return str(zones[0]) if zones else ""


class VmRules:
    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud

    def check_new(self, id: ResourceId, body: Json) -> None:
        properties: Json = body.get("properties") or {}
        check_keys(properties, KNOWN, "VirtualMachineProperties")
        size = self._cloud.catalog.size(dig(properties, "hardwareProfile.vmSize"))
        zone = self._zone(body)
        self._cloud.catalog.check_offered(size, body["location"], zone)
        self._fits(size, self._image(properties, body["location"]), properties)
        self._security(properties, body["apiVersion"])
        self._os(id, properties.get("osProfile"))
        self._disk(id, size, properties)
        self._spot(size, properties)
        self._interfaces(id, body)

    def check_change(self, old: Resource, body: Json) -> None:
        properties: Json = body.get("properties") or {}
        check_keys(properties, KNOWN, "VirtualMachineProperties")
        for path in FIXED:
            new = dig(properties, path)
            if new is not None and new != dig(old.properties, path):
                raise ArmError(
                    409,
                    "PropertyChangeNotAllowed",
                    f"Changing property '{path}' is not allowed.",
                    target=path,
                )
        if body.get("zones") not in (None, old.extra.get("zones")):
            raise ArmError(
                409, "PropertyChangeNotAllowed", "Changing property 'zones' is not allowed.", target="zones"
            )
        self._cloud.catalog.size(
            dig(properties, "hardwareProfile.vmSize") or old.properties["hardwareProfile"]["vmSize"]
        )

    # -- parts ---------------------------------------------------------------------------------

    def _zone(self, body: Json) -> str:
        zones = body.get("zones") or []
        if len(zones) > 1:
            raise ArmError(
                400,
                "InvalidParameter",
                "Virtual machine can have at most one availability zone.",
                target="zones",
            )
        known = REGIONS[body["location"]]
        if zones and zones[0] not in known:
            raise ArmError(
                400,
                "InvalidAvailabilityZone" if known else "AvailabilityZoneNotSupported",
                f"The zone(s) '{zones[0]}' for resource is not supported. The supported zones for location "
                f"'{body['location']}' are '{','.join(known)}'",
            )
        return zones[0] if zones else ""

    def _image(self, properties: Json, location: str) -> Image:
        wanted: Json = dig(properties, "storageProfile.imageReference") or {}
        if wanted.get("id"):
            found = self._cloud.store.get(parse_id(wanted["id"]))
            if found is None:
                raise ArmError(
                    404,
                    "GalleryImageNotFound" if "/galleries/" in wanted["id"].lower() else "NotFound",
                    f"The image {wanted['id']} was not found.",
                    target="imageReference",
                )
            if "/versions/" in wanted["id"].lower():
                return self._captured(found, location)
            return Image(str(found.properties.get("hyperVGeneration", "V2")))
        words = tuple(str(wanted.get(key, "")).lower() for key in ("publisher", "offer", "sku"))
        image = IMAGES.get((words[0], words[1], words[2]))
        if image is None or wanted.get("version") not in ("latest", image.version):
            raise ArmError(
                404,
                "PlatformImageNotFound",
                f"The platform image '{':'.join(words)}:{wanted.get('version')}' is not "
                "available. Verify that "
                "all fields in the storage profile are correct. For more details about storage profile "
                "information, please refer to https://aka.ms/storageprofile",
                target="imageReference",
            )
        return image

    def _captured(self, version: Resource, location: str) -> Image:
        targets: list[Json] = version.properties["publishingProfile"]["targetRegions"]
        regions = [self._cloud.catalog.region(each["name"], version.id.type) for each in targets]
        if version.state != "Succeeded" or location not in regions:
            raise ArmError(
                404,
                "GalleryImageNotFound",
                f"The gallery image {version.id} is not available in {location} region. Please contact image "
                "owner to replicate to this region, or change your requested region.",
                target="imageReference",
            )
        definition = self._cloud.need(version.id.parent)
        generation = str(definition.properties.get("hyperVGeneration") or "V1")
        return Image(generation, size_gib=int(version.details["size_gib"]))

    def _security(self, properties: Json, version: str) -> None:
        # Before version 2025-11-01, to name "Standard" takes a feature that few subscriptions have.
        allowed = ["", "trustedlaunch", "confidentialvm"]
        if version >= "2025-11-01" or "usestandardsecuritytype" in self._cloud.features:
            allowed.append("standard")
        if str(dig(properties, "securityProfile.securityType") or "").lower() not in allowed:
            raise invalid(
                "The value of parameter securityProfile.securityType is invalid.",
                "securityProfile.securityType",
            )

    def _fits(self, size: Size, image: Image, properties: Json) -> None:
        if image.architecture != size.architecture:
            raise ArmError(
                400,
                "BadRequest",
                f"Cannot create a VM of size '{size.name}' because this VM size only supports a "
                "CPU Architecture "
                f"of '{size.architecture}', but an image or disk with CPU Architecture "
                f"'{image.architecture}' "
                "was given.",
            )
        if image.generation not in size.generations:
            raise ArmError(
                400,
                "BadRequest",
                f"The selected VM size '{size.name}' cannot boot Hypervisor Generation "
                f"'{image.generation[1:]}'.",
            )
        security = str(dig(properties, "securityProfile.securityType") or "").lower()
        if security == "trustedlaunch" and image.generation == "V1":
            raise ArmError(400, "BadRequest", "Security type 'TrustedLaunch' needs a generation 2 image.")
        smallest = dig(properties, "storageProfile.osDisk.diskSizeGB")
        if smallest is not None and smallest < image.size_gib:
            raise ArmError(
                400,
                "InvalidParameter",
                f"The specified disk size {smallest} GB is smaller than the size of the "
                "corresponding disk in "
                f"the VM image: {image.size_gib} GB. This is not allowed. Please choose equal or "
                "greater size "
                "or do not specify an explicit size.",
                target="osDisk.diskSizeGB",
            )

    def _os(self, id: ResourceId, profile: Json | None) -> None:
        if not profile:
            raise invalid("Required parameter 'osProfile' is missing (null).", "osProfile")
        computer, user = str(profile.get("computerName") or ""), str(profile.get("adminUsername") or "")
        if not computer or len(computer) > 64 or computer.strip("-.") != computer or "_" in computer:
            raise invalid(
                f"Linux host name cannot exceed 64 characters in length or contain the following characters: "
                f"` ~ ! @ # $ % ^ & * ( ) = + _ [ ] {{ }} \\ | ; : ' \" , < > / ?. It was '{computer}'.",
                "computerName",
            )
        if not user or user.lower() in BAD_USERS or user.endswith("."):
            raise invalid(
                "The Admin Username specified is not allowed." if user else "adminUsername is missing.",
                "adminUsername",
            )
        self._login(profile, user)
        self._custom_data(profile.get("customData"))

    def _login(self, profile: Json, user: str) -> None:
        linux: Json = profile.get("linuxConfiguration") or {}
        keys: list[Json] = dig(linux, "ssh.publicKeys") or []
        if linux.get("disablePasswordAuthentication") and not keys:
            raise invalid(
                "Authentication using either SSH or by user name and password must be enabled "
                "in Linux profile.",
                "linuxConfiguration",
            )
        if not keys and not profile.get("adminPassword"):
            raise invalid("Required parameter 'adminPassword' is missing (null).", "adminPassword")
        for key in keys:
            expected = f"/home/{user}/.ssh/authorized_keys"
            if key.get("path") != expected:
                raise invalid(
                    "Destination path for SSH public keys is currently limited to its default value "
                    f"{expected} due to a known issue in Linux provisioning agent.",
                    "linuxConfiguration.ssh.publicKeys.path",
                )
            if str(key.get("keyData")).split(" ")[0] not in ("ssh-rsa", "ssh-ed25519"):
                raise invalid(
                    "The value of parameter linuxConfiguration.ssh.publicKeys.keyData is invalid.",
                    "linuxConfiguration.ssh.publicKeys.keyData",
                )

    def _custom_data(self, data: object) -> None:
        if data is None:
            return
        try:
            plain = base64.b64decode(str(data), validate=True)
        except binascii.Error as err:
            raise invalid("Custom data in OSProfile must be in Base64 encoding.", "customData") from err
        if len(plain) > MOST_CUSTOM_DATA:
            raise invalid("Custom data in OSProfile is longer than 65535 characters.", "customData")

    def _disk(self, id: ResourceId, size: Size, properties: Json) -> None:
        if dig(properties, "storageProfile.osDisk.createOption") != "FromImage":
            raise invalid("The stand-in makes disks from images alone.", "osDisk.createOption")
        name = dig(properties, "storageProfile.osDisk.name")
        if name and self._cloud.store.get(id.sibling("Microsoft.Compute/disks", name)) is not None:
            raise ArmError(
                409,
                "ConflictingUserInput",
                f"Disk {name} already exists in resource group {id.group.upper()}. Only "
                "CreateOption.Attach is supported.",
            )
        kind = dig(properties, "storageProfile.osDisk.managedDisk.storageAccountType") or "Standard_LRS"
        if kind not in DISK_SKUS:
            raise invalid(f"The value '{kind}' of storageAccountType is invalid.", "osDisk.managedDisk")
        if kind.startswith("Premium") and not size.premium:
            raise invalid(
                "Requested operation cannot be performed because the VM size "
                f"{size.name} does not support the storage account type {kind} of disk.",
                "osDisk.managedDisk.storageAccountType",
            )
        option = dig(properties, "storageProfile.osDisk.deleteOption")
        if option not in (None, "Delete", "Detach"):
            raise invalid(f"Invalid value '{option}'.", "osDisk.deleteOption")

    def _spot(self, size: Size, properties: Json) -> None:
        priority, eviction = properties.get("priority", "Regular"), properties.get("evictionPolicy")
        if priority not in ("Regular", "Spot", "Low"):
            raise invalid(f"The value '{priority}' of priority is invalid.", "priority")
        if priority == "Regular" and (eviction or properties.get("billingProfile")):
            raise invalid(
                "Eviction policy and billing profile are for Spot virtual machines only.", "evictionPolicy"
            )
        if eviction not in (None, "Deallocate", "Delete"):
            raise invalid(f"The value '{eviction}' of evictionPolicy is invalid.", "evictionPolicy")
        if priority != "Regular" and not size.spot:
            raise ArmError(
                400,
                "OperationNotAllowed",
                f"Azure Spot is not supported for this VM size '{size.name}'. For more information, see "
                "http://aka.ms/AzureSpot/errormessages",
            )

    def _interfaces(self, id: ResourceId, body: Json) -> None:
        wanted: list[Json] = dig(body, "properties.networkProfile.networkInterfaces") or []
        if not wanted:
            raise invalid("The network profile must have a network interface.", "networkProfile")
        for each in wanted:
            nic = self._cloud.store.get(parse_id(reference(each)))
            if nic is None or nic.id.type.lower() != NIC.lower() or nic.location != body["location"]:
                raise ArmError(
                    400,
                    "InvalidResourceReference",
                    f"Resource {reference(each)} referenced by resource {id} was not found. Please make sure "
                    "that the referenced resource exists, and that both resources are in the same region.",
                )
            holder = nic.details.get("vm")
            if holder and holder.lower() != id.key:
                raise ArmError(
                    400,
                    "NicInUse",
                    f"Network Interface {nic.id} is used by existing resource {holder}.",
                )
