"""A stand-in for S3: objects are moto's, and keys mean what they mean at Amazon's.

moto lets everybody in. Here each request must be signed right (by botocore's own reckoning) by the user's
key, in a header or in its address. With `conditional=False` it overwrites what it is asked to
create, as s3rver and rclone's server do. `python -m standins.s3` serves one bucket until Ctrl-C.
"""

from __future__ import annotations

import io
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qsl, quote

from botocore.auth import S3SigV4Auth, S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.s3.models import s3_backends
from werkzeug.serving import make_server

from standins import by_hand

BUCKET, REGION = "bucket", "us-east-1"
OWN = ("AKIAUSER", "a secret of the user's")
SKEW_S = 900.0
Respond = Callable[[str, list[tuple[str, str]]], Any]


class Refused(Exception):
    """An answer other than yes: status, code and words."""


class S3:
    """The application, with moto behind it."""

    def __init__(self, *, conditional: bool = True) -> None:
        s3_backends.reset()
        s3_backends["123456789012"]["aws"].create_bucket(BUCKET, REGION)
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._conditional = conditional

    def __call__(self, environ: dict[str, Any], respond: Respond) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        try:
            self._check_signature(environ, body)
        except Refused as err:
            status, code, words = err.args
            text = f"<Error><Code>{code}</Code><Message>{words}</Message></Error>"
            return self._answer(respond, f"{status} Refused", text)
        if not self._conditional:
            environ.pop("HTTP_IF_NONE_MATCH", None)
        answer: Iterable[bytes] = self._moto({**environ, "wsgi.input": io.BytesIO(body)}, respond)
        return answer

    def _answer(self, respond: Respond, status: str, text: str) -> Iterable[bytes]:
        content = text.encode()
        respond(status, [("Content-Type", "text/xml"), ("Content-Length", str(len(content)))])
        return [content]

    # -- who asks ------------------------------------------------------------------------------

    def _check_signature(self, environ: Mapping[str, Any], body: bytes) -> None:
        query = dict(parse_qsl(environ["QUERY_STRING"], keep_blank_values=True))
        said = str(environ.get("HTTP_AUTHORIZATION", ""))
        by_query = "X-Amz-Signature" in query
        if by_query:
            credential, moment = query["X-Amz-Credential"], query["X-Amz-Date"]
            given, names = query["X-Amz-Signature"], query["X-Amz-SignedHeaders"]
        elif said.startswith("AWS4-HMAC-SHA256 "):
            fields = dict(part.strip().split("=", 1) for part in said.split(" ", 1)[1].split(","))
            credential, given, names = fields["Credential"], fields["Signature"], fields["SignedHeaders"]
            moment = str(environ.get("HTTP_X_AMZ_DATE", ""))
        else:
            raise Refused(403, "AccessDenied", "Access Denied")
        key, _, _, service, _ = credential.split("/")
        if key != OWN[0]:
            raise Refused(403, "InvalidAccessKeyId", "There is no such key")
        at = time.mktime(time.strptime(moment, "%Y%m%dT%H%M%SZ")) - time.timezone
        if by_query and time.time() > at + float(query["X-Amz-Expires"]):
            raise Refused(403, "AccessDenied", "Request has expired")
        if not by_query and abs(time.time() - at) > SKEW_S:
            raise Refused(403, "RequestTimeTooSkewed", "The difference is too large")
        request = self._request(environ, query, names, body, moment)
        kind = S3SigV4QueryAuth if by_query else S3SigV4Auth
        signer = kind(Credentials(*OWN), service, REGION)
        text = signer.string_to_sign(request, signer.canonical_request(request))
        if signer.signature(text, request) != given:
            raise Refused(403, "SignatureDoesNotMatch", "The request signature does not match")

    def _request(
        self, environ: Mapping[str, Any], query: Mapping[str, str], names: str, body: bytes, moment: str
    ) -> AWSRequest:
        """What was signed, as botocore would have it."""
        headers: dict[str, str] = {}
        for name in names.split(";"):
            variable = name.upper().replace("-", "_")
            headers[name] = str(environ.get(variable if name == "content-type" else f"HTTP_{variable}", ""))
        signed = {name: value for name, value in query.items() if name != "X-Amz-Signature"}
        path = quote(environ["PATH_INFO"], safe="/-_.~")
        text = "&".join(f"{quote(k, safe='-_.~')}={quote(v, safe='-_.~')}" for k, v in sorted(signed.items()))
        url = f"http://{environ['HTTP_HOST']}{path}" + (f"?{text}" if text else "")
        request = AWSRequest(environ["REQUEST_METHOD"], url, headers, body)
        request.context["timestamp"] = moment
        return request


def contents() -> dict[str, bytes]:
    """Return all that is in the bucket of a stand-in in this process."""
    keys = s3_backends["123456789012"]["aws"].buckets[BUCKET].keys
    return {name: key.value for name, key in list(keys.items())}


def environ_of(url: str) -> dict[str, str]:
    """The variables by which it is reached."""
    id, secret = OWN
    return {
        "AWS_ACCESS_KEY_ID": id,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_REGION": REGION,
        "AWS_ENDPOINT_URL": url,
    }


@contextmanager
def serving(*, conditional: bool = True) -> Iterator[str]:
    """Serve one bucket meanwhile; the address."""
    server = make_server("127.0.0.1", 0, S3(conditional=conditional), threaded=False)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def main(argv: list[str]) -> int:
    by_hand.parser("s3", "A bucket of S3 on this computer, until Ctrl-C.").parse_args(argv)
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # it would tell each request
    return by_hand.serve("s3", serving, lambda url: by_hand.bucket_guide(environ_of(url), f"s3://{BUCKET}"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
