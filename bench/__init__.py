"""How fast evalfleet is, and how large it may get: `python -m bench` lists what is measured."""
