"""The place `lab`: a fleet of real hosts on this computer."""

from .place import LabPlace
from .settings import LabSettings

__all__ = ["LabPlace", "LabSettings"]
