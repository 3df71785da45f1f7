"""The place `slurm`: machines that are jobs of a cluster's queue."""

from .place import SlurmPlace
from .settings import SlurmSettings

__all__ = ["SlurmPlace", "SlurmSettings"]
