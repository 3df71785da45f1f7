"""QEMU's monitor, from inside the container. Without it the client does not start, and sees nothing."""

import json
import socket


class VMController:
    def __init__(self, host: str = "localhost", port: int = 7200) -> None:
        self.address = (host, port)

    def get_status(self) -> dict:
        return self.order("query-status")

    def take_screenshot(self) -> bytes:
        path = "/tmp/screenshot.png"
        self.order("screendump", filename=path, format="png")
        with open(path, "rb") as file:
            return file.read()

    def order(self, name: str, **arguments: str) -> dict:
        try:
            with socket.create_connection(self.address, 5) as line, line.makefile("rwb") as file:
                file.readline()
                for order in ({"execute": "qmp_capabilities"}, {"execute": name, "arguments": arguments}):
                    file.write(json.dumps(order).encode() + b"\n")
                    file.flush()
                    answer = json.loads(file.readline())
                return answer["return"]
        except (OSError, ValueError) as err:
            raise ConnectionError(f"Failed to connect to QMP: {err}") from err
