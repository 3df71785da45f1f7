"""The channel `ssh`: a machine is a directory on a host that is reached by SSH.

    target.py      what a host is called, how it may be reached, and the ways in which it says no
    connection.py  one connection, its host key verified
    hosts.py       one host: its connections, and the processes run over them
    host_home.py   what is asked of a host: the supervisor is brought there, and its verbs are run
    channel.py     the line to a machine's supervisor, files there and back, and all of that as a Channel

Only `target` can be imported without asyncssh (the extra `ssh`).
"""
