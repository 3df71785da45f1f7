"""The place `lab`: a fleet of real hosts on this computer."""

from .place import LabPlace, LabSettings

__all__ = ["LabPlace", "LabSettings"]
