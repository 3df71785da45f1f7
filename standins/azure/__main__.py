"""`python -m standins.azure`: an Azure on this computer, until Ctrl-C. Its machines are records, or hosts."""

from __future__ import annotations

import argparse
import signal
import sys
import threading

from evalfleet.lab import Lab

from . import Hosts, StandIn, Timing

SOON = Timing((0.0, 0.1), (0.0, 0.1), (1.0, 3.0), (0.0, 0.1), (0.0, 0.1))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m standins.azure", description=__doc__)
    parser.add_argument("--hosts", action="store_true", help="machines are lab hosts with an sshd (as root)")
    args = parser.parse_args(argv)
    if args.hosts and (missing := Lab.missing()):
        print(f"standins.azure: --hosts cannot work here: {missing}", file=sys.stderr)
        return 2
    over = threading.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, lambda signum, frame: over.set())
    with StandIn(Hosts() if args.hosts else None, timing=SOON) as azure:
        print(instructions(azure), flush=True)
        over.wait()
    return 0


def instructions(azure: StandIn) -> str:
    """What a client needs: the environment, and a place for evalfleet.toml."""
    variables = {
        "AZURE_TENANT_ID": azure.tenant,
        "AZURE_CLIENT_ID": azure.client_id,
        "AZURE_CLIENT_SECRET": azure.client_secret,
        "AZURE_AUTHORITY_HOST": azure.endpoint,
        "REQUESTS_CA_BUNDLE": str(azure.ca),
    }
    exports = "\n".join(f"export {name}={value}" for name, value in variables.items())
    place = {
        "kind": "azure_vm",
        "subscription": azure.subscription,
        "resource_group": "rg",
        "endpoint": azure.endpoint,
        "ca": str(azure.ca),
    }
    keys = "\n".join(f'{key} = "{value}"' for key, value in place.items())
    return f'{exports}\n\n# evalfleet.toml\n[places.standin]\n{keys}\nssh_from = ["*"]\n\n# Ctrl-C ends it'


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
