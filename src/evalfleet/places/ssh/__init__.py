"""The place `ssh`: hosts that we are lent."""

from .place import SshPlace, SshSettings

__all__ = ["SshPlace", "SshSettings"]
