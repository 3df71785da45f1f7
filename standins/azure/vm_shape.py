"""What a virtual machine's body may have, and what of it never changes."""

from __future__ import annotations

from typing import Any

from .words import names

BAD_USERS = names(
    "administrator admin user user1 test user2 test1 user3 admin1 1 123 a actuser adm admin2 "
    "aspnet backup console "
    "david guest john owner root server sql support support_388945a0 sys test2 test3 user4 user5"
)
DISK_SKUS = {
    "Premium_LRS": "PremiumDiskCount",
    "Premium_ZRS": "PremiumDiskCount",
    "StandardSSD_LRS": "StandardSSDDiskCount",
    "StandardSSD_ZRS": "StandardSSDDiskCount",
    "Standard_LRS": "StandardDiskCount",
}
ANY = None
KNOWN: dict[str, Any] = {
    "hardwareProfile": {"vmSize": ANY, "vmSizeProperties": ANY},
    "storageProfile": {
        "imageReference": dict.fromkeys(
            names("publisher offer sku version exactVersion id sharedGalleryImageId communityGalleryImageId")
        ),
        "osDisk": {
            **dict.fromkeys(
                ("osType", "name", "caching", "createOption", "diskSizeGB", "deleteOption", "vhd")
            ),
            **dict.fromkeys(("writeAcceleratorEnabled", "image", "encryptionSettings")),
            "diffDiskSettings": dict.fromkeys(("option", "placement")),
            "managedDisk": dict.fromkeys(
                ("id", "storageAccountType", "diskEncryptionSet", "securityProfile")
            ),
        },
        "dataDisks": ANY,
        "diskControllerType": ANY,
    },
    "additionalCapabilities": dict.fromkeys(("ultraSSDEnabled", "hibernationEnabled")),
    "osProfile": {
        **dict.fromkeys(("computerName", "adminUsername", "adminPassword", "customData", "secrets")),
        **dict.fromkeys(("allowExtensionOperations", "requireGuestProvisionSignal", "windowsConfiguration")),
        "linuxConfiguration": {
            **dict.fromkeys(("disablePasswordAuthentication", "provisionVMAgent", "patchSettings")),
            "enableVMAgentPlatformUpdates": ANY,
            "ssh": {"publicKeys": [{"path": ANY, "keyData": ANY}]},
        },
    },
    "networkProfile": {
        "networkInterfaces": [{"id": ANY, "properties": {"primary": ANY, "deleteOption": ANY}}],
        "networkApiVersion": ANY,
        "networkInterfaceConfigurations": ANY,
    },
    "securityProfile": dict.fromkeys(
        ("securityType", "uefiSettings", "encryptionAtHost", "proxyAgentSettings")
    ),
    "diagnosticsProfile": {"bootDiagnostics": {"enabled": ANY, "storageUri": ANY}},
    **dict.fromkeys(("priority", "evictionPolicy", "userData", "licenseType", "extensionsTimeBudget")),
    **dict.fromkeys(("availabilitySet", "virtualMachineScaleSet", "proximityPlacementGroup", "hostGroup")),
    **dict.fromkeys(("host", "platformFaultDomain", "applicationProfile", "capacityReservation")),
    "billingProfile": {"maxPrice": ANY},
    "scheduledEventsProfile": ANY,
    **dict.fromkeys(("provisioningState", "vmId", "timeCreated", "instanceView")),  # read-only
}
FIXED = (
    "osProfile.adminUsername",
    "osProfile.customData",
    "osProfile.computerName",
    "priority",
    "storageProfile.imageReference.id",
    "storageProfile.imageReference.sku",
    "storageProfile.osDisk.name",
)
