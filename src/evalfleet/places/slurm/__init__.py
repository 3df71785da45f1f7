"""The place `slurm`: machines that are jobs of a cluster's queue."""

from .place import SlurmPlace, SlurmSettings

__all__ = ["SlurmPlace", "SlurmSettings"]
