"""The meter: a process on a machine that model calls go through, so that their tokens and money are counted.

Runs on hosts, with the Python they have: 3.8, standard library only.
"""
