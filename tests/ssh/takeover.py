"""An agent that takes its supervisor's place: `takeover.py MACHINE VICTIM MODE`, run by a task on its host.

The supervisor is killed, and this process listens where it did. It tells that the task has scored, with a
parcel that leads to the victim; or, by MODE, it answers that another controller has been here, with nonsense,
or with a line that does not end. With MODE `speak` it leaves the supervisor alone and speaks to it as a
controller would that has not read the machine's key; what it hears is among the task's artefacts.
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


def speak(op: str, **body: Any) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX) as sock, sock.makefile("rwb") as file:
        sock.connect("supervisor.sock")
        file.write(record(op=op, n=1, **body))
        file.flush()
        heard: dict[str, Any] = json.loads(file.readline())
        return heard


os.chdir(machine)
if mode == "speak":
    run = next(iter(json.load(open("epoch"))))  # noqa: SIM115
    heard = [
        speak("hello", protocols=[1], run=run, epoch=10**9, key="0" * 64),
        speak("expire", seconds=1e9),
        speak("leave", run=run, epoch=10**9, now=True),
        speak("quit"),
    ]
    with open(os.path.join(os.environ["EVALFLEET_OUT"], "heard.json"), "w") as file:
        json.dump(heard, file)
    sys.exit()
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
