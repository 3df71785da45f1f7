"""Run as `python -I -S <this folder> DIR`, or with a verb: this folder becomes the package `supervisor`."""

import importlib
import os
import sys

if __name__ == "__main__":
    # last, not first: nothing beside this folder may hide a module of the standard library
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    del sys.path[0]
    if "/" in sys.argv[1]:
        sys.exit(importlib.import_module("supervisor.main").main(sys.argv))
    sys.exit(importlib.import_module("supervisor.verbs").verb(sys.argv[1]))
