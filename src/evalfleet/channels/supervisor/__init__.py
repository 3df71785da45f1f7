"""The resident supervisor of one machine. It starts jobs, watches them, and reports how they end.

Stdlib only, Python 3.8 and later: it runs on hosts with the Python they have, as this folder or as the one
file that `evalfleet.channels.program` makes of it. `python -I -S supervisor DIR` returns once a supervisor
listens on DIR/supervisor.sock; there is one a directory (flock).

It speaks JSON lines: requests {op, n, ...}, answers {n, ...} or {n, error, detail}, pushes {push, ...}. The
first message shows the machine's `key`, which is in DIR/key for whoever logs in as its owner: without it
nothing is answered. It is `hello`; what a place itself asks (ping, expire, quit) needs none.

An attempt is a job here: start.py starts it, watch.py watches it, end.py ends it. isolation.py keeps it apart
from the others, and jobs.py keeps the list of all of them. server.py listens, and verbs.py answers over SSH.

DIR/jobs/<name>/ holds job.json (no secret), pid and exit (written by the job's own `sh` wrapper, so that
neither needs this process to live), why (the reason, when we ended it), work/, out/ and log.
"""
