"""Mailboxes in a bucket of S3's: a prefix each, and keys that STS makes for that prefix alone.

What a job is told is read by all who may look at jobs. So it is the address of one object, signed: the first
start takes that away, with the key and the token of the mailbox in it, and from then on the address leads
nowhere. The token may read and create what is below the prefix, and nothing else.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode, urlsplit
from xml.etree import ElementTree

from msgspec import Struct

from evalfleet.errors import FleetError, PlaceError, RequestError
from evalfleet.http_client import HttpAnswer, NoAnswer, ask
from evalfleet.model import MachineId
from evalfleet.ports import Objects, PlaceContext

from .mailbox import Mail, StoreMail
from .mailboxes import WAY, KeptMailbox, Mailboxes, PilotMarks
from .supervisor.mailbox import aws_headers, aws_signature

USER_LONGEST_S, ROLE_LONGEST_S = 36 * 3600.0, 12 * 3600.0
"""So long STS lets a token of a user live, and one of a role."""
SHORTEST_S = 900.0
ANSWER_S = 30.0
CREATES = {"Null": {"s3:if-none-match": "false"}}
"""What has the header by which nothing is overwritten."""
PLAIN = re.compile("[A-Za-z0-9._/-]*")
ABOUT = "about"
PROBE = ".evalfleet-probes"


class S3Bucket(Struct, frozen=True):
    """Where mailboxes are, by a URL and the environment, and whose keys sign for them."""

    bucket: str
    prefix: str
    region: str
    id: str
    secret: str
    token: str = ""
    endpoint: str = ""
    sts: str = ""
    role: str = ""
    """The role that tokens are of; empty: the user's."""

    @property
    def url(self) -> str:
        """The URL of the prefix, as machines ask for it."""
        host = f"{self.bucket}.s3.{self.region}.amazonaws.com"
        if self.endpoint or "." in self.bucket:  # a certificate is for one part of a name
            base = self.endpoint.rstrip("/") or f"https://s3.{self.region}.amazonaws.com"
            return f"{base}/{self.bucket}/{self.prefix}".rstrip("/")
        return f"https://{host}/{self.prefix}".rstrip("/")

    @property
    def sts_url(self) -> str:
        return (self.sts or self.endpoint or f"https://sts.{self.region}.amazonaws.com").rstrip("/") + "/"

    @property
    def longest_s(self) -> float:
        return ROLE_LONGEST_S if self.role else USER_LONGEST_S

    @property
    def keys(self) -> dict[str, str]:
        return {"id": self.id, "secret": self.secret, "token": self.token, "region": self.region}

    def __repr__(self) -> str:
        return f"S3Bucket({self.bucket!r}, {self.prefix!r}, ...)"


def s3_bucket(url: str, environ: Mapping[str, str], role: str = "") -> S3Bucket:
    """Raises RequestError."""
    parts = urlsplit(url)
    if not parts.netloc or not PLAIN.fullmatch(parts.netloc + parts.path) or parts.query:
        raise RequestError(
            f"mailbox {url!r} is no bucket's URL; write s3://BUCKET/PREFIX, of letters, digits and . _ -"
        )
    told = {name: environ.get(f"AWS_{name}", "") for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY")}
    region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or ""
    lacking = [f"AWS_{name}" for name, value in {**told, "REGION": region}.items() if not value]
    if lacking:
        raise RequestError(f"mailbox {url!r} needs {', '.join(lacking)}: set them, or put them into .env")
    endpoint = environ.get("AWS_ENDPOINT_URL", "")
    return S3Bucket(
        parts.netloc,
        parts.path.strip("/"),
        region,
        told["ACCESS_KEY_ID"],
        told["SECRET_ACCESS_KEY"],
        environ.get("AWS_SESSION_TOKEN", ""),
        environ.get("AWS_ENDPOINT_URL_S3") or endpoint,
        environ.get("AWS_ENDPOINT_URL_STS") or endpoint,
        role,
    )


def presigned(keys: Mapping[str, str], method: str, url: str, seconds: float, now: float) -> str:
    """An address by which anybody may do this one thing (AWS Signature Version 4, in the query)."""
    parts, moment = urlsplit(url), time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
    scope = f"{moment[:8]}/{keys['region']}/s3/aws4_request"
    told = {
        "X-Amz-Algorithm": "AWS4-HMAC-SHA256",
        "X-Amz-Credential": f"{keys['id']}/{scope}",
        "X-Amz-Date": moment,
        "X-Amz-Expires": f"{seconds:.0f}",
        **({"X-Amz-Security-Token": keys["token"]} if keys.get("token") else {}),
        "X-Amz-SignedHeaders": "host",
    }
    query = urlencode(told, quote_via=quote, safe="")
    request = "\n".join((method, parts.path, query, f"host:{parts.netloc}", "", "host", "UNSIGNED-PAYLOAD"))
    return f"{url}?{query}&X-Amz-Signature={aws_signature(dict(keys), moment, scope, request)}"


class S3Mailboxes(Mailboxes):
    """The mailboxes of a home below a prefix of a bucket."""

    def __init__(
        self, bucket: S3Bucket, objects: Objects, context: PlaceContext, owner: str, now: Callable[[], float]
    ) -> None:
        super().__init__(context.home)
        self.bucket = bucket
        self._objects, self._home, self._owner, self._now = objects, context.home_id, owner, now

    async def key(self, machine: MachineId) -> str:
        """Made of the user's key: so another computer of ours can tell it, too."""
        said = f"evalfleet/{self.bucket.url}/{self.name(self._home, machine)}"
        return hmac.new(self.bucket.secret.encode(), said.encode(), hashlib.sha256).hexdigest()

    @staticmethod
    def name(home: str, machine: MachineId) -> str:
        """The name of a machine's mailbox, in which no character must be quoted."""
        words = re.sub(r"[^A-Za-z0-9.-]", "_", machine)[:80]
        return f"{home}/{words}-{hashlib.sha256(machine.encode()).hexdigest()[:10]}"

    async def _open(self, machine: MachineId, seconds: float) -> Mapping[str, Any]:
        name = self.name(self._home, machine)
        keys = await self.token(name, seconds)
        told = {"machine": machine, "home": self._home, "owner": self._owner, "until": self._now() + seconds}
        try:
            await self._objects.replace(f"{name}/{ABOUT}", json.dumps(told).encode())
        except FleetError as err:
            raise _no_mailbox(err) from err
        return {"url": f"{self.bucket.url}/{name}", "sign": keys}

    async def token(self, name: str, seconds: float) -> dict[str, str]:
        """Keys for one mailbox alone. Raises PlaceError."""
        bucket = self.bucket
        arn = f"arn:aws:s3:::{bucket.bucket}/" + (f"{bucket.prefix}/" if bucket.prefix else "") + name
        may = [
            {"Effect": "Allow", "Action": ["s3:GetObject"], "Resource": f"{arn}/*"},
            {"Effect": "Allow", "Action": ["s3:PutObject"], "Resource": f"{arn}/*", "Condition": CREATES},
            {"Effect": "Allow", "Action": ["s3:PutObject", "s3:DeleteObject"], "Resource": f"{arn}/{WAY}"},
        ]
        fields = {
            "Action": "AssumeRole" if bucket.role else "GetFederationToken",
            "Version": "2011-06-15",
            **({"RoleArn": bucket.role, "RoleSessionName": "evalfleet"} if bucket.role else {}),
            **({} if bucket.role else {"Name": "evalfleet"}),
            "DurationSeconds": f"{min(max(seconds, SHORTEST_S), bucket.longest_s):.0f}",
            "Policy": json.dumps({"Version": "2012-10-17", "Statement": may}, separators=(",", ":")),
        }
        answer = await asyncio.to_thread(self._ask_sts, urlencode(fields).encode())
        told = {each.tag.rpartition("}")[2]: each.text or "" for each in _elements(answer.body)}
        if answer.code != 200 or not told.get("SessionToken"):
            raise _no_token(answer.code, told)
        return {
            "id": told["AccessKeyId"],
            "secret": told["SecretAccessKey"],
            "token": told["SessionToken"],
            "region": bucket.region,
        }

    def _ask_sts(self, body: bytes) -> HttpAnswer:
        url = self.bucket.sts_url
        headers = aws_headers(self.bucket.keys, "POST", url, body, self._now() - time.time(), "sts")
        headers["Content-Type"] = "application/x-www-form-urlencoded"
        try:
            return ask(url, body, headers, timeout_s=ANSWER_S)
        except NoAnswer as err:
            raise PlaceError(f"STS does not answer: {err}", transient=True, scope="place") from err

    async def _hand_over(
        self, machine: MachineId, box: Mapping[str, Any], seconds: float
    ) -> Mapping[str, Any]:
        name, way = self.name(self._home, machine), box["way"]
        seconds, now = min(seconds, self.bucket.longest_s), self._now()
        program = presigned(way["sign"], "GET", f"{way['url']}/{box['program']}", seconds, now)
        try:
            await self._objects.replace(f"{name}/{WAY}", json.dumps({**box, "from": program}).encode())
        except FleetError as err:
            raise _no_mailbox(err) from err
        take = {
            method: presigned(way["sign"], method, f"{way['url']}/{WAY}", seconds, now)
            for method in ("GET", "DELETE", "PUT")
        }
        # a token that may not list is not told that there is nothing
        return {"take": take, "headers": {}, "absent": 403, "tidy": True}

    def mail(self, machine: MachineId) -> Mail:
        async def opened() -> Objects:
            return self._objects

        return StoreMail(opened, self.name(self._home, machine))

    async def marks_of(self, machines: Mapping[MachineId, PilotMarks]) -> Mapping[MachineId, PilotMarks]:
        """The marks of several machines at once. Raises PlaceError."""
        found = await asyncio.gather(*(self.marks(machine, known) for machine, known in machines.items()))
        return dict(zip(machines, found, strict=True))

    async def remove(self, machine: MachineId) -> None:
        await self._remove(self.name(self._home, machine))

    async def all(self) -> Sequence[KeptMailbox]:
        try:
            names = [name for name in await self._objects.names("") if name.endswith(f"/{ABOUT}")]
            told = [(name, await self._objects.read(name, 1 << 16)) for name in names]
        except FleetError as err:
            raise _no_mailbox(err) from err
        kept = [_kept(name, content) for name, content in told]
        return [box for box in kept if box is not None]

    async def remove_kept(self, box: KeptMailbox) -> None:
        await self._remove(box.name)

    async def _remove(self, name: str) -> None:
        try:
            names = await self._objects.names(f"{name}/")
            # what tells of it goes last: who is killed meanwhile has left nothing that is not seen
            last = [each for each in names if each == f"{name}/{ABOUT}"]
            for some in ([each for each in names if each not in last], last):
                if some:
                    await self._objects.remove(some)
        except FleetError as err:
            raise _no_mailbox(err) from err

    # -- for those who look before they run ------------------------------------------------------------

    async def plant(self, probe: str, seconds: float) -> str:
        """The address of an object that nodes must be able to read. Raises PlaceError."""
        name = f"{PROBE}/{probe}"
        keys = await self.token(name, SHORTEST_S)
        try:
            await self._objects.replace(f"{name}/seen", b"seen")
        except FleetError as err:
            raise _no_mailbox(err) from err
        return presigned(keys, "GET", f"{self.bucket.url}/{name}/seen", seconds, self._now())

    async def uproot(self, probe: str) -> None:
        await self._remove(f"{PROBE}/{probe}")


def _elements(body: bytes) -> Sequence[ElementTree.Element]:
    try:
        return list(ElementTree.fromstring(body).iter())
    except ElementTree.ParseError:
        return ()


def _no_token(code: int, told: Mapping[str, str]) -> PlaceError:
    said = ": ".join(filter(None, (told.get("Code"), told.get("Message")))) or f"it answers {code}"
    transient = code >= 500 or code == 429 or told.get("Code") == "Throttling"
    hint = "" if transient else "; use the keys of an IAM user, or name a role in `mailbox_role` of the place"
    return PlaceError(
        f"STS gives no token for one mailbox alone ({said}){hint}", transient=transient, scope="place"
    )


def _no_mailbox(err: FleetError) -> PlaceError:
    return PlaceError(f"the mailbox: {err}", transient=not isinstance(err, RequestError), scope="place")


def _kept(name: str, content: bytes | None) -> KeptMailbox | None:
    try:
        told = json.loads(content or b"")
        machine, home, owner = (str(told[word]) for word in ("machine", "home", "owner"))
        until = float(told["until"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return KeptMailbox(MachineId(machine), home, owner, until, name.removesuffix(f"/{ABOUT}"))
