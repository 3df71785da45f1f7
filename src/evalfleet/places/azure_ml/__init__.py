"""The place `azure_ml`: machines that are command jobs of an Azure Machine Learning workspace, or its compute
instances.

    settings.py   what the user may say, and what the computer knows (workspace, subscription, owner)
    place.py      jobs as a Place
    instances.py  compute instances as a Place
    template.py   what is sent: a cluster that scales to zero, an environment, a job a machine, which is a
                  pilot by mailbox (`channels/mail`)
    admit.py      the program that a new compute instance runs once
    workspace.py  the workspace's region and storage, asked for once
    monitor.py    the load of nodes that do not tell it, by Azure Monitor
    service.py    the workspace as one look shows it: jobs, clusters, mailboxes; and what their states mean
    preflight.py  what can be checked before money is spent

Nobody can reach the nodes: a machine's mailbox is a container of the workspace's own storage account. It uses
the login, the requests, the prices and the blobs of `places/azure`. Microsoft's `azure-ai-ml` is not needed;
its client is a witness in tests.
"""

from .place import AzureMlPlace
from .settings import AzureMlSettings

__all__ = ["AzureMlPlace", "AzureMlSettings"]
