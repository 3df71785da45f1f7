"""Microsoft.Compute/galleries: image definitions, and versions made of virtual machines."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from standins.cloud.words import Json

from .kind import Kind, invalid
from .store import Resource
from .vm_rules import dig
from .vms import Vm
from .words import ArmError, ResourceId, names, parse_id

if TYPE_CHECKING:
    from .cloud import Cloud

GALLERY = "Microsoft.Compute/galleries"
DEFINITION = f"{GALLERY}/images"
VERSION = f"{DEFINITION}/versions"
STORAGE = names("Standard_LRS Standard_ZRS Premium_LRS")
DISPLAYED = {
    "eastus": "East US",
    "eastus2": "East US 2",
    "westus2": "West US 2",
    "westus3": "West US 3",
    "centralus": "Central US",
    "northcentralus": "North Central US",
    "westeurope": "West Europe",
    "northeurope": "North Europe",
    "uksouth": "UK South",
    "swedencentral": "Sweden Central",
}


def kinds(cloud: Cloud) -> list[Kind]:
    return [Galleries(cloud), Definitions(cloud), Versions(cloud)]


class Galleries(Kind):
    type = GALLERY
    fields = names("description identifier sharingProfile softDeletePolicy sharingStatus")
    names = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.]{0,78}[A-Za-z0-9])?")

    def check_delete(self, resource: Resource) -> None:
        inside = [each for each in self.cloud.store if each.id.key.startswith(f"{resource.id.key}/")]
        if inside:
            raise ArmError(
                409,
                "CannotDeleteResource",
                "Can not delete resource before nested resources are deleted. Some existing nested resource "
                f"IDs include: '{inside[0].id}'.",
            )


class Definitions(Galleries):
    type = DEFINITION
    fields = names(
        "description eula privacyStatementUri releaseNoteUri osType osState hyperVGeneration endOfLifeDate "
        "identifier recommended disallowed purchasePlan features architecture allowUpdateImage"
    )
    names = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,78}[A-Za-z0-9])?")

    def check(self, id: ResourceId, body: Json, old: Resource | None) -> None:
        super().check(id, body, old)
        need_parent(self.cloud, id)
        properties: Json = body.get("properties") or {}
        for key, allowed in (
            ("osType", ("Linux", "Windows")),
            ("osState", ("Generalized", "Specialized")),
            ("hyperVGeneration", ("V1", "V2", None)),
            ("architecture", ("x64", "Arm64", None)),
        ):
            if properties.get(key) not in allowed:
                raise invalid(f"The value '{properties.get(key)}' of galleryImage.{key} is invalid.", key)
            if old is not None and properties.get(key) != old.properties.get(key):
                raise ArmError(409, "PropertyChangeNotAllowed", f"Changing property '{key}' is not allowed.")
        self._check_identifier(id, properties)

    def _check_identifier(self, id: ResourceId, properties: Json) -> None:
        wanted = [dig(properties, f"identifier.{key}") for key in ("publisher", "offer", "sku")]
        if not all(isinstance(each, str) and re.fullmatch(r"[\w.-]{1,64}", each) for each in wanted):
            raise invalid("The gallery image's identifier is missing or invalid.", "galleryImage.identifier")
        for other in self.cloud.store.children(id.parent, "images"):
            same = [dig(other.properties, f"identifier.{key}") for key in ("publisher", "offer", "sku")]
            if other.id.type == DEFINITION and other.id.key != id.key and same == wanted:
                raise ArmError(
                    409,
                    "Conflict",
                    f"A gallery image with the same identifier exists in the gallery: {other.id.name}.",
                )


class Versions(Kind):
    """Each region has a copy, which is billed from the beginning."""

    type = VERSION
    fields = names("publishingProfile storageProfile safetyProfile replicationStatus securityProfile restore")
    names = re.compile(r"\d{1,9}\.\d{1,9}\.\d{1,9}")
    can_be_preempted = True

    def check(self, id: ResourceId, body: Json, old: Resource | None) -> None:
        super().check(id, body, old)
        definition = need_parent(self.cloud, id)
        self._check_targets(body)
        if old is None:
            self._check_source(self._source(body), definition, body["location"])

    def _check_targets(self, body: Json) -> None:
        targets: list[Json] = dig(body, "properties.publishingProfile.targetRegions") or []
        regions = [self.cloud.catalog.region(each.get("name"), VERSION) for each in targets]
        if body["location"] not in regions:
            raise invalid(
                f"The target regions must include the image version's location '{body['location']}'.",
                "publishingProfile.targetRegions",
            )
        if len(set(regions)) < len(regions):
            raise invalid("The target regions have duplicates.", "publishingProfile.targetRegions")
        for each in targets:
            if each.get("storageAccountType", "Standard_LRS") not in STORAGE:
                raise invalid("Invalid storageAccountType.", "publishingProfile.targetRegions")
            if not 1 <= each.get("regionalReplicaCount", 1) <= 100:
                raise invalid("Invalid regionalReplicaCount.", "publishingProfile.targetRegions")

    def _source(self, body: Json) -> Vm:
        source: Json = dig(body, "properties.storageProfile.source") or {}
        given = parse_id(source.get("virtualMachineId") or source.get("id"))
        found = self.cloud.store.get(given)
        if not isinstance(found, Vm):
            raise ArmError(404, "NotFound", f"The source {given} was not found; the stand-in captures VMs.")
        return found

    def _check_source(self, vm: Vm, definition: Resource, location: str) -> None:
        if vm.location != location:
            raise invalid(f"The source {vm.id} is not in '{location}'.", "storageProfile.source")
        wanted, is_so = definition.properties["osState"], "Generalized" if vm.generalized else "Specialized"
        if wanted != is_so:
            raise ArmError(
                400,
                "BadRequest",
                f"The resource with id '{vm.id}' has a different OS state ['{is_so}'] than the parent "
                f"gallery image OS state ['{wanted}'].",
            )
        if vm.power != "deallocated":
            raise ArmError(409, "OperationNotAllowed", f"VM '{vm.id.name}' must be deallocated first.")

    def accept(self, resource: Resource, *, is_new: bool) -> None:
        if is_new:
            vm = self._source({"properties": resource.properties})
            resource.details["source"] = str(vm.id)
            resource.details["size_gib"] = vm.properties["storageProfile"]["osDisk"].get("diskSizeGB", 30)
        now = self.cloud.clock.now()
        for region in self.regions(resource):
            self.cloud.meters.start("image", f"{resource.id}@{region}", "Standard_LRS", region, now)

    async def bring(self, resource: Resource, is_new: bool) -> None:
        source = str(resource.details["source"])
        if is_new:
            await self.cloud.really(self.cloud.machines.capture(source, resource.id.key))
        await self.cloud.pause(self.cloud.timing.copy_s)
        if is_new and self.cloud.store.get(parse_id(source)) is None:
            raise ArmError(
                409, "OperationNotAllowed", f"The source {source} was deleted while it was copied."
            )

    def regions(self, version: Resource) -> list[str]:
        targets: list[Json] = version.properties["publishingProfile"]["targetRegions"]
        return [self.cloud.catalog.region(each["name"], VERSION) for each in targets]

    def drop(self, resource: Resource) -> None:
        super().drop(resource)
        self.cloud.machines.forget_image(resource.id.key)
        for region in self.regions(resource):
            self.cloud.meters.stop("image", f"{resource.id}@{region}", self.cloud.clock.now())

    def show(self, resource: Resource) -> Json:
        shown = super().show(resource)
        profile: Json = resource.properties["publishingProfile"]
        targets = [
            {**each, "name": DISPLAYED[region]}
            for each, region in zip(profile["targetRegions"], self.regions(resource), strict=True)
        ]
        properties = {**shown["properties"], "publishingProfile": {**profile, "targetRegions": targets}}
        return {**shown, "properties": properties}


def need_parent(cloud: Cloud, id: ResourceId) -> Resource:
    parent = cloud.store.get(id.parent)
    if parent is None:
        raise ArmError(
            404,
            "ParentResourceNotFound",
            f"Failed to perform 'write' on resource(s) of type '{id.type}', because the parent resource "
            f"'{id.parent}' could not be found.",
        )
    return parent
