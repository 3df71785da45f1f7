"""What the stand-ins for all of Azure's services have in common: their clients sign in by Entra ID."""

from __future__ import annotations

from aiohttp import web

from lab.network import GATEWAY
from standins.cloud.background import Background
from standins.cloud.clock import Clock
from standins.cloud.machines import Machines
from standins.cloud.server import ApiServer
from standins.cloud.standin import LOOPBACK, CloudStandIn
from standins.cloud.words import Answer, Call

from .identity import CLIENT_ID, CLIENT_SECRET, IDENTITY_HEADER, Identity
from .words import SUBSCRIPTION, TENANT

MSI_PATH = "/msi/token"


class EntraServer(ApiServer):
    """A server that also gives tokens, as Entra ID and a managed identity do."""

    def __init__(self, clock: Clock, background: Background, identity: Identity) -> None:
        super().__init__(clock, background)
        self._identity = identity

    async def _token(self, call: Call, request: web.Request) -> Answer | None:
        """None if it is not Entra ID who is asked."""
        lower = call.path.lower()
        if lower == MSI_PATH:
            return self._identity.managed_token(call, request.headers.get("X-IDENTITY-HEADER", ""))
        if lower.endswith("/v2.0/.well-known/openid-configuration"):
            return self._identity.configuration(call.base)
        if lower == f"/{TENANT}/oauth2/v2.0/token" and call.method == "POST":
            form = await request.post()
            return self._identity.client_token({key: str(value) for key, value in form.items()})
        return None


class EntraStandIn(CloudStandIn):
    """A stand-in whose clients sign in by Entra ID."""

    subscription, tenant = SUBSCRIPTION, TENANT
    client_id, client_secret = CLIENT_ID, CLIENT_SECRET

    def __init__(self, name: str, machines: Machines | None, speed: float) -> None:
        super().__init__(name, machines, speed)
        self.identity = Identity()

    @property
    def endpoint(self) -> str:
        return f"https://{LOOPBACK}:{self._ports[0]}"

    @property
    def environment(self) -> dict[str, str]:
        """What makes DefaultAzureCredential work on this computer; inside the lab: `environment_inside`."""
        return {
            "IDENTITY_ENDPOINT": f"http://{LOOPBACK}:{self._ports[1]}{MSI_PATH}",
            "IDENTITY_HEADER": IDENTITY_HEADER,
            "REQUESTS_CA_BUNDLE": str(self.ca),
            "SSL_CERT_FILE": str(self.ca),
            "AZURE_SUBSCRIPTION_ID": SUBSCRIPTION,
        }

    @property
    def environment_inside(self) -> dict[str, str]:
        there = self.environment["IDENTITY_ENDPOINT"].replace(LOOPBACK, GATEWAY)
        return {**self.environment, "IDENTITY_ENDPOINT": there}

    def service_principal(self, *, inside: bool = False) -> dict[str, str]:
        """The variables of a service principal that may do everything."""
        return {
            "AZURE_TENANT_ID": TENANT,
            "AZURE_CLIENT_ID": CLIENT_ID,
            "AZURE_CLIENT_SECRET": CLIENT_SECRET,
            "AZURE_AUTHORITY_HOST": self.endpoint_inside if inside else self.endpoint,
            "AZURE_SUBSCRIPTION_ID": SUBSCRIPTION,
        }

    def token(self) -> str:
        return self.do(self.identity.token)
