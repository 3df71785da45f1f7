"""The channel `ssh`: a machine is a directory on a host that is reached by SSH.

    words.py       what a host is called, how it may be reached, and the ways in which it says no
    connecting.py  one connection, its host key verified
    hosts.py       one host: its connections, and the processes run over them
    asking.py      what is asked of a host: the supervisor is brought there, and its verbs are run
    bridge.py      the line to a machine's supervisor
    mover.py       files there and back
    channel.py     all of that as a Channel

Only `words` can be imported without asyncssh (`pip install 'evalfleet[ssh]'`).
"""
