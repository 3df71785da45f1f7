"""As much of `requests` as the client uses."""

import json as jsons
import urllib.error
import urllib.request

from . import exceptions


class Response:
    def __init__(self, status_code: int, content: bytes) -> None:
        self.status_code = status_code
        self.content = content

    def json(self):
        return jsons.loads(self.content)


def get(url: str, timeout=None) -> Response:
    return _ask(urllib.request.Request(url), timeout)


def post(url: str, json: dict, timeout=None) -> Response:
    return _ask(
        urllib.request.Request(url, jsons.dumps(json).encode(), {"Content-Type": "application/json"}), timeout
    )


def _ask(request: urllib.request.Request, timeout) -> Response:
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return Response(answer.status, answer.read())
    except urllib.error.HTTPError as err:
        return Response(err.code, err.read())
    except OSError as err:
        host, _, port = request.host.partition(":")
        pool = f"HTTPConnectionPool(host='{host}', port={port})"
        raise exceptions.ConnectionError(f"{pool}: Max retries exceeded (Caused by {err!r})") from err
