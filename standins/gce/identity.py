"""Tokens: a service account's key, signed assertions, and what they are exchanged for."""

from __future__ import annotations

import base64
import json
import re
import secrets
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from standins.cloud.words import Answer, Json

from .words import PROJECT, ApiError

EMAIL = f"tester@{PROJECT}.iam.gserviceaccount.com"
JWT_GRANT = "urn:ietf:params:oauth:grant-type:jwt-bearer"
STS_GRANT = "urn:ietf:params:oauth:grant-type:token-exchange"
WORKLOAD_TOKEN = "what-another-identity-provider-says"
USER_TOKEN = "what-gcloud-wrote-down-when-a-person-logged-in"
IMPERSONATED = re.compile(r"/v1/projects/-/serviceAccounts/([^/:]+):generateAccessToken")
METADATA_PATH = "/computeMetadata/v1/"
FLAVOR = {"Metadata-Flavor": "Google"}


class Identity:
    """One service account, and the tokens that it was given."""

    def __init__(self) -> None:
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self._tokens: dict[str, float] = {}
        self.lasts_s = 3600
        """How long a token is good for."""
        self.is_disabled = False
        """Is the account switched off?"""

    def write_key(self, path: Path, token_uri: str) -> None:
        """The file that GOOGLE_APPLICATION_CREDENTIALS names."""
        private = self._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        key = {
            "type": "service_account",
            "project_id": PROJECT,
            "private_key_id": "1",
            "private_key": private.decode(),
            "client_email": EMAIL,
            "client_id": "1",
            "token_uri": token_uri,
        }
        path.write_text(json.dumps(key))
        path.chmod(0o600)

    def exchange(self, form: dict[str, str]) -> Answer:
        """A token for a signed assertion, for what another identity provider has given a workload, or for
        what a person has who logged in."""
        good = {
            JWT_GRANT: self._is_signed(form.get("assertion", "")),
            STS_GRANT: form.get("subject_token") == WORKLOAD_TOKEN,
            "refresh_token": form.get("refresh_token") == USER_TOKEN,
        }
        if self.is_disabled or not good.get(form.get("grant_type", "")):
            return Answer(400, {"error": "invalid_grant", "error_description": "Invalid JWT Signature."})
        return Answer(200, self._new_token())

    def impersonate(self, account: str, authorization: str, order: Json) -> Answer:
        """A token of the service account, for somebody who has a token that lets him act as it."""
        try:
            self.check(authorization)
        except ApiError as error:
            return error.answer()
        if account != EMAIL or not order.get("scope"):
            return ApiError(403, "forbidden", "iam.serviceAccounts.getAccessToken denied").answer()
        made, ends = self._new_token(), datetime.now(UTC) + timedelta(seconds=self.lasts_s)
        return Answer(200, {"accessToken": made["access_token"], "expireTime": f"{ends:%Y-%m-%dT%H:%M:%SZ}"})

    def token(self) -> str:
        """A token, as somebody who has the account's key hands one on."""
        return str(self._new_token()["access_token"])

    def of_the_machine(self, path: str) -> Answer | None:
        """What the metadata server of a machine with a service account tells; None: nothing."""
        account = f"{METADATA_PATH}instance/service-accounts"
        answers: dict[str, Json | str] = {
            "/": {},
            f"{METADATA_PATH}project/project-id": PROJECT,
            f"{account}/default/": {"email": EMAIL, "scopes": [], "aliases": ["default"]},
        }
        if path in (f"{account}/default/token", f"{account}/{EMAIL}/token"):
            return Answer(200, self._new_token(), FLAVOR)
        return Answer(200, answers[path], FLAVOR) if path in answers else None

    def _new_token(self) -> Json:
        token = f"ya29.stand-in-{secrets.token_hex(16)}"  # no two stand-ins give the same one
        self._tokens[token] = time.monotonic() + self.lasts_s
        access = "urn:ietf:params:oauth:token-type:access_token"
        return {
            "access_token": token,
            "expires_in": self.lasts_s,
            "token_type": "Bearer",
            "issued_token_type": access,
        }

    def _is_signed(self, assertion: str) -> bool:
        head, _, signature = assertion.rpartition(".")
        try:
            claims: Json = json.loads(_decoded(head.partition(".")[2]))
            self._key.public_key().verify(
                _decoded(signature), head.encode(), padding.PKCS1v15(), hashes.SHA256()
            )
        except (InvalidSignature, ValueError):
            return False
        return claims.get("iss") == EMAIL and claims.get("exp", 0) > time.time()

    def check(self, header: str) -> None:
        """Raises ApiError unless the header has a token that is good."""
        token = header.removeprefix("Bearer ")
        if self._tokens.get(token, 0.0) <= time.monotonic():
            message = "Request had invalid authentication credentials."
            raise ApiError(401, "authError", message, info="ACCESS_TOKEN_EXPIRED" if token else "")

    def revoke(self, token: str = "") -> None:
        """End this token, or all that were given."""
        if token:
            del self._tokens[token]
        else:
            self._tokens.clear()


def _decoded(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
