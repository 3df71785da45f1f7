"""What runs on a machine: `python3 -m waa.host VERB`. Stdlib only, Python 3.8.

Every verb may be repeated: it looks first, and does what is missing.
"""
