"""An agent that takes its supervisor's place: `takeover.py MACHINE VICTIM MODE`, run by a task on its host.

The supervisor is killed, and this process listens where it did. It tells that the task has scored, with a
parcel that leads to the victim; or, by MODE, it answers that another controller has been here, with nonsense,
or with a line that does not end.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import signal
import socket
import sys
from typing import Any

machine, victim, mode = sys.argv[1:]
job = os.environ["EVALFLEET_JOB"]


def record(content: bytes = b"", **fields: Any) -> bytes:
    return json.dumps(fields).encode() + b"\n" + content


def parcel() -> str:
    body = record(b"{}", file="job.json", size=2, mode=384, mtime=0) + record(folder="out", mode=448)
    body += record(link="log", to=victim) + record(link="left_out.json", to=victim)
    end = record(end=hashlib.sha256(body).hexdigest(), changed=[victim], left_out=[["a", "b", 1]])
    return base64.b64encode(body + end).decode()


def answer(message: dict[str, Any]) -> bytes:
    n, op = message.get("n"), message["op"]
    if op == "ping":
        return record(n=n, protocols=[1])
    if mode == "stale":
        return record(n=n, error="stale", detail="epoch 999 is here")
    if mode == "nonsense":
        return b"\xff nonsense\n"
    if mode == "endless":
        return b"x" * (17 << 20)
    end: dict[str, Any] = {
        "job": job,
        "reason": "exited",
        "exit_code": 0,
        "result": '{"score": 1}',
        "data": parcel(),
    }
    if op == "hello":
        return record(n=n, jobs={job: "running"}) + record(push="ended", **end)
    if op == "how":
        return record(n=n, state="ended", **end)
    return record(n=n, state="here", data=parcel())


def serve(client: socket.socket) -> None:
    with contextlib.suppress(OSError), client.makefile("rwb") as file:
        for line in file:
            file.write(answer(json.loads(line)))
            file.flush()


os.chdir(machine)
pid = int(open("supervisor.pid").read().split()[0])  # noqa: SIM115
os.kill(pid, signal.SIGKILL)
with contextlib.suppress(FileNotFoundError):
    os.unlink("supervisor.sock")
listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
listener.bind("supervisor.sock")
listener.listen(8)
while True:
    client, _ = listener.accept()
    if os.fork() == 0:
        serve(client)
        os._exit(0)
    client.close()
