"""Who may ask: tokens, as Entra ID and a managed identity give them."""

from __future__ import annotations

import base64
import json
import secrets
import time
from collections.abc import Collection

from standins.cloud.words import Answer, Call, Json

from .words import TENANT, ArmError

CLIENT_ID = "00000000-1111-2222-3333-444444444444"
CLIENT_SECRET = "stand-in-secret"
IDENTITY_HEADER = "stand-in-identity"
_PUBLIC = ("https://management.azure.com", "https://management.core.windows.net")
RESOURCE_MANAGER = tuple(f"{each}{slash}" for each in _PUBLIC for slash in ("/", ""))
STORAGE = ("https://storage.azure.com/", "https://storage.azure.com")
BATCH = ("https://batch.core.windows.net/",)
"""What a token must be for to let in to each API. Batch's trailing slash must be there."""
WRONG_AUDIENCE = "InvalidAuthenticationTokenAudience"
UNKNOWN = "The access token is invalid."
EXPIRED = "The access token expiry UTC time is earlier than current UTC time."


class Identity:
    """Tokens live for `lifetime_s`, of real time, since clients reckon with theirs."""

    def __init__(self) -> None:
        self.lifetime_s = 3600.0
        self.refuses = False
        """Are credentials turned down?"""
        self.more: Json = {}
        """What else tokens say."""
        self._valid: dict[str, tuple[str, float]] = {}
        """By token, its audience and when it expires."""

    def token(self, audience: str = RESOURCE_MANAGER[0]) -> str:
        """Looks like a real one, but is signed by nobody."""
        expires = time.time() + self.lifetime_s
        claims = {
            "aud": audience,
            "tid": TENANT,
            "oid": CLIENT_ID,
            "appid": CLIENT_ID,
            "exp": int(expires),
            **self.more,
        }
        words = [_coded({"alg": "none", "typ": "JWT"}), _coded(claims), secrets.token_urlsafe(16)]
        token = ".".join(words)
        self._valid[token] = audience, expires
        return token

    def check(self, authorization: str, audiences: Collection[str]) -> None:
        """Raises ArmError unless the token is valid and for one of these."""
        kind, _, token = authorization.partition(" ")
        if kind.lower() != "bearer" or token not in self._valid:
            raise _unauthorised(
                "AuthenticationFailed" if token else "AuthenticationFailedMissingToken", UNKNOWN
            )
        audience, expires = self._valid[token]
        if expires < time.time():
            raise _unauthorised("ExpiredAuthenticationToken", EXPIRED)
        if audience not in audiences:
            raise _unauthorised(
                WRONG_AUDIENCE,
                f"The access token has been obtained from wrong audience or resource '{audience}'. It should "
                "exactly match (including forward slash) with one of the allowed audiences "
                + ", ".join(f"'{each}'" for each in audiences),
            )

    # -- Entra ID ------------------------------------------------------------------------------

    def endpoints(self, base: str) -> Json:
        """What `az cloud register --endpoint-resource-manager` asks for."""
        return {
            "name": "stand-in",
            "resourceManager": base,
            "portal": base,
            "graph": base,
            "graphAudience": base,
            "gallery": base,
            "batch": base,
            "media": base,
            "sqlManagement": base,
            "vmImageAliasDoc": f"{base}/aliases.json",
            "activeDirectoryDataLake": base,
            "authentication": {
                "loginEndpoint": base,
                "audiences": ["https://management.azure.com", "https://management.core.windows.net/"],
                "tenant": TENANT,
                "identityProvider": "AAD",
            },
            "suffixes": {"storage": "core.windows.net", "keyVaultDns": "vault.azure.net"},
        }

    def configuration(self, base: str) -> Answer:
        here = f"{base}/{TENANT}"
        return Answer(
            200,
            {
                "token_endpoint": f"{here}/oauth2/v2.0/token",
                "authorization_endpoint": f"{here}/oauth2/v2.0/authorize",
                "device_authorization_endpoint": f"{here}/oauth2/v2.0/devicecode",
                "issuer": f"{here}/v2.0",
                "jwks_uri": f"{here}/discovery/v2.0/keys",
            },
        )

    def client_token(self, form: dict[str, str]) -> Answer:
        good = (form.get("client_id"), form.get("client_secret")) == (CLIENT_ID, CLIENT_SECRET)
        if self.refuses or not good:
            return Answer(
                401,
                {
                    "error": "invalid_client",
                    "error_description": "AADSTS7000215: Invalid client secret provided.",
                    "error_codes": [7000215],
                },
            )
        seconds = int(self.lifetime_s)
        return Answer(
            200,
            {
                "token_type": "Bearer",
                "expires_in": seconds,
                "ext_expires_in": seconds,
                "access_token": self.token(form.get("scope", "").partition(" ")[0].removesuffix("/.default")),
            },
        )

    # -- managed identity ----------------------------------------------------------------------

    def managed_token(self, call: Call, header: str) -> Answer:
        if self.refuses or header != IDENTITY_HEADER:
            return Answer(401, {"statusCode": 401, "message": "The identity header is wrong."})
        return Answer(
            200,
            {
                "access_token": self.token(call.asks("resource")),
                "expires_on": str(int(time.time() + self.lifetime_s)),
                "resource": call.asks("resource"),
                "token_type": "Bearer",
                "client_id": CLIENT_ID,
            },
        )


def _coded(value: Json) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


def _unauthorised(code: str, message: str) -> ArmError:
    hint = f'Bearer authorization_uri="https://login.microsoftonline.com/{TENANT}", error="invalid_token"'
    return ArmError(401, code, message, headers={"WWW-Authenticate": hint})
