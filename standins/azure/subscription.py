"""What a subscription says of itself: regions, providers, sizes, quota, images, rights."""

from __future__ import annotations

import re
from collections.abc import Callable

from standins.cloud.words import Answer, Call, Json

from .arm import Arm, Handler, page
from .catalog import IMAGES, REGIONS, SIZES, Image
from .cloud import NAMESPACES, Cloud
from .groups import equals
from .words import TENANT, ArmError

ROOT = "/subscriptions/{subscription}"
COMPUTE = f"{ROOT}/providers/Microsoft.Compute"
IMAGE_PATH = (
    COMPUTE + "/locations/{location}/publishers/{publisher}/artifacttypes/vmimage/offers/{offer}/skus/{sku}"
)


def display_name(region: str) -> str:
    """`East US 2`, as Azure writes a region to people."""
    words = re.sub(r"(north|south|east|west|central|us|uk|sweden|europe|\d)", r" \1", region).split()
    return " ".join(word.upper() if word in ("us", "uk") else word.capitalize() for word in words)


class Subscription:
    def __init__(self, cloud: Cloud, arm: Arm) -> None:
        self._cloud = cloud
        tables: dict[str, Callable[[Call, re.Match[str]], list[Json]]] = {
            "/tenants": self._tenants,
            "/subscriptions": lambda call, found: [self._show()],
            f"{ROOT}/locations": self._locations,
            f"{ROOT}/providers": lambda call, found: [self._provider(name) for name in NAMESPACES],
            f"{COMPUTE}/skus": self._skus,
            COMPUTE + "/locations/{location}/usages": lambda call, found: self._usages(call, found, False),
            COMPUTE + "/locations/{location}/vmSizes": self._sizes,
            ROOT + "/providers/Microsoft.Network/locations/{location}/usages": lambda call, found: (
                self._usages(call, found, True)
            ),
            f"{ROOT}/providers/Microsoft.Authorization/permissions": self._permissions,
            ROOT + "/resourceGroups/{group}/providers/Microsoft.Authorization/permissions": self._permissions,
        }
        for pattern, rows in tables.items():
            arm.route("GET", pattern, self._table(rows))
        arm.route("GET", ROOT, self._one)
        arm.route("GET", f"{ROOT}/providers/{{namespace}}", self._one_provider)
        arm.route("POST", f"{ROOT}/providers/{{namespace}}/register", self._register)
        feature = f"{ROOT}/providers/Microsoft.Features/providers/Microsoft.Compute/features/{{feature}}"
        arm.route("GET", feature, self._feature)
        arm.route("POST", f"{feature}/register", self._feature)
        arm.route("POST", f"{feature}/unregister", self._feature)
        arm.route("GET", f"{IMAGE_PATH}/versions", self._versions)
        arm.route("GET", f"{IMAGE_PATH}/versions/{{version}}", self._version)

    def _table(self, rows: Callable[[Call, re.Match[str]], list[Json]]) -> Handler:
        async def answer(call: Call, found: re.Match[str]) -> Answer:
            # sizes come in one piece of some hundred, as real lists of them do
            return page(call, rows(call, found), max(self._cloud.page_size, 1000))

        return answer

    # -- itself --------------------------------------------------------------------------------

    def _tenants(self, call: Call, found: re.Match[str]) -> list[Json]:
        return [{"id": f"/tenants/{TENANT}", "tenantId": TENANT, "displayName": "stand-in"}]

    def _show(self) -> Json:
        id = self._cloud.subscription
        return {
            "id": f"/subscriptions/{id}",
            "subscriptionId": id,
            "tenantId": TENANT,
            "displayName": "stand-in",
            "state": "Enabled",
            "subscriptionPolicies": {"locationPlacementId": "Public", "quotaId": "x", "spendingLimit": "Off"},
        }

    async def _one(self, call: Call, found: re.Match[str]) -> Answer:
        return Answer(200, self._show())

    def _locations(self, call: Call, found: re.Match[str]) -> list[Json]:
        return [
            {
                "id": f"/subscriptions/{self._cloud.subscription}/locations/{name}",
                "name": name,
                "displayName": display_name(name),
                "regionalDisplayName": display_name(name),
                "type": "Region",
                "availabilityZoneMappings": [
                    {"logicalZone": zone, "physicalZone": f"{name}-az{zone}"} for zone in zones
                ],
                "metadata": {"regionType": "Physical"},
            }
            for name, zones in REGIONS.items()
        ]

    # -- providers -----------------------------------------------------------------------------

    def _provider(self, namespace: str) -> Json:
        state = "Registered" if namespace.lower() in self._cloud.registered else "NotRegistered"
        types = [kind.type for kind in self._cloud.kinds.values() if kind.type.startswith(f"{namespace}/")]
        return {
            "id": f"/subscriptions/{self._cloud.subscription}/providers/{namespace}",
            "namespace": namespace,
            "registrationPolicy": "RegistrationRequired",
            "registrationState": state,
            "resourceTypes": [
                {
                    "resourceType": type.split("/", 1)[1],
                    "locations": [
                        display_name(region)
                        for region in REGIONS
                        if (type, region) not in self._cloud.catalog.not_made
                    ],
                    "apiVersions": ["2024-07-01"],
                }
                for type in types
            ],
        }

    def _namespace(self, found: re.Match[str]) -> str:
        for name in NAMESPACES:
            if name.lower() == found["namespace"].lower():
                return name
        raise ArmError(
            404, "InvalidResourceNamespace", f"The resource namespace '{found['namespace']}' is invalid."
        )

    async def _one_provider(self, call: Call, found: re.Match[str]) -> Answer:
        return Answer(200, self._provider(self._namespace(found)))

    async def _feature(self, call: Call, found: re.Match[str]) -> Answer:
        """Shown, registered or unregistered: what few subscriptions have."""
        name = found["feature"]
        if call.path.lower().endswith("/register"):
            self._cloud.features.add(name.lower())
        elif call.method == "POST":
            self._cloud.features.discard(name.lower())
        state = "Registered" if name.lower() in self._cloud.features else "NotRegistered"
        id = call.path.removesuffix("/register").removesuffix("/unregister")
        return Answer(
            200,
            {
                "id": id,
                "name": f"Microsoft.Compute/{name}",
                "type": "Microsoft.Features/providers/features",
                "properties": {"state": state},
            },
        )

    async def _register(self, call: Call, found: re.Match[str]) -> Answer:
        name = self._namespace(found)
        self._cloud.registered.add(name.lower())
        return Answer(200, self._provider(name))

    # -- sizes, quota, rights ------------------------------------------------------------------

    def _skus(self, call: Call, found: re.Match[str]) -> list[Json]:
        return self._cloud.catalog.skus(equals(call.asks("$filter"), "location").lower())

    def _sizes(self, call: Call, found: re.Match[str]) -> list[Json]:
        return [
            {
                "name": size.name,
                "numberOfCores": size.vcpus,
                "memoryInMB": int(size.memory_gib * 1024),
                "osDiskSizeInMB": 1047552,
                "resourceDiskSizeInMB": size.temp_disk_gib * 1024,
                "maxDataDiskCount": size.vcpus * 2,
            }
            for size in SIZES.values()
        ]

    def _usages(self, call: Call, found: re.Match[str], network: bool) -> list[Json]:
        region = self._cloud.catalog.region(found["location"], "locations/usages")
        base = call.path.removesuffix("/usages")
        return self._cloud.quota.usages(region, network=network, base=base)

    def _permissions(self, call: Call, found: re.Match[str]) -> list[Json]:
        denied = list(self._cloud.faults.denied_actions)
        return [{"actions": ["*"], "notActions": denied, "dataActions": [], "notDataActions": []}]

    # -- images --------------------------------------------------------------------------------

    def _image(self, found: re.Match[str]) -> Image:
        image = IMAGES.get((found["publisher"].lower(), found["offer"].lower(), found["sku"].lower()))
        if image is None:
            what = f"{found['publisher']}:{found['offer']}:{found['sku']}"
            raise ArmError(404, "NotFound", f"Artifact: VMImage was not found: {what}.")
        return image

    async def _versions(self, call: Call, found: re.Match[str]) -> Answer:
        version = self._image(found).version
        return Answer(200, [{"name": version, "location": found["location"], "id": f"{call.path}/{version}"}])

    async def _version(self, call: Call, found: re.Match[str]) -> Answer:
        image = self._image(found)
        if found["version"] not in (image.version, "latest"):
            raise ArmError(404, "NotFound", f"Artifact: VMImage version {found['version']} was not found.")
        properties = {
            "hyperVGeneration": image.generation,
            "architecture": image.architecture,
            "osDiskImage": {"operatingSystem": "Linux"},
            "dataDiskImages": [],
            "imageDeprecationStatus": {"imageState": "Active"},
        }
        shown = {
            "id": call.path,
            "name": image.version,
            "location": found["location"],
            "properties": properties,
        }
        return Answer(200, shown)
