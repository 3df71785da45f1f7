"""A stand-in for an Azure Machine Learning workspace: clusters, command jobs, and its storage account.

    with StandIn() as ml:
        client = MLClient(...)  # with ml.endpoint, ml.ca and ml.environment

It is the stand-in for Azure with one more provider. With `Paper`, the default, nodes are records, and jobs
run until somebody ends them. With `StandIn(nodes=Processes())` the container of a job is a process of this
computer with all that it begins, in a namespace of its own: pilots and mailboxes are real. With `PodmanNodes`
(containers.py) it is a real container of the job's image, pulled as the workspace's connections allow.

Afterwards `ml.left()` and `ml.meters` say what is left and what was billed. What is to go wrong is set before
or meanwhile: `ml.faults`, `ml.troubles_of_jobs`, `ml.service.quota`, `ml.preempt(...)`, `ml.kill(...)`.
"""

from __future__ import annotations

from standins.azure.faults import Refused, Throttled
from standins.cloud.faults import Failed, Late, Lost

from .nodes import Paper, Processes
from .service import Timing
from .standin import StandIn

__all__ = ["Failed", "Late", "Lost", "Paper", "Processes", "Refused", "StandIn", "Throttled", "Timing"]
