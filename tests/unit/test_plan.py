"""From a request to a plan, and from a plan to its benchmark and places again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from evalfleet.benchmarks.command import CommandBenchmark
from evalfleet.errors import RequestError
from evalfleet.model import AttemptId, Limits, Plan, Task, TaskId, Verdict
from evalfleet.planning.config import find_config, load_config
from evalfleet.planning.load import LentPool
from evalfleet.planning.plan import Resolved, weigh
from evalfleet.planning.plan_parts import benchmark_of, changed_settings, places_of, secret_names, specs_of
from evalfleet.planning.request import RunRequest
from evalfleet.ports import PlaceContext
from tests.unit.planned import resolve

NOW = 1_794_708_895_000_000
BENCH = """
name = "mybench"
command = ["bash", "run.sh", "{task_id}"]
files = ["run.sh"]
secrets = ["API_KEY"]
timeout_s = 100
settings = {temperature = 1, top_p = 0.5, path = "q"}
[[tasks]]
id = "a_1"
[[tasks]]
id = "a_2"
timeout_s = 40000
[[tasks]]
id = "b_1"
"""
SHED = '''
from msgspec import Struct
from tests.unit.planned import resolve

class Shed:
    default_canary = 1
    changeable = ("hosts",)
    class Settings(Struct, frozen=True, forbid_unknown_fields=True):
        door: str
        hosts: tuple[str, ...] = ()
        watts: int = 1
    @classmethod
    def make(cls, name, settings, context): return (name, settings, context)

class Barn(Shed):
    class Settings(Struct, frozen=True, forbid_unknown_fields=True):
        spot: bool = False

class Fixed:
    """A benchmark whose settings are its own."""
    declares_settings = False
    class Settings(Struct, frozen=True, forbid_unknown_fields=True):
        size: int = 1
    @classmethod
    def load(cls, name, settings, base, home):
        from evalfleet.benchmarks.loaded import Loaded
        from evalfleet.model import Task
        return Loaded(name="fixed", spec={"size": settings.size}, tasks=(Task("t"),))
    @classmethod
    def from_spec(cls, spec, *, model, agent, settings): return (spec, model, agent, settings)
'''


@pytest.fixture
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "run.sh").write_text("echo")
    (tmp_path / "bench" / "b.toml").write_text(BENCH)
    module = module_of(tmp_path)
    (tmp_path / f"{module}.py").write_text(SHED)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def module_of(cwd: Path) -> str:
    """Modules are imported once a process: each test's has a name of its own."""
    return "plan_" + "".join(c for c in cwd.name if c.isalnum())


def configure(cwd: Path, text: str) -> None:
    (cwd / "evalfleet.toml").write_text(text.replace("MODULE", module_of(cwd)))


# Most tests are about something else than places: they need one that is there.
SHED_PLACE = '[places.shed]\nkind = "MODULE:Shed"\ndoor = "left"\n'


def resolved(
    cwd: Path, benchmark: str = "bench/b.toml", env: dict[str, str] | None = None, **given: Any
) -> Resolved:
    if not (cwd / "evalfleet.toml").exists():
        configure(cwd, SHED_PLACE)
    given.setdefault("on", "shed")
    request = RunRequest(benchmark=benchmark, **given)
    environ = {"API_KEY": "hunter2"} if env is None else env
    return resolve(request, environ=environ, cwd=cwd, now=NOW, home_id="0123456789")


def fails(cwd: Path, message: str, benchmark: str = "bench/b.toml", **given: Any) -> None:
    with pytest.raises(RequestError) as caught:
        resolved(cwd, benchmark, **given)
    assert str(caught.value).replace(str(cwd), "@").replace(module_of(cwd), "MODULE") == message


def test_a_plain_request(cwd: Path) -> None:
    found = resolved(cwd)
    plan = found.plan
    assert (plan.run, plan.benchmark, plan.places) == ("mybench-20261115-021455", "mybench", ("shed",))
    assert plan.limits == Limits(canary=1, lease_s=80600)
    assert (plan.verdict, plan.home, plan.slots, plan.schedule) == (Verdict(), "0123456789", 1, "dynamic")
    assert [task.id for task in found.tasks] == ["a_1", "a_2", "b_1"]
    assert found.home == cwd / "benchmark_results"
    assert found.secrets == {"API_KEY": "hunter2"}
    assert found.warnings == ()


def test_a_pool_has_the_canary_of_its_places(cwd: Path) -> None:
    pool = msgspec.structs.replace(resolved(cwd).plan, run="p")
    request = RunRequest(benchmark="bench/b.toml", pool="p")
    environ = {"API_KEY": "hunter2"}
    plan = resolve(request, environ=environ, cwd=cwd, now=NOW, pool=LentPool(pool)).plan
    assert (plan.pool, plan.places, plan.limits.canary) == ("p", ("shed",), 1)
    asked = request.but(canary=0)
    assert resolve(asked, environ=environ, cwd=cwd, now=NOW, pool=LentPool(pool)).plan.limits.canary == 0
    auto = request.but(workers="auto", deadline="1h")
    found = resolve(auto, environ=environ, cwd=cwd, now=NOW, pool=LentPool(pool, machines=2)).plan.limits
    assert (found.auto, found.workers) == (True, 2), "it has as many machines as the pool, at most"


def test_every_flag_reaches_the_plan(cwd: Path) -> None:
    found = resolved(
        cwd,
        workers=2,
        model="m",
        agent={"steps": "5"},
        settings={"temperature": "0"},
        budget="$5",
        max_duration="2h",
        task_timeout="1h",
        attempts=12,
        schedule="slices",
        canary=0,
        keep=True,
        name="mine",
        allow_broken="5%",
        fail_under="40%",
        repeat=2,
        domains=["a"],
    )
    plan = found.plan
    assert (plan.run, plan.model, plan.schedule) == ("mine", "m", "slices")
    assert (plan.agent, plan.settings) == ({"steps": "5"}, {"temperature": "0"})
    assert plan.verdict == Verdict(0.05, True, 0.4)
    assert plan.limits == Limits(
        workers=2,
        attempts=12,
        attempts_ceiling=12,
        budget_usd=5.0,
        max_duration_s=7200.0,
        lease_s=max(Limits().lease_s, 7800.0),
    )
    assert [(task.id, task.timeout_s) for task in found.tasks] == [
        (id, 3600.0) for id in ("a_1~1", "a_2~1", "a_1~2", "a_2~2")
    ]


def test_a_plan_makes_its_benchmark_and_places_again_after_a_trip_through_json(cwd: Path) -> None:
    found = resolved(cwd, model="m", repeat=2)
    plan = msgspec.json.decode(msgspec.json.encode(found.plan), type=Plan)
    assert plan == found.plan
    assert secret_names(plan) == ("API_KEY",)
    command = benchmark_of(plan).command(found.tasks[-1], AttemptId("b_1~2.0"))
    assert command.argv == ("bash", "run.sh", "b_1")
    assert (command.env["EVALFLEET_MODEL"], command.env["EVALFLEET_REPEAT"]) == ("m", "2")
    assert sorted(benchmark_of(plan).bundle.files) == ["run.sh"]
    context = PlaceContext(found.home, "0123456789", {"K": "v"})
    made: Any = places_of(plan, context)["shed"]  # this place's `make` shows what it was given
    name, settings, given = made
    assert (name, settings.door, given.base, given.secrets) == ("shed", "left", cwd, {"K": "v"})


def test_without_repeats_the_benchmark_is_the_commands_own(cwd: Path) -> None:
    assert isinstance(benchmark_of(resolved(cwd).plan), CommandBenchmark)


def test_no_secret_is_in_the_plan_or_shown(cwd: Path) -> None:
    found = resolved(cwd)
    assert b"hunter2" not in msgspec.json.encode(found.plan)
    assert "hunter2" not in repr(found)


def test_missing_secrets_are_all_named_before_anything_starts(cwd: Path) -> None:
    bench = cwd / "bench" / "b.toml"
    bench.write_text(BENCH.replace('["API_KEY"]', '["API_KEY", "B_KEY", "C_KEY"]'))
    fails(
        cwd,
        "the benchmark needs API_KEY, C_KEY; set them in the environment, in .env beside evalfleet.toml, "
        "or in a file given with --env-file",
        env={"B_KEY": "x", "C_KEY": ""},
    )


def test_a_machine_is_set_up_without_what_only_attempts_need(cwd: Path) -> None:
    configure(cwd, SHED_PLACE)
    request = RunRequest(benchmark="bench/b.toml", on="shed")
    found = resolve(request, environ={}, cwd=cwd, now=NOW, purpose="setup")
    assert found.secrets == {}
    assert secret_names(found.plan) == ("API_KEY",)


def test_secrets_come_from_the_nearest_of_env_file_environment_and_dotenv(cwd: Path) -> None:
    (cwd / ".env").write_text("API_KEY=dotenv\nEVALFLEET_MODEL=from-dotenv\n")
    (cwd / "my.env").write_text("API_KEY=file\nEVALFLEET_WORKERS=2\n")
    assert resolved(cwd, env={}).secrets == {"API_KEY": "dotenv"}
    assert resolved(cwd, env={}).plan.model == "from-dotenv"
    assert resolved(cwd, env={"API_KEY": "environ"}).secrets == {"API_KEY": "environ"}
    found = resolved(cwd, env={"API_KEY": "environ"}, env_file="my.env")
    assert found.secrets == {"API_KEY": "file"}
    assert found.plan.limits.workers == 2
    fails(cwd, "@/none.env: no such file; check the path", env_file="none.env")


def test_an_env_file_is_never_uploaded(cwd: Path) -> None:
    bench = cwd / "bench" / "b.toml"
    bench.write_text(BENCH.replace('["run.sh"]', '["run.sh", "data"]'))
    (cwd / "bench" / "data").mkdir()
    (cwd / "bench" / "data" / "my.env").write_text("API_KEY=1")
    fails(
        cwd,
        "--env-file @/bench/data/my.env would be uploaded with the benchmark's files; "
        "move it out of @/bench/data",
        env_file="bench/data/my.env",
    )


def test_profiles_and_configs_are_chosen_by_flag_or_variable(cwd: Path) -> None:
    (cwd / "other.toml").write_text(f'[places.shed]\nkind = "{module_of(cwd)}:Shed"\ndoor = "other"\n')
    configure(cwd, SHED_PLACE + "[profiles.wide]\nworkers = 3\n")
    assert resolved(cwd, profile="wide").plan.limits.workers == 3
    env = {"API_KEY": "k", "EVALFLEET_PROFILE": "wide"}
    assert resolved(cwd, env=env).plan.limits.workers == 3
    assert resolved(cwd, config="other.toml").plan.place_specs["shed"]["settings"] == {"door": "other"}
    fails(cwd, "@/none.toml: no such file; check the path", config="none.toml")


def test_what_may_change_while_machines_live_is_read_again(cwd: Path) -> None:
    configure(cwd, SHED_PLACE + 'hosts = ["a"]\n')
    plan = resolved(cwd).plan
    configure(cwd, SHED_PLACE.replace("left", "right") + 'hosts = ["b"]\n')
    changed = changed_settings(plan, load_config(find_config(cwd), cwd))
    assert changed == {"shed": {"hosts": ["b"]}}
    made: Any = places_of(plan, PlaceContext(cwd, "h"), changed)["shed"]
    assert (made[1].door, made[1].hosts) == ("left", ("b",))
    elsewhere = cwd / "deep"
    elsewhere.mkdir()
    (elsewhere / "evalfleet.toml").write_text((cwd / "evalfleet.toml").read_text())
    assert not changed_settings(plan, load_config(find_config(elsewhere), elsewhere)), "another file's place"


def test_a_benchmark_of_the_config_is_beside_it_and_has_default_settings(cwd: Path) -> None:
    configure(cwd, SHED_PLACE + '[benchmarks.mine]\npath = "bench/b.toml"\nset = {a = 1, b = true}\n')
    deep = cwd / "deep"
    deep.mkdir()
    request = RunRequest(benchmark="mine", on="shed", settings={"a": "2"})
    found = resolve(request, environ={"API_KEY": "k"}, cwd=deep, now=NOW)
    assert found.plan.settings == {"a": "2", "b": "true"}
    assert found.home == cwd / "benchmark_results"


def test_unknown_benchmarks_and_places_are_refused_with_the_nearest(cwd: Path) -> None:
    configure(cwd, SHED_PLACE + '[benchmarks.mine]\npath = "x"\nsett = {}\n')
    fails(cwd, "benchmark 'mime' is unknown; did you mean 'mine'?", "mime")
    (cwd / "bee.toml").write_text(BENCH)
    fails(cwd, "benchmark 'bee' is unknown; did you mean the file bee.toml?", "bee")
    fails(cwd, "@/none.toml: no such file; check the path", "none.toml")
    fails(cwd, "@/evalfleet.toml: [benchmarks.mine]: key 'sett' is unknown; did you mean 'set'?", "mine")
    fails(cwd, "benchmark 'command': key 'path' is missing; add it", "command")
    fails(cwd, "place 'shad' is unknown; did you mean 'shed'?", on="shed,shad")
    fails(cwd, "--on names no place; write one such as local", on=",")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            'door = "x"',
            "key 'kind' is missing; write one of azure_batch, azure_ml, azure_vm, gce, local, slurm, ssh",
        ),
        ('kind = 3\ndoor = "x"', "key 'kind' must be a string"),
        (
            'kind = "MODULE:Shad"',
            "key 'kind': place 'MODULE:Shad': MODULE has no 'Shad'; did you mean 'Shed'?",
        ),
        ('kind = "MODULE:Shed"', "key 'door' is missing; add it"),
        ('kind = "MODULE:Shed"\ndor = "x"', "key 'dor' is unknown; did you mean 'door'?"),
        ('kind = "MODULE:Shed"\ndoor = "x"\nwatts = "2"', "key 'watts' must be a whole number, not a string"),
    ],
)
def test_a_wrong_place_is_refused_with_its_key(cwd: Path, table: str, message: str) -> None:
    configure(cwd, f"[places.farm]\n{table}\n")
    fails(cwd, f"@/evalfleet.toml: [places.farm]: {message}", on="farm")


def test_settings_go_to_whom_they_belong(cwd: Path) -> None:
    configure(cwd, SHED_PLACE + '[places.barn]\nkind = "MODULE:Shed"\n')
    given = {"watts": "7", "barn.door": "red", "hosts": "h1,h2", "top_p": "1", "path": "p"}
    plan = resolved(cwd, on="shed,barn", settings=given).plan
    assert plan.place_specs["shed"]["settings"] == {"door": "left", "watts": 7, "hosts": ["h1", "h2"]}
    assert plan.place_specs["barn"]["settings"] == {"door": "red", "watts": 7, "hosts": ["h1", "h2"]}
    assert plan.settings == {"top_p": "1", "path": "p"}
    fails(cwd, "--set 'watts' is 'x'; write a whole number", settings={"watts": "x"})


def test_a_benchmark_with_settings_of_its_own_takes_no_others(cwd: Path) -> None:
    name = f"{module_of(cwd)}:Fixed"
    found = resolved(cwd, name, settings={"size": "3"})
    source = {"name": name, "base": str(cwd), "settings": {"size": 3}}
    assert found.plan.benchmark_spec == {"kind": name, "spec": {"size": 3}, "source": source}
    assert found.plan.settings == {"size": "3"}
    assert found.secrets == {}
    fails(
        cwd,
        "--set 'sizes' is no setting of benchmark or place; did you mean 'size'?",
        name,
        settings={"sizes": "3"},
    )


def test_a_bad_run_name_is_refused(cwd: Path) -> None:
    fails(
        cwd,
        "run name 'a b' cannot be used; give --name 1 to 60 letters, digits, '.', '_' or '-', "
        "the first a letter or digit",
        name="a b",
    )


def test_a_secret_in_an_argument_is_refused_and_not_shown(cwd: Path) -> None:
    options: list[dict[str, Any]] = [{"agent": {"key": "Bearer sk-0123456789"}}, {"model": "sk-0123456789"}]
    for option in options:
        with pytest.raises(RequestError, match="holds the value of API_KEY") as refused:
            resolved(cwd, env={"API_KEY": "sk-0123456789"}, **option)
        assert "0123456789" not in str(refused.value)


def test_a_secret_that_cannot_be_masked_is_told(cwd: Path) -> None:
    for value in ("true", "5000", "x"):
        (told,) = resolved(cwd, env={"API_KEY": value}).warnings
        assert told.startswith("the value of API_KEY is so short or common that it is not masked")


def test_files_with_secrets_that_others_can_read_are_told(cwd: Path) -> None:
    for name, options in ((".env", {}), ("my.env", {"env_file": "my.env"})):
        (cwd / name).write_text("API_KEY=sk-0123456789\n")
        (cwd / name).chmod(0o640)
        assert f"chmod 600 {cwd / name}" in " ".join(resolved(cwd, env={}, **options).warnings)
        (cwd / name).chmod(0o600)
        assert resolved(cwd, env={}, **options).warnings == ()


def test_doubts_are_told(cwd: Path) -> None:
    found = resolved(
        cwd, workers=9, max_duration="60s", tasks=9, env={"API_KEY": "hunter2", "EVALFLEET_MODLE": "x"}
    )
    assert found.warnings == (
        "variable EVALFLEET_MODLE is ignored; did you mean 'model'?",
        "--tasks 9 is more than there are; all 3 tasks run",
        "--max-duration of 60 s is shorter than a task's time limit of 40000 s",
        "--workers 9 is more than 3 tasks can use; 3 will do",
    )


def test_tasks_weigh_what_earlier_runs_tell() -> None:
    tasks = [Task(TaskId(id)) for id in ("a", "b~2", "c", "d", "e")]
    weighed = weigh(tasks, {"a": 5.0, "b": 7.0, "c": float("nan"), "d": -1.0})
    assert [task.weight_s for task in weighed] == [5.0, 7.0, None, None, None]


def test_the_same_request_gives_the_same_plan(cwd: Path) -> None:
    assert msgspec.json.encode(resolved(cwd, tasks=2).plan) == msgspec.json.encode(
        resolved(cwd, tasks=2).plan
    )


# -- spot ------------------------------------------------------------------------------------------

BARN_PLACE = '[places.barn]\nkind = "MODULE:Barn"\n'


def test_spot_is_the_setting_of_the_places_that_have_it(cwd: Path) -> None:
    configure(cwd, SHED_PLACE + BARN_PLACE)
    specs = specs_of(resolved(cwd, on="barn,shed", spot=True).plan)
    assert specs["barn"].settings["spot"] is True
    assert "spot" not in specs["shed"].settings
    assert "spot" not in specs_of(resolved(cwd, on="barn").plan)["barn"].settings


def test_several_places_are_tried_in_their_order_or_mixed_by_price(cwd: Path) -> None:
    configure(cwd, SHED_PLACE + BARN_PLACE + '[tiers]\ncheap = ["barn", "shed"]\n')
    assert resolved(cwd, on="shed").plan.ordered is False, "there is nothing to order"
    for on in ("barn,shed", "cheap", "cheap,barn"):
        plan = resolved(cwd, on=on).plan
        assert (plan.places, plan.ordered) == (("barn", "shed"), True)
    assert resolved(cwd, on="cheap", mix=True).plan.ordered is False


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        ("cheap = []", '\'cheap\' is []; write places, such as ["mine", "cloud"]'),
        ('cheap = "shed"', "'cheap' is 'shed'; write places, such as [\"mine\", \"cloud\"]"),
        ('shed = ["local"]', "'shed' is a place, too; give one of them another name"),
        (
            'one = ["shed"]\ntwo = ["one", "shed"]',
            "'two' names the list 'one'; write the places themselves",
        ),
    ],
)
def test_a_wrong_list_of_places_is_refused(cwd: Path, tiers: str, message: str) -> None:
    configure(cwd, f"{SHED_PLACE}[tiers]\n{tiers}\n")
    fails(cwd, f"@/evalfleet.toml: [tiers]: {message}")


def test_spot_where_there_is_none_is_refused_unless_it_is_only_a_default(cwd: Path) -> None:
    fails(cwd, "--spot: shed has no spot machines; leave it out, or choose another place", spot=True)
    configure(cwd, SHED_PLACE + "[defaults]\nspot = true\n")
    assert "spot" not in specs_of(resolved(cwd).plan)["shed"].settings


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *(("usd_per_hour", "-3"), ("usd_per_hour", "1e9")),
        *(("billing_step_s", "0"), ("max_machines", "0"), ("max_machines", "-1")),
    ],
)
def test_numbers_below_zero_or_beyond_sense_are_refused(cwd: Path, setting: str, value: str) -> None:
    with pytest.raises(RequestError, match=setting):
        resolved(cwd, on="local", settings={setting: value})
