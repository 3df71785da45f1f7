"""The place `azure_batch`: machines that are jobs of an Azure Batch account, each with a node of its own.

    settings.py   what the user may say, and what the computer knows (account, region, owner)
    place.py      all of the following as a Place, on what `places/vm` has for every machine that SSH leads to
    template.py   what is sent: a job that brings its own pool of one node, and its one task, the pilot
    pilot.py      the program of that task, on the node
    registry.py   the login to a private registry of container images
    storage.py    the account as the Resource Manager shows it, and the storage of its mailboxes
    service.py    the account as one look shows it: jobs, pools, nodes; and what their states mean
    preflight.py  what can be checked before money is spent

It uses the login, the requests and the prices of `places/azure`. Microsoft's `azure-batch` is not needed: all
calls are JSON by the same pipeline, and the types of that library check them in tests.
"""

from .place import AzureBatchPlace
from .settings import AzureBatchSettings

__all__ = ["AzureBatchPlace", "AzureBatchSettings"]
