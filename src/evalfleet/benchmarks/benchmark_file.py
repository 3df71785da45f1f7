"""Reads a benchmark file (mybench.toml) and checks all of it before anything starts."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, field

from evalfleet.errors import RequestError
from evalfleet.model import Isolation, Needs, Task, decodable
from evalfleet.toml_tables import convert, read_toml

from .containers import ContainerSettings, check_container, check_image
from .files import bundle_files, check_files, ignored_files
from .loaded import Loaded
from .spec import PLACEHOLDER, CommandSpec, bundle_of, planned_task, score_bundle_of, spec_data
from .tasks import (
    EnvTable,
    TaskDefaults,
    TaskSource,
    check_argv,
    check_needs,
    check_stall,
    check_timeout,
    env_of,
    make_tasks,
    own_of,
    read_file,
    read_inline,
    read_source,
)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,59}")
_SETTING = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,127}")
_SECRET = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_BRACES = re.compile(r"(\$?)\{([A-Za-z_][A-Za-z0-9_.-]*)\}")
_SCRIPTS = frozenset({".sh", ".bash", ".py", ".js", ".mjs", ".ts", ".rb", ".pl", ".jl", ".r", ".lua", ".ps1"})
_KNOWN = ("task_id", "domain", "attempt", "params")
_LIKE_SECRET = re.compile(r"(?i)(^|_)(key|token|secret|password|passwd|credentials?)$")

Argv = tuple[str, ...]
Names = tuple[str, ...]
Setting = str | int | float | bool
ON_TIMEOUT = {"enum": ["zero", "broken"]}
SCORE_FROM = {"enum": ["result", "exit_code"]}


class BenchmarkFile(Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of the file. `evalfleet report --schema benchmark` prints them for editors."""

    name: Annotated[str, Meta(description="1 to 60 letters, digits, '.', '_', '-', the first no sign")]
    command: Annotated[
        Argv, Meta(description="the program of a task and its arguments; placeholders such as {task_id}")
    ]
    tasks: Annotated[
        str | TaskSource | tuple[Any, ...],
        Meta(description="a file beside this one, a dataset with a mapping of its fields, or [[tasks]] here"),
    ]
    files: Annotated[Names, Meta(description="files and folders beside this one, put on every machine")] = ()
    setup: Annotated[tuple[Argv, ...], Meta(description="run once on each machine; each must exit 0")] = ()
    setup_timeout_s: Annotated[float | None, Meta(description="time limit of each step of setup")] = None
    setup_secrets: Annotated[Names, Meta(description="names of variables that setup gets")] = ()
    probe: Annotated[Argv | None, Meta(description="a machine is ready once this exits 0")] = None
    timeout_s: Annotated[float, Meta(description="time limit of a task that has none of its own")] = 3600.0
    stall_s: Annotated[float, Meta(description="an attempt that writes nothing for so long is stuck")] = 0.0
    usual_s: Annotated[float | None, Meta(description="what a task usually takes, for plans")] = None
    on_timeout: Annotated[
        str, Meta(description="what a task is that reached its time limit", extra_json_schema=ON_TIMEOUT)
    ] = "zero"
    score_from: Annotated[
        str, Meta(description="what scores an attempt without result.json", extra_json_schema=SCORE_FROM)
    ] = "result"
    env: Annotated[EnvTable, Meta(description="variables of command, setup, probe and score")] = field(
        default_factory=dict[str, str | int | float]
    )
    settings: Annotated[
        Mapping[str, Setting],
        Meta(description="what --set may change, with defaults; the command finds all in EVALFLEET_SETTINGS"),
    ] = field(default_factory=dict[str, Setting])
    secrets: Annotated[Names, Meta(description="names of variables that the command gets from here")] = ()
    model_key: Annotated[
        str | Names, Meta(description="which of the secrets are keys of models: calls with them are metered")
    ] = ()
    needs: Annotated[Needs, Meta(description="what a machine must have")] = Needs()
    slots: Annotated[int, Meta(description="attempts that one machine may run at a time, 1 to 1000")] = 1
    isolation: Annotated[
        str,
        Meta(
            description="how attempts are kept apart",
            extra_json_schema={"enum": ["user", "container", "none", ""]},
        ),
    ] = ""
    image: Annotated[
        str, Meta(description="attempts run in containers of this image, by docker or podman")
    ] = ""
    container: Annotated[ContainerSettings, Meta(description="how containers are run")] = ContainerSettings()
    score: Annotated[Argv | None, Meta(description="grades what an attempt left")] = None
    score_files: Annotated[Names, Meta(description="as files, for the score command alone")] = ()
    score_timeout_s: Annotated[float, Meta(description="time limit of the score command")] = 600.0
    steps: Annotated[
        str, Meta(description="the file below $EVALFLEET_OUT that the agent writes its steps into")
    ] = ""
    solution: Annotated[Argv | None, Meta(description="with --oracle, run in place of the command")] = None
    solution_files: Annotated[Names, Meta(description="as files, for the solution alone")] = ()


def load_benchmark(path: Path) -> Loaded:
    """The benchmark that a file describes. RequestError names the file, the line or key, and the fix."""
    where = str(path)
    file = convert(read_toml(path), BenchmarkFile, where)
    root = Path(os.path.abspath(path)).parent
    _check_values(file, where)
    check_files(root, file.files, where)
    check_files(root, file.score_files, where)
    check_files(root, file.solution_files, where)
    spec = _spec(file, root, where)
    tasks = tuple(planned_task(spec, task, where) for task in _tasks(file, path))
    if not tasks:
        raise RequestError(f"{where}: key 'tasks' has no tasks; write at least one")
    entries = (*file.files, *file.score_files, *(name for task in tasks for name in own_of(task).files))
    planned = msgspec.structs.replace(
        spec, digest=bundle_of(spec).digest, score_digest=score_bundle_of(spec).digest
    )
    loaded = Loaded(
        name=file.name,
        spec=spec_data(planned),
        tasks=tasks,
        secrets=tuple(dict.fromkeys((*file.secrets, *file.setup_secrets))),
        slots=file.slots,
        files=tuple(bundle_files(root, entries).values()),
        warnings=tuple(
            f"{where}: {warning}" for warning in (*warnings_about(spec), *_about_ignored(root, entries))
        ),
        setup_s=(file.setup_timeout_s or 0.0) * len(file.setup),
        usual_s={} if file.usual_s is None else {"": file.usual_s},
        isolation=_isolation(file, tasks, where),
        model_keys=_model_keys(file),
        unmeterable=_unmeterable(file, tasks),
        in_containers=_has_image(file, tasks) and file.container.network != "host",
        settings=spec.settings,
    )
    return loaded if file.solution is None else msgspec.structs.replace(loaded, oracle=_oracle(loaded, file))


def _oracle(loaded: Loaded, file: BenchmarkFile) -> Loaded:
    """Its results are nobody's, so it has another name. A solution needs no keys of models."""
    spec = msgspec.convert(loaded.spec, decodable(CommandSpec))
    files = dict.fromkeys((*spec.files, *file.solution_files))
    spec = msgspec.structs.replace(
        spec,
        name=f"{file.name}-oracle",
        command=file.solution or (),
        files=tuple(files),
        secrets=spec.secrets if file.score else (),
        digest="",
    )
    spec = msgspec.structs.replace(spec, digest=bundle_of(spec).digest)
    secrets = tuple(dict.fromkeys((*spec.secrets, *spec.setup_secrets)))
    keys = loaded.model_keys if file.score else ()
    data = spec_data(spec)
    return msgspec.structs.replace(loaded, name=spec.name, spec=data, secrets=secrets, model_keys=keys)


def _tasks(file: BenchmarkFile, path: Path) -> tuple[Task, ...]:
    where, domain = str(path), ""
    if isinstance(file.tasks, str):
        lines = read_file(path.parent / file.tasks, f"{where}: key 'tasks'")
    elif isinstance(file.tasks, TaskSource):
        lines, domain = read_source(path.parent, file.tasks, f"{where}: key"), file.name
    else:
        lines = read_inline(file.tasks, where)
    needed = _params_in((*file.command, *(file.score or ()), *(file.solution or ())))
    return make_tasks(lines, TaskDefaults(file.timeout_s, file.stall_s, needed, domain))


def _unmeterable(file: BenchmarkFile, tasks: Sequence[Task]) -> str:
    if file.container.network != "none" or not _has_image(file, tasks):
        return ""
    return 'a container with network = "none" reaches no meter'


def _has_image(file: BenchmarkFile, tasks: Sequence[Task]) -> bool:
    return bool(file.image or any(own_of(task).image for task in tasks))


def _model_keys(file: BenchmarkFile) -> tuple[str, ...]:
    return (file.model_key,) if isinstance(file.model_key, str) else file.model_key


def _isolation(file: BenchmarkFile, tasks: Sequence[Task], where: str) -> Isolation:
    given = file.isolation
    if given not in ("", "user", "container", "none"):
        raise RequestError(
            f'{where}: key \'isolation\' is {given!r}; write "user", "container" or "none", or leave it out'
        )
    bare = [] if file.image else [task.id for task in tasks if not own_of(task).image]
    if given == "container" and bare:
        raise RequestError(
            f"{where}: isolation = \"container\" needs an 'image', and task {bare[0]} has none; "
            'write one, such as image = "docker.io/library/python:3.12"'
        )
    if len(bare) == len(tasks):
        return "user" if given == "user" else "none" if given else ""
    if given == "user":
        raise RequestError(
            f"{where}: attempts with an 'image' are kept apart by it; write isolation = \"container\", "
            "or leave it out"
        )
    return "own" if bare else "container"


def _spec(file: BenchmarkFile, root: Path, where: str) -> CommandSpec:
    return CommandSpec(
        name=file.name,
        root=str(root),
        command=file.command,
        files=file.files,
        setup=file.setup,
        setup_timeout_s=file.setup_timeout_s,
        setup_secrets=file.setup_secrets,
        image=file.image,
        container=file.container,
        env=env_of(file.env, where, (*file.secrets, *file.setup_secrets)),
        settings={name: _as_text(value) for name, value in file.settings.items()},
        probe=file.probe or (),
        on_timeout="zero" if file.on_timeout == "zero" else "broken",
        score_from="exit_code" if file.score_from == "exit_code" else "result",
        secrets=file.secrets,
        needs=file.needs,
        slots=file.slots,
        score=file.score or (),
        score_files=file.score_files,
        score_timeout_s=file.score_timeout_s,
        steps=file.steps,
    )


def _as_text(value: Setting) -> str:
    """The value as `--set` would have given it."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _check_seconds(file: BenchmarkFile, where: str) -> None:
    check_timeout(file.timeout_s, where)
    for key, seconds in (("setup_timeout_s", file.setup_timeout_s), ("usual_s", file.usual_s)):
        if seconds is not None:
            check_timeout(seconds, where, key)
    check_stall(file.stall_s, where)


def _check_values(file: BenchmarkFile, where: str) -> None:
    if not _NAME.fullmatch(file.name):
        raise RequestError(
            f"{where}: key 'name' is {file.name[:80]!r}; write 1 to 60 letters, digits, '.', '_' or '-', "
            "the first a letter or digit"
        )
    if file.steps and any(part in ("", ".", "..") for part in file.steps.split("/")):
        raise RequestError(
            f"{where}: key 'steps' is {file.steps[:80]!r}; "
            "write a file below $EVALFLEET_OUT such as 'traj.jsonl'"
        )
    check_argv(file.command, where, "command")
    for number, step in enumerate(file.setup, start=1):
        check_argv(step, where, f"setup (step {number})")
    if file.probe is not None:
        check_argv(file.probe, where, "probe")
    _check_score(file, where)
    _check_seconds(file, where)
    if file.on_timeout not in ("zero", "broken"):
        raise RequestError(f'{where}: key \'on_timeout\' is {file.on_timeout!r}; write "zero" or "broken"')
    if file.score_from not in ("result", "exit_code"):
        raise RequestError(
            f'{where}: key \'score_from\' is {file.score_from!r}; write "result" or "exit_code"'
        )
    if not 1 <= file.slots <= 1000:
        raise RequestError(f"{where}: key 'slots' is {file.slots}; write a whole number from 1 to 1000")
    for key, names in (("secrets", file.secrets), ("setup_secrets", file.setup_secrets)):
        if not all(_SECRET.fullmatch(name) for name in names):
            # The value itself may have been written here by mistake: it is not shown.
            raise RequestError(
                f"{where}: key {key!r} has an entry that is no variable name; "
                'write names such as "OPENAI_API_KEY", never values'
            )
    if unknown := [name for name in _model_keys(file) if name not in file.secrets]:
        named = unknown[0] if _SECRET.fullmatch(unknown[0]) else "an entry that is no variable name"
        raise RequestError(f"{where}: key 'model_key' has {named}, which is not in 'secrets'; write it there")
    _check_settings(file, where)
    check_needs(file.needs, where)
    check_image(file.image, where)
    check_container(file.container, where)


def _check_settings(file: BenchmarkFile, where: str) -> None:
    for name in file.settings:
        if not _SETTING.fullmatch(name):
            raise RequestError(
                f"{where}: key 'settings' has {name[:80]!r}; write a name of letters, digits, '_' or '-'"
            )


def _check_score(file: BenchmarkFile, where: str) -> None:
    check_timeout(file.score_timeout_s, where, "score_timeout_s")
    if file.score is not None:
        check_argv(file.score, where, "score")
    elif file.score_files:
        raise RequestError(
            f"{where}: key 'score_files' is for the 'score' command; write one, or take it out"
        )
    if file.solution is not None:
        check_argv(file.solution, where, "solution")
    elif file.solution_files:
        raise RequestError(
            f"{where}: key 'solution_files' is for the 'solution' command; write one, or take it out"
        )
    both = sorted(set(file.files) & set(file.score_files))
    if both:
        raise RequestError(
            f"{where}: {both[0]!r} is in 'files' and in 'score_files'; take it out of one of them"
        )


def _params_in(command: Iterable[str]) -> tuple[str, ...]:
    found = (match[1] for word in command for match in PLACEHOLDER.finditer(word))
    return tuple(sorted({name.removeprefix("params.") for name in found if name.startswith("params.")}))


# -- what looks wrong but may be meant: told to the user, never refused ---------------------------------


def warnings_about(spec: CommandSpec) -> Iterator[str]:
    """One sentence for each, without the file's name."""
    yield from _about_braces(spec.command)
    others = [(f"setup (step {n})", argv) for n, argv in enumerate(spec.setup, start=1)]
    others += [("probe", spec.probe)] if spec.probe else []
    for key, argv in others:
        for match in (match for word in argv for match in PLACEHOLDER.finditer(word)):
            yield f"key {key!r} has {match[0]!r}, which is replaced in the command alone; it stays as it is"
    for key, argv in [("command", spec.command), *others]:
        yield from _about_files(key, argv, spec)
    for name in spec.env:
        if _LIKE_SECRET.search(name):
            yield f"key 'env' has {name!r}, which the journal keeps; if it is secret, name it in 'secrets'"


def _about_ignored(root: Path, entries: Sequence[str]) -> Iterator[str]:
    ignored = ignored_files(root, entries)
    if ignored:
        shown = ", ".join(map(str, ignored[:3])) + (", ..." if len(ignored) > 3 else "")
        yield f"an ignore file keeps {shown} from being sent; list what machines need in 'files' by its name"


def _about_braces(command: Sequence[str]) -> Iterator[str]:
    for dollar, name in (match.groups() for word in command for match in _BRACES.finditer(word)):
        if PLACEHOLDER.fullmatch(f"{{{name}}}"):
            if dollar:
                yield (
                    f"key 'command' has '${{{name}}}': the value is put after the '$'; "
                    f"write '{{{name}}}', or a variable such as $EVALFLEET_TASK_ID"
                )
            continue
        head, _, rest = name.partition(".")
        close = difflib.get_close_matches(str(head), _KNOWN, n=1, cutoff=0.6)
        if close and not dollar:
            meant = f"params.{rest or 'NAME'}" if close[0] == "params" else close[0]
            yield f"key 'command' has '{{{name}}}', which stays as it is; did you mean '{{{meant}}}'?"


def _about_files(key: str, argv: Sequence[str], spec: CommandSpec) -> Iterator[str]:
    root = Path(spec.root)
    for position, word in enumerate(argv):
        if not _may_be_file(word):
            continue
        path = PurePosixPath(word)
        here = (root / path).is_file()
        listed = any(path == entry or entry in path.parents for entry in map(PurePosixPath, spec.files))
        if not listed and (here or path.suffix.lower() in _SCRIPTS):
            fix = f"add {str(path)!r} to it" if here else "no machine has it unless setup makes it"
            yield f"key {key!r} names {word!r}, which is not in 'files'; {fix}"
        elif position == 0 and listed and here and "/" not in word:
            yield f"key {key!r} starts with the file {word!r}; write {'./' + word!r} to run it"
        elif position == 0 and listed and here and not os.access(root / path, os.X_OK):
            yield f"key {key!r} starts with {word!r}, not executable; chmod +x it or name its interpreter"


def _may_be_file(word: str) -> bool:
    if not word or word.startswith(("-", "/", "~")) or len(word) > 200:
        return False
    return not re.search(r"[\s{}$*?;|&<>=:]", word) and ".." not in PurePosixPath(word).parts
