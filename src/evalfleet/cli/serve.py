"""The dashboard: serve."""

from __future__ import annotations

import argparse


def serve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", metavar="N", type=int, default=8765, help="listen here (default 8765)")
    parser.add_argument(
        "--host", metavar="ADDRESS", default="127.0.0.1", help="listen here (default 127.0.0.1)"
    )
    parser.add_argument(
        "--read-only", action="store_true", help="show runs only: nobody can steer them from the dashboard"
    )
    parser.add_argument(
        "--yes", action="store_true", help="listen even on an address that other computers can reach"
    )


def serve(args: argparse.Namespace) -> int:
    """Serve a dashboard of this home's runs to a browser, until Ctrl-C.

    The link that is printed has a token in it: whoever has it sees all runs, what agents wrote included, and
    may steer them, unless `--read-only`. Everything is read from the journal: runs know nothing of it.
    """
    from evalfleet.errors import RequestError
    from evalfleet.planning.workspace import Workspace
    from evalfleet.version import install_command

    if not 0 <= args.port <= 65_535:
        raise RequestError(f"--port {args.port} is no port: it must be from 0 to 65535")
    try:
        from evalfleet.web import listener
    except ModuleNotFoundError as err:
        if err.name not in ("starlette", "uvicorn"):
            raise
        raise RequestError(f"the dashboard needs {err.name}: {install_command('web')}") from err
    listener.check_host(args.host, args.yes)
    workspace = Workspace.here()
    has_runs = listener.check_home(workspace)
    with listener.listening(args.host, args.port) as socket:
        token = listener.kept_token(workspace.home, args.read_only)
        print(f"dashboard of {workspace.home} at {listener.link(args.host, socket, token)}", flush=True)
        if not has_runs:
            print("there are no runs here yet: each shows as soon as it is started", flush=True)
        listener.serve(workspace, socket, token, args.host, read_only=args.read_only)
    return 0
