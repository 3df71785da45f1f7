"""The place `ssh`: hosts that we are lent."""

from .place import SshPlace
from .settings import SshSettings

__all__ = ["SshPlace", "SshSettings"]
