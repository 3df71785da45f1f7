"""`python -I -S <this folder>`: the folder itself becomes the package, without the rest of evalfleet."""

import importlib
import os
import sys

if __name__ == "__main__":
    # last, not first: nothing beside this folder may hide a module of the standard library
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    del sys.path[0]
    sys.exit(importlib.import_module("meter.main").main(sys.argv))
