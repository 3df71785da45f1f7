"""QEMU's monitor (QMP), and its screen for browsers, also while Windows is installed, hangs, or never boots.

Both die with QEMU. The monitor talks to one at a time. What enters the container goes on to Windows, where
nothing listens on its port: who is to reach it from outside needs HOST_PORTS.
"""

import ctypes
import json
import os
import re
import signal
import socketserver
import sys
import threading

from server import Server, Viewer, picture

GREETING = {"QMP": {"version": {"qemu": {"major": 8, "minor": 2, "micro": 0}}, "capabilities": []}}
PPM = b"P6\n4 2\n255\n" + bytes(range(24))
OUTSIDE = "127.0.0.2"
PR_SET_PDEATHSIG = 1


class Monitor(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        if self.client_address[0] == OUTSIDE and not self.is_exempt():
            return
        self.say(GREETING)
        ready = False
        for line in self.rfile:
            order = json.loads(line)
            name, given = order.get("execute"), order.get("arguments", {})
            if name == "qmp_capabilities":
                ready = True
                self.say({"return": {}})
            elif not ready:
                self.refuse("Expecting capabilities negotiation")
            elif name == "screendump":
                with open(given["filename"], "wb") as file:
                    file.write(picture() if given.get("format") == "png" else PPM)
                self.say({"return": {}})
            elif name == "query-status":
                self.say({"return": {"status": "running", "running": True}})
            elif name == "system_powerdown":
                self.say({"timestamp": {"seconds": 0, "microseconds": 0}, "event": "POWERDOWN"})
                self.say({"return": {}})
                os.kill(os.getppid(), signal.SIGTERM)  # Windows hears of it, if it still hears
            else:
                self.refuse(f"The command {name} has not been found")

    def is_exempt(self) -> bool:
        return str(self.server.server_address[1]) in os.environ.get("HOST_PORTS", "").split(",")

    def refuse(self, why: str) -> None:
        self.say({"error": {"class": "CommandNotFound", "desc": why}})

    def say(self, message: dict) -> None:
        self.wfile.write(json.dumps(message).encode() + b"\r\n")


def main(arguments: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    viewer = Server(("0.0.0.0", 8006), Viewer)
    shown = threading.Thread(target=viewer.serve_forever)
    shown.start()
    asked = re.search(r"-qmp tcp:([0-9.]+):(\d+),server,nowait", arguments)
    if asked:
        socketserver.TCPServer.allow_reuse_address = True
        socketserver.TCPServer((asked[1], int(asked[2])), Monitor).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1])
