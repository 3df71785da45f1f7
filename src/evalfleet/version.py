"""The version, alone, so that anything may know it."""

__version__ = "0.1.0"
