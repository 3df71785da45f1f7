"""The place `azure_vm`: virtual machines of Azure, made for us and deleted after use.

    settings.py        what the user may say, and what the computer knows (subscription, owner)
    place.py           all of the following as a Place, on what `places/vm` has for every cloud
    sizes.py           sizes, and what they have
    prices.py          what can be had, and what it costs: by the list that was fetched, or the one built in
    retail.py          Azure's public price list
    names.py           names and tags: how we tell what is ours
    template.py        what is deployed in one call for a machine, with its daily stop; a region's network
    answers.py         JSON as Azure answers, and what its errors mean to us
    arm.py             requests to Azure's Resource Manager, and who we are to it
    inventory.py       what exists, by a few lists
    region_network.py  the group and the network that machines need
    lifecycle.py       VMs made, started, stopped and taken down
    galleries.py       images of machines: names, tags, what is sent and read
    capture.py         a machine becomes an image
    blobs.py           blobs of a storage account, by its key or by the login, and tokens for them
    mailboxes.py       mailboxes there, for machines that nobody can connect to
    services.py        what the services that place work on nodes share (`azure_ml`, `azure_batch`)
    leftovers.py       what evalfleet has left anywhere, by tags alone, and how it is deleted
    preflight.py       what would be made, and what can be checked before money is spent

Microsoft's libraries (the extra `azure`) are imported when the first request is made.
"""

from .place import AzurePlace
from .settings import AzureSettings

__all__ = ["AzurePlace", "AzureSettings"]
