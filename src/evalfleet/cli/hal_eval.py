"""HAL's own command line, word for word: hal-eval."""

from __future__ import annotations

import argparse
import functools
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalfleet.errors import RequestError

from .terminal import note, result_of

if TYPE_CHECKING:
    from evalfleet.api.run import Run
    from evalfleet.benchmarks.hal.settings import HalSettings
    from evalfleet.benchmarks.hal.tree import Tree
    from evalfleet.planning.request import RunRequest
    from evalfleet.planning.workspace import Workspace

GOOGLE = "gce"
"""The place that --google-cloud stands for."""
BUCKET, REGISTRY = "BUCKET_NAME", "ARTIFACT_REGISTRY"
"""Variables of --google-cloud: where a copy of the run goes, and where images come from."""
PRIVATE_KEY = "SSH_PRIVATE_KEY_PATH"
NOT_NEEDED = {
    "SSH_PUBLIC_KEY_PATH": "machines get the public half of the private key",
    "NETWORK_SECURITY_GROUP_NAME": "machines are in a network of ours, which lets in `ssh_from` alone",
}
"""Variables that HAL's own machines need, and why ours do not."""
LONGEST_ID = 60
SUFFIX = 4
"""Of a run id: room for the number of a run that goes on with it."""


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
    own.add_argument("--max_tasks", metavar="N", help="the first N tasks; of those that are left, N more")
    own.add_argument("--task_ids", metavar="ID,ID...", help="only these tasks")
    own.add_argument("--task_timeout", metavar="SECONDS", help="the limit of one task (default: 2700)")
    own.add_argument("--run_id", metavar="ID", help="default: <benchmark>_<agent name>_<time>")
    own.add_argument("--continue_run", action="store_true", help="run what has no answer yet in --run_id")
    own.add_argument("--ignore_errors", action="store_true", help="with --continue_run: only grade it")
    own.add_argument("--results_dir", metavar="FOLDER", default="results", help="default: results")
    own.add_argument("--agent_version", metavar="TEXT", help="what the results call the agent's version")
    own.add_argument("--conda_env_name", metavar="ENV", help="run agents in this conda environment, here")
    own.add_argument("--docker", action="store_true", help="run agents in containers of --set image=IMAGE")
    own.add_argument(
        "--vm",
        action="store_true",
        help="run agents on machines of --on PLACE, or of the one that HAL's variables name",
    )
    for name in ("-B", "-I"):
        own.add_argument(name, metavar="KEY=VALUE", action="append", help="no effect: HAL ignores it")
    own.add_argument("--config", metavar="FILE", help="no effect: HAL ignores it")
    own.add_argument("--upload", action="store_true", help="no effect: HAL ignores it")
    own.add_argument(
        "--no-download-environment",
        action="store_true",
        help="no effect: files that were only sent are never fetched",
    )
    own.add_argument("--prompt_sensitivity", action="store_true", help="refused: not supported")
    for name in ("num_variations", "variation_strength", "variation_index"):
        own.add_argument(f"--{name}", metavar="X", help="refused: not supported")
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
    from evalfleet.benchmarks.hal.continued import tasks_left, tree_in
    from evalfleet.planning.workspace import Workspace

    _refuse(args)
    for ignored in _ignored(args):
        note(ignored)
    workspace = Workspace.here()
    run_id = _run_id(args, workspace)
    request = _request(args, workspace)
    settings = _settings(workspace, request)
    folder = workspace.cwd / args.results_dir / settings.benchmark / run_id
    earlier = tree_in(folder)
    if earlier is not None and not args.continue_run:
        raise RequestError(
            f"{folder} has results: --continue_run goes on with them, another --run_id begins anew"
        )
    evaluation = _Evaluation(args, workspace, settings, request, folder, earlier)
    if args.continue_run and (unfinished := evaluation.unfinished_run()):
        return evaluation.resume(unfinished)
    left = tasks_left(settings, earlier) if not args.ignore_errors or not args.continue_run else []
    chosen = _chosen(args, left, settings)
    if chosen:
        return evaluation.run(chosen)
    if earlier is None:
        raise RequestError(f"there is no task to run, and {folder} has nothing to grade")
    print(evaluation.grade_again(), file=sys.stderr if args.json else sys.stdout)
    return evaluation.print_results() if args.json else 0


class _Evaluation:
    """One call of hal-eval: a run of ours, and the tree that it leaves or adds to."""

    def __init__(
        self,
        args: argparse.Namespace,
        workspace: Workspace,
        settings: HalSettings,
        request: RunRequest,
        folder: Path,
        earlier: Tree | None,
    ) -> None:
        self._args = args
        self._workspace = workspace
        self._settings = settings
        self._request = request
        self._folder = folder
        self._earlier = earlier

    def _runs(self) -> list[str]:
        """All runs of this id, in the order in which they were started."""
        store = self._workspace.records_if_any()
        names = [] if store is None else [info.name for info in store.streams() if info.kind == "run"]
        own = re.compile(re.escape(self._folder.name) + r"(-\d+)?")
        return sorted((name for name in names if own.fullmatch(name)), key=lambda name: (len(name), name))

    def unfinished_run(self) -> str | None:
        from evalfleet.api import runs

        if not (names := self._runs()):
            return None
        state = runs.open_run(self._workspace, names[-1]).state()
        over = state.ended_at is not None and state.scored + state.broken == state.total
        return None if over else names[-1]

    def resume(self, name: str) -> int:
        from evalfleet.api import resumption, runs

        from .watch import follow

        args = self._args
        run, order = result_of(
            resumption.ready_to_resume(
                self._workspace,
                name,
                tell=note,
                with_new_files=False,
                take_over=False,
                limits=resumption.new_limits(args.budget, None, args.max_concurrent),
                env_file=self._request.options.get("env_file"),
            )
        )
        run = result_of(runs.control(self._workspace, order, run))
        tell = functools.partial(resumption.tell_of_changes, run, note)
        code = follow(run, as_json=args.json, quiet=args.quiet, first=tell)
        self._write(run)
        return code

    def run(self, tasks: Sequence[str]) -> int:
        from evalfleet.api import runs
        from evalfleet.benchmarks.hal.checkout import listing
        from evalfleet.planning.plan import free_name

        from .run import start_run

        name = free_name(self._folder.name, self._runs()) if self._args.continue_run else self._folder.name
        request = self._request.but(name=name)
        if len(tasks) < len(listing(self._settings).tasks):
            request = request.but(task_ids=tasks)
        dry = self._args.dry_run
        resolved = runs.resolve_request(self._workspace, request, dry=dry)
        code = start_run(self._workspace, resolved, self._args)
        if not dry and name in self._runs():
            self._write(runs.open_run(self._workspace, name))
        return code

    def _write(self, run: Run) -> None:
        """Leave the tree where HAL would have left it."""
        from evalfleet.benchmarks.hal.continued import take_task_folders
        from evalfleet.benchmarks.hal.tree import read_tree

        results = self._folder.parent.parent
        try:
            results.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".evalfleet-", dir=results) as scratch:
                said = "\n".join(run.export("hal", Path(scratch) / "new"))
                new = Path(scratch) / "new" / self._settings.benchmark / run.name
                if self._earlier is None and run.name == self._folder.name:
                    shutil.rmtree(self._folder, ignore_errors=True)
                    self._folder.parent.mkdir(parents=True, exist_ok=True)
                    new.rename(self._folder)
                    said = said.replace(str(new), str(self._folder))
                else:
                    later = read_tree(new)
                    take_task_folders(new, self._folder, later.lines)
                    said = self.grade_again(later)
        except OSError as err:
            raise RequestError(f"cannot write {self._folder}: {err.strerror}") from err
        print(said, file=sys.stderr if self._args.json else sys.stdout)

    def grade_again(self, later: Tree | None = None) -> str:
        """Grade all answers of the id, earlier and later ones, and write the tree. What there is to say."""
        import msgspec

        from evalfleet.benchmarks.hal.checkout import parsed_args
        from evalfleet.benchmarks.hal.continued import continued_tree, regrade
        from evalfleet.benchmarks.hal.tree import Tree, git_info, run_command

        options = self._request.options
        given = parsed_args(self._settings, options.get("agent") or {})
        agent, benchmark, run = self._args.agent_name, self._settings.benchmark, self._folder.name
        line = run_command(msgspec.to_builtins(self._settings), benchmark, agent, run, given)
        config = {
            "agent_name": agent,
            "benchmark_name": benchmark,
            "agent_args": {**given, "benchmark_name": benchmark},
            "run_command": f"{line} --continue_run",
            "prompt_sensitivity": False,
            "git_info": git_info(Path(self._settings.hal_repo)),
        }
        tree = continued_tree(self._earlier or Tree({}, {}, {}, {}, {}), later)
        merged = self._workspace.environment(options.get("env_file"))
        secrets = {name: merged[name] for name in self._settings.grader_secrets if merged.get(name)}
        now_s = self._workspace.now() / 1e6
        home, base = self._workspace.home, self._workspace.cwd
        return result_of(
            regrade(self._settings, config, tree, self._folder, secrets, now_s, home=home, base=base)
        )

    def print_results(self) -> int:
        """The results of the newest run of the id, for --json where nothing was run."""
        import json

        from evalfleet.api import runs

        names = self._runs()
        print(json.dumps(runs.open_run(self._workspace, names[-1]).results() if names else {}))
        return 0


# -- what was typed --------------------------------------------------------------------------------------


def _refuse(args: argparse.Namespace) -> None:
    """Raises RequestError for what HAL refuses, too, or does and we cannot."""
    variations = ("prompt_sensitivity", "num_variations", "variation_strength", "variation_index")
    if found := [name for name in variations if getattr(args, name)]:
        raise RequestError(
            f"--{found[0]}: variations of prompts are not there: leave it out, or use hal-eval"
        )
    if args.vm and args.google_cloud:
        raise RequestError("--vm and --google-cloud exclude each other: say where machines come from once")
    if args.google_cloud and args.on:
        raise RequestError(f"--google-cloud is --on {GOOGLE}: say where machines come from once")
    if sum(map(bool, (args.conda_env_name, args.vm or args.google_cloud, args.docker))) > 1:
        raise RequestError("only one of --conda_env_name, --vm, --google-cloud and --docker can be given")
    if args.continue_run and not args.run_id:
        raise RequestError("--continue_run goes on with an earlier run: name it with --run_id ID")


def _ignored(args: argparse.Namespace) -> list[str]:
    given = {
        "-B": args.B,
        "-I": args.I,
        "--config": args.config,
        "--upload": args.upload,
    }
    flags = [flag for flag, value in given.items() if value]
    notes = [f"{', '.join(flags)}: HAL's command line takes this and does nothing with it"] if flags else []
    if args.upload:
        notes.append("hal-upload, HAL's own, uploads results: it takes the tree that this run leaves")
    if args.no_download_environment:
        notes.append("--no-download-environment: what was only sent to a machine never comes back from it")
    if args.ignore_errors and not args.continue_run:
        notes.append("--ignore_errors: a task that fails never ends a run here")
    return notes


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
    room = LONGEST_ID - SUFFIX - len(benchmark) - len(time) - 2
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
    if args.conda_env_name:
        given["agent_python"] = _conda_python(args.conda_env_name, workspace)
    if args.docker and "image" not in given:
        raise RequestError("--docker: say which image agents run in: --set image=IMAGE")
    env_file = args.env_file or (".env" if (workspace.cwd / ".env").is_file() else None)
    if "secrets" not in given and (names := _model_keys(workspace, env_file)):
        given["secrets"] = ",".join(names)
    store, on = args.store, GOOGLE if args.google_cloud else args.on
    merged = workspace.environment(env_file)
    if args.vm:
        on = on or _place_of_variables(merged)
    if args.vm or args.google_cloud:
        given = {**_place_settings(on, merged, workspace), **given}
    if args.google_cloud:
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


def _place_of_variables(environ: Mapping[str, str]) -> str:
    """The kind of place that HAL's own variables name, by which --vm goes alone. Raises RequestError."""
    from evalfleet.planning.plugins import BUILT_IN, place_kind

    named = list[str]()
    for name in BUILT_IN["place"]:
        with suppress(RequestError):  # it cannot be used here
            variables = place_kind(name).foreign_variables
            if variables and all(environ.get(variable) for variable in variables):
                named.append(name)
    if len(named) != 1:
        raise RequestError("--vm: say whose machines, with --on PLACE; `evalfleet places` lists them")
    return named[0]


def _place_settings(on: str, environ: Mapping[str, str], workspace: Workspace) -> dict[str, str]:
    """Settings of the places, as HAL's own variables say them. Raises RequestError."""
    from evalfleet.planning.sources import place_sources

    told = dict[str, str]()
    for place in place_sources(on.split(","), workspace.config):
        if not (variables := place.kind.foreign_variables):
            continue
        for variable, key in {**variables, PRIVATE_KEY: "key"}.items():
            if environ.get(variable):
                told[f"{place.name}.{key}"] = environ[variable]
        if f"{place.name}.zones" in told:  # a zone is in its region, and says more
            told.pop(f"{place.name}.regions", None)
    for variable, why in NOT_NEEDED.items():
        if environ.get(variable):
            note(f"{variable} is not needed: {why}")
    return told


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


def _conda_python(name: str, workspace: Workspace) -> str:
    environ = workspace.environ
    homes = [
        Path(conda).parent.parent for conda in (environ.get("CONDA_EXE"), shutil.which("conda")) if conda
    ]
    homes += [Path.home() / each for each in ("miniconda3", "anaconda3", "miniforge3", ".conda")]
    pythons = (home / "envs" / name / "bin/python" for home in homes)
    if found := next((python for python in pythons if python.is_file()), None):
        return str(found)
    raise RequestError(
        f"there is no conda environment {name!r} here: --set agent_python=PATH names a Python on the machine"
    )


def _settings(workspace: Workspace, request: RunRequest) -> HalSettings:
    """What the run's settings would be, with all that evalfleet.toml says. Raises RequestError."""
    import msgspec

    from evalfleet.api import runs
    from evalfleet.benchmarks.hal.settings import HalSettings
    from evalfleet.benchmarks.hal.tree import settings_of

    given = {**request.options.get("settings", {}), "gpu_tasks": "run"}
    resolved = runs.resolve_request(
        workspace, request.but(settings=given, first=1), dry=True, secrets_elsewhere=True
    )
    return msgspec.convert(settings_of(resolved.plan), HalSettings)


def _chosen(args: argparse.Namespace, left: Sequence[str], settings: HalSettings) -> list[str]:
    """The tasks that are left and were asked for, as HAL takes them. Raises RequestError."""
    from evalfleet.benchmarks.hal.checkout import listing
    from evalfleet.names import hint
    from evalfleet.planning.values import parse_count

    chosen = list(left)
    if args.task_ids:
        wanted = [task.strip() for task in args.task_ids.split(",") if task.strip()]
        known = listing(settings).tasks
        if strange := [task for task in wanted if task not in known]:
            raise RequestError(f"--task_ids: {strange[0]!r} is no task of it; {hint(strange[0], known)}")
        chosen = [task for task in left if task in wanted]
    if args.max_tasks:
        chosen = chosen[: parse_count(args.max_tasks, "--max_tasks", 1, 10**9)]
    return chosen
