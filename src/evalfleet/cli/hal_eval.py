"""HAL's own command line, word for word: hal-eval."""

from __future__ import annotations

import argparse
import functools
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalfleet.errors import RequestError

from .terminal import note, result_of

if TYPE_CHECKING:
    from evalfleet.api.run import Run
    from evalfleet.benchmarks.hal.settings import HalSettings
    from evalfleet.planning.request import RunRequest
    from evalfleet.planning.workspace import Workspace

GOOGLE = "gce"
"""The place that --google-cloud stands for."""
VARIABLES = {
    "GCP_PROJECT_ID": "project",
    "GCP_ZONE": "zones",
    "GCP_REGION": "regions",
    "SSH_PRIVATE_KEY_PATH": "key",
}
"""Variables of --google-cloud, with the settings of the place that they stand for."""
BUCKET, REGISTRY = "BUCKET_NAME", "ARTIFACT_REGISTRY"
"""Variables of --google-cloud: where a copy of the run goes, and where images come from."""
NOT_NEEDED = {
    "SSH_PUBLIC_KEY_PATH": "machines get the public half of the private key",
    "NETWORK_SECURITY_GROUP_NAME": "machines are in a network of ours, which lets in `ssh_from` alone",
}
"""Variables that HAL's own machines need, and why ours do not."""
LONGEST_ID = 60


def hal_eval_arguments(parser: argparse.ArgumentParser) -> None:
    own = parser.add_argument_group("as hal-eval has them")
    for name, metavar, help in (
        ("agent_name", "NAME", "what the results call the agent"),
        ("agent_function", "FILE.FUNCTION", "such as main.run"),
        ("agent_dir", "FOLDER", "the agent's folder, seen from here or from the checkout"),
        ("benchmark", "NAME", "such as corebench_easy"),
    ):
        own.add_argument(f"--{name}", metavar=metavar, required=True, help=help)
    own.add_argument(
        "-A", metavar="KEY=VALUE", action="append", dest="agent", help="an argument for the agent"
    )
    own.add_argument("--max_concurrent", metavar="N", default="1", help="machines at once (default: 1)")
    own.add_argument("--max_tasks", metavar="N", help="the first N tasks")
    own.add_argument("--task_ids", metavar="ID,ID...", help="only these tasks")
    own.add_argument("--task_timeout", metavar="SECONDS", help="the limit of one task (default: 2700)")
    own.add_argument("--run_id", metavar="ID", help="default: <benchmark>_<agent name>_<time>")
    own.add_argument("--continue_run", action="store_true", help="continue --run_id: run what has no result")
    own.add_argument("--results_dir", metavar="FOLDER", default="results", help="default: results")
    own.add_argument("--agent_version", metavar="TEXT", help="what the results call the agent's version")
    own.add_argument("--docker", action="store_true", help="run agents in containers of --set image=IMAGE")
    ours = parser.add_argument_group("where, and how much")
    ours.add_argument("--google-cloud", action="store_true", help="on machines of Google Cloud")
    ours.add_argument("--on", metavar="PLACE", help="where machines come from (default: this computer)")
    ours.add_argument("--spot", action="store_true", default=None, help="cheaper ones that may be taken back")
    ours.add_argument("--store", metavar="URL", help="keep a copy of the run there, as `evalfleet run` does")
    ours.add_argument("--budget", metavar="USD", help="stop before machines, and metered models, cost more")
    ours.add_argument(
        "--set", metavar="KEY=VALUE", action="append", dest="settings", help="as `evalfleet run hal` has it"
    )
    ours.add_argument("--env-file", metavar="FILE", help="read secrets from here (default: .env, if there)")
    ours.add_argument("--dry-run", action="store_true", help="print the plan and its estimate, start nothing")
    ours.add_argument("--yes", action="store_true", help="do not ask for confirmation, whatever it may cost")
    ours.add_argument("--quiet", action="store_true", help="print nothing before the summary or the results")
    ours.add_argument("--json", action="store_true", help="print one JSON object per line, the results last")
    parser.set_defaults(detach=False)


def hal_eval(args: argparse.Namespace) -> int:
    """Run a HAL evaluation with the flags of HAL's own command line, on machines of any place.

    Call it in a checkout of hal-harness, or name one with --set hal_repo=PATH. The results are where HAL
    leaves them, <results_dir>/<benchmark>/<run_id>, and in evalfleet's home, as the run <run_id>.
    """
    from evalfleet.planning.workspace import Workspace

    _refuse(args)
    workspace = Workspace.here()
    results = workspace.cwd / args.results_dir
    if args.continue_run:
        return _continue(args, workspace, results)
    run_id = _run_id(args, workspace)
    request = _request(args, workspace)
    settings = _settings(workspace, request)
    folder = results / settings.benchmark / run_id
    if folder.exists():
        raise RequestError(f"{folder} exists; continue it with --continue_run, or choose another --run_id")
    return _run(args, workspace, request.but(name=run_id), settings, results)


def _run(
    args: argparse.Namespace, workspace: Workspace, request: RunRequest, settings: HalSettings, results: Path
) -> int:
    from evalfleet.api import runs
    from evalfleet.benchmarks.hal.checkout import listing

    from .run import start_run

    known = listing(settings).tasks
    tasks = _chosen(args, list(known))
    if len(tasks) < len(known):
        request = request.but(task_ids=tasks)
    code = start_run(
        workspace, runs.resolve_request(workspace, request, "dry run" if args.dry_run else "run"), args
    )
    store = workspace.records_if_any()
    name = request.options.get("name", "")
    if not args.dry_run and store is not None and name in {info.name for info in store.streams()}:
        _write(runs.open_run(workspace, name), results, as_json=args.json)
    return code


def _continue(args: argparse.Namespace, workspace: Workspace, results: Path) -> int:
    """Resume the run, or its broken tasks if it is over. Raises RequestError if it has neither."""
    from evalfleet.api import resumption, runs

    from .watch import follow

    if args.task_ids or args.max_tasks:
        note("--continue_run: the tasks are those that the run was planned with, without a result so far")
    state = runs.open_run(workspace, args.run_id).state()
    run, order = result_of(
        resumption.ready_to_resume(
            workspace,
            args.run_id,
            tell=note,
            only_broken=state.ended_at is not None and state.broken > 0,
            with_new_files=False,
            take_over=False,
            limits=resumption.new_limits(args.budget, None, args.max_concurrent),
            env_file=_env_file(args, workspace),
        )
    )
    run = result_of(runs.control(workspace, order, run))
    tell = functools.partial(resumption.tell_of_changes, run, note)
    code = follow(run, as_json=args.json, quiet=args.quiet, first=tell)
    _write(run, results, as_json=args.json)
    return code


def _write(run: Run, results: Path, *, as_json: bool) -> None:
    """Leave the tree where HAL would have left it."""
    try:
        results.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".evalfleet-", dir=results) as scratch:
            lines = "\n".join(run.export("hal", Path(scratch)))
            (made,) = Path(scratch).glob(f"*/{run.name}")
            folder = results / made.relative_to(scratch)
            shutil.rmtree(folder, ignore_errors=True)
            folder.parent.mkdir(parents=True, exist_ok=True)
            made.rename(folder)
    except OSError as err:
        raise RequestError(f"cannot write below {results}: {err.strerror}") from err
    print(lines.replace(str(made), str(folder)), file=sys.stderr if as_json else sys.stdout)


# -- what was typed --------------------------------------------------------------------------------------


def _refuse(args: argparse.Namespace) -> None:
    """Raise RequestError for flags that exclude each other."""
    if args.google_cloud and args.on:
        raise RequestError(f"--google-cloud is --on {GOOGLE}: say where machines come from once")
    if args.google_cloud and args.docker:
        raise RequestError("only one of --google-cloud and --docker can be given")
    if args.continue_run and not args.run_id:
        raise RequestError("--continue_run continues an earlier run: name it with --run_id ID")


def _run_id(args: argparse.Namespace, workspace: Workspace) -> str:
    """The id as HAL makes it: `<benchmark>_<agent name>_<unix time>`, with the name cut to what fits."""
    from evalfleet.names import check_run_name

    if args.run_id:
        try:
            return check_run_name(args.run_id)
        except RequestError as err:
            told = str(err).replace("run name", "--run_id", 1).replace("--name", "it")
            raise RequestError(told) from None
    time = str(int(workspace.now() // 1_000_000))
    agent = re.sub(r"[^a-zA-Z0-9_]", "", args.agent_name.replace(" ", "_")).lower()
    benchmark = re.sub(r"[^A-Za-z0-9._-]", "", args.benchmark.rpartition("/")[2])[:40]
    room = LONGEST_ID - len(benchmark) - len(time) - 2
    return check_run_name(f"{benchmark}_{agent[:room]}_{time}")


def _request(args: argparse.Namespace, workspace: Workspace) -> RunRequest:
    from evalfleet.planning.request import RunRequest
    from evalfleet.planning.values import parse_count, parse_pairs

    given: dict[str, Any] = dict(parse_pairs(args.settings or (), "--set"))
    if (workspace.cwd / "hal/benchmark_manager.py").is_file():
        given.setdefault("hal_repo", str(workspace.cwd))
    agent_dir = workspace.cwd / os.path.expanduser(args.agent_dir)
    given |= {
        "benchmark": args.benchmark,
        "agent_dir": str(agent_dir) if agent_dir.is_dir() else args.agent_dir,
        "agent_function": args.agent_function,
        "agent_name": args.agent_name,
    }
    if args.agent_version:
        given["agent_version"] = args.agent_version
    if args.docker and "image" not in given:
        raise RequestError("--docker: say which image agents run in: --set image=IMAGE")
    env_file = _env_file(args, workspace)
    if "secrets" not in given and (names := _model_keys(workspace, env_file)):
        given["secrets"] = ",".join(names)
    store, on = args.store, GOOGLE if args.google_cloud else args.on
    merged = workspace.environment(env_file)
    if args.google_cloud:
        given = {**_place_settings(merged, workspace), **given}
        given = _with_registry(merged, given)
        if not store and (bucket := merged.get(BUCKET)):
            store = bucket if "://" in bucket else f"gs://{bucket}/{args.benchmark}"
    timeout = args.task_timeout
    options: dict[str, Any] = {
        "settings": given,
        "agent": parse_pairs(args.agent or (), "-A") or None,
        "workers": parse_count(args.max_concurrent, "--max_concurrent", 1, 10_000),
        "on": on,
        "spot": args.spot,
        "budget": args.budget,
        "store": store,
        "env_file": env_file,
        "task_timeout": parse_count(timeout, "--task_timeout", 1, 10**7) if timeout else None,
    }
    return RunRequest("hal", **options)


def _env_file(args: argparse.Namespace, workspace: Workspace) -> str | None:
    return args.env_file or (".env" if (workspace.cwd / ".env").is_file() else None)


def _place_settings(environ: Mapping[str, str], workspace: Workspace) -> dict[str, str]:
    """Return settings of the place for Google Cloud from HAL's own variables. Raises RequestError."""
    from evalfleet.planning.sources import place_sources

    settings = dict[str, str]()
    for place in place_sources([GOOGLE], workspace.config):
        for variable, key in VARIABLES.items():
            if environ.get(variable):
                settings[f"{place.name}.{key}"] = environ[variable]
        if f"{place.name}.zones" in settings:  # a zone is in its region, and says more
            settings.pop(f"{place.name}.regions", None)
    for variable, why in NOT_NEEDED.items():
        if environ.get(variable):
            note(f"{variable} is not needed: {why}")
    return settings


def _with_registry(environ: Mapping[str, str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """With an image's name as the registry has it."""
    registry, image = environ.get(REGISTRY), settings.get("image", "")
    if not registry or "/" in image:
        return dict(settings)
    if image:
        return {**settings, "image": f"{registry.rstrip('/')}/{image}"}
    note(f"{REGISTRY}: no image is asked for; --set image=NAME takes one from {registry}")
    return dict(settings)


def _model_keys(workspace: Workspace, env_file: str | None) -> list[str]:
    """Keys of models, and addresses, that are set here: HAL gives its agents the whole environment.

    Where models are metered, their calls go through the meter, whose address takes the place of those.
    """
    from evalfleet.planning.models import vendors

    merged, known = workspace.environment(env_file), vendors().values()
    names = {key for vendor in known for key in vendor.keys}
    if workspace.config.model is None:
        names |= {variable for vendor in known for variable in vendor.urls}
    return sorted(name for name in names if merged.get(name))


def _settings(workspace: Workspace, request: RunRequest) -> HalSettings:
    """What the run's settings would be, with all that evalfleet.toml says. Raises RequestError."""
    import msgspec

    from evalfleet.api import runs
    from evalfleet.benchmarks.hal.settings import HalSettings
    from evalfleet.benchmarks.hal.tree import settings_of

    given = {**request.options.get("settings", {}), "gpu_tasks": "run"}
    resolved = runs.resolve_request(workspace, request.but(settings=given, first=1), "elsewhere")
    return msgspec.convert(settings_of(resolved.plan), HalSettings)


def _chosen(args: argparse.Namespace, known: list[str]) -> list[str]:
    """Return the tasks that were asked for, in HAL's order. Raises RequestError."""
    from evalfleet.names import hint
    from evalfleet.planning.values import parse_count

    chosen = known
    if args.task_ids:
        wanted = [task.strip() for task in args.task_ids.split(",") if task.strip()]
        if strange := [task for task in wanted if task not in known]:
            raise RequestError(f"--task_ids: {strange[0]!r} is no task of it; {hint(strange[0], known)}")
        chosen = [task for task in known if task in wanted]
    if args.max_tasks:
        chosen = chosen[: parse_count(args.max_tasks, "--max_tasks", 1, 10**9)]
    return chosen
