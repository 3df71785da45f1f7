"""QEMU's monitor (QMP): it shows the screen also when Windows hangs, or never boots."""

import json
import re
import socketserver
import sys

GREETING = {"QMP": {"version": {"qemu": {"major": 8, "minor": 2, "micro": 0}}, "capabilities": []}}
PPM = b"P6\n4 2\n255\n" + bytes(range(24))


class Monitor(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        self.say(GREETING)
        ready = False
        for line in self.rfile:
            order = json.loads(line)
            name = order.get("execute")
            if name == "qmp_capabilities":
                ready = True
                self.say({"return": {}})
            elif not ready:
                self.say(
                    {"error": {"class": "CommandNotFound", "desc": "Expecting capabilities negotiation"}}
                )
            elif name == "screendump":
                with open(order["arguments"]["filename"], "wb") as file:
                    file.write(PPM)
                self.say({"return": {}})
            else:
                self.say(
                    {"error": {"class": "CommandNotFound", "desc": f"The command {name} has not been found"}}
                )

    def say(self, message: dict) -> None:
        self.wfile.write(json.dumps(message).encode() + b"\r\n")


def main(arguments: str) -> None:
    asked = re.search(r"-qmp tcp:([0-9.]+):(\d+),server,nowait", arguments)
    if asked:
        socketserver.ThreadingTCPServer.allow_reuse_address = True
        socketserver.ThreadingTCPServer.daemon_threads = True
        socketserver.ThreadingTCPServer((asked[1], int(asked[2])), Monitor).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1])
