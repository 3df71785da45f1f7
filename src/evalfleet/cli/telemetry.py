"""Runs for Prometheus and OpenTelemetry: metrics, traces."""

from __future__ import annotations

import argparse


def metrics_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="?", help="print this run's metrics, and end")
    parser.add_argument(
        "--push", metavar="URL", help="give RUN's metrics to a Pushgateway instead of printing them"
    )
    parser.add_argument("--port", metavar="N", type=int, default=9464, help="listen here (default 9464)")
    parser.add_argument(
        "--host", metavar="ADDRESS", default="127.0.0.1", help="listen here (default 127.0.0.1)"
    )
    parser.add_argument(
        "--ended",
        metavar="DURATION",
        default="1h",
        help="keep serving a run for this long after its end (default 1h)",
    )


def metrics(args: argparse.Namespace) -> int:
    """Serve the metrics of all runs of this home to Prometheus, at /metrics, until Ctrl-C.

    They are read from the journal, so the runs may belong to any process, and nothing delays them. For runs
    that are over before Prometheus comes by, `evalfleet metrics RUN --push URL` gives them to a Pushgateway.
    """
    from evalfleet.api import runs, telemetry
    from evalfleet.channels.samples import read_loads
    from evalfleet.errors import RequestError
    from evalfleet.planning.values import parse_duration
    from evalfleet.planning.workspace import Workspace
    from evalfleet.views.metrics import exposition

    workspace = Workspace.here()
    if args.push is not None:
        run = runs.open_run(workspace, args.run)
        print(f"pushed to {telemetry.push(run, args.push)}")
        return 0
    if args.run is not None:
        run = runs.open_run(workspace, args.run)
        state = run.state()
        print(exposition([(state, read_loads(run.home, state.ready))], workspace.now()), end="")
        return 0
    if not 0 <= args.port <= 65_535:
        raise RequestError(f"--port {args.port} is no port: it must be from 0 to 65535")
    exporter = telemetry.Exporter(workspace, parse_duration(args.ended, "--ended"))
    with telemetry.server(exporter, args.host, args.port) as server:
        host, port = server.server_address[:2]
        print(f"metrics of {workspace.home} at http://{host!s}:{port}/metrics", flush=True)
        server.serve_forever()
    return 0


def traces_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="?", help="default: the latest")
    parser.add_argument(
        "--otlp",
        metavar="URL",
        help="the collector (default: OTEL_EXPORTER_OTLP_ENDPOINT, else http://localhost:4318)",
    )
    parser.add_argument("--json", action="store_true", help="print the spans instead of sending them")


def traces(args: argparse.Namespace) -> int:
    """Send a run as an OpenTelemetry trace: run, machines, set-up, attempts, steps, metered model calls.

    It goes to a collector by OTLP over HTTP. A run may be sent again, also while it goes on: its spans keep
    their ids.
    """
    import json

    import msgspec

    from evalfleet.api import runs, telemetry
    from evalfleet.planning.workspace import Workspace

    run = runs.open_run(Workspace.here(), args.run)
    if args.json:
        print(json.dumps([msgspec.to_builtins(span) for span in run.spans()]))
        return 0
    trace, count = telemetry.send_trace(run, args.otlp)
    print(f"{count:,} spans sent as trace {trace}")
    return 0
