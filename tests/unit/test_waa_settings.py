"""Windows Agent Arena as it is asked for: settings onto flags, tasks of a checkout, needs, secrets."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from evalfleet.benchmarks.loaded import Loaded
from evalfleet.benchmarks.waa.benchmark import FOLDER, STEPS, WaaBenchmark
from evalfleet.benchmarks.waa.host.config import HostConfig
from evalfleet.benchmarks.waa.settings import CLIENT_FLAGS, WaaSettings, client_flags
from evalfleet.errors import RequestError
from evalfleet.model import AttemptId, Broken, Cause, Ended, Needs, Scored, Task, TaskId
from evalfleet.planning.load import LentPool
from evalfleet.planning.plan import Resolved
from evalfleet.planning.plan_parts import benchmark_of
from evalfleet.planning.request import RunRequest
from evalfleet.schedules import in_slices
from standins.waa.standin import write_iso
from tests.unit.planned import resolve

FLAGS_OF_RUN_PY = """
    headless action_space observation_type screen_width screen_height sleep_after_execution max_steps
    a11y_backend agent_name som_origin max_trajectory_length test_config_base_dir model temperature top_p
    max_tokens stop_token domain emulator_ip test_all_meta_path result_dir trial_id worker_id
    num_workers diff_lvl"""
"""As in WAA's own run.py."""

LISTED = {"notepad": ["n1", "n2"], "vlc": ["v1"]}
DEFINED = [f"examples/{domain}/{id}.json" for domain, ids in LISTED.items() for id in ids]
DIGEST = "sha256:" + "a" * 64
TASK = Task(TaskId("n1"), "notepad", timeout_s=900.0)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    inside = tmp_path / "WindowsAgentArena/src/win-arena-container/client/evaluation_examples_windows"
    for domain, ids in LISTED.items():
        (inside / "examples" / domain).mkdir(parents=True)
        for id in ids:
            (inside / "examples" / domain / f"{id}.json").write_text("{}")
    (inside / "test_all.json").write_text(json.dumps(LISTED))
    (inside / "test_small.json").write_text(json.dumps({"vlc": ["v1"]}))
    return tmp_path / "WindowsAgentArena"


def load(base: Path, **settings: Any) -> Loaded:
    """As a run does, which cannot do without tasks."""
    loaded = WaaBenchmark.load("waa", msgspec.convert(settings, WaaSettings), base, base / "home")
    if loaded.tasks_missing:
        raise RequestError(loaded.tasks_missing)
    return loaded


def benchmark(**settings: Any) -> WaaBenchmark:
    return WaaBenchmark(msgspec.convert(settings, WaaSettings), model="gpt-4o")


def order_of(made: WaaBenchmark) -> dict[str, Any]:
    command = made.command(TASK, AttemptId("n1.2"))
    found: dict[str, Any] = json.loads(command.env["EVALFLEET_WAA_ATTEMPT"])
    return found


# -- flags -----------------------------------------------------------------------------------------


def test_every_flag_is_one_that_the_client_has() -> None:
    flags = client_flags(WaaSettings(), "gpt-4o", {})
    assert {flag[2:] for flag in flags[::2]} <= set(FLAGS_OF_RUN_PY.split())
    assert len(flags) == 2 * (len(CLIENT_FLAGS) + 2)


def test_settings_become_flags() -> None:
    made = WaaSettings(som_origin="mixed-omni", max_steps=30, temperature=0.5, diff_lvl="hard")
    flags = client_flags(made, "gpt-4o-mini", {})
    told = dict(zip(flags[::2], flags[1::2], strict=True))
    assert told["--agent_name"] == "navi"
    assert told["--model"] == "gpt-4o-mini"
    assert (told["--som_origin"], told["--max_steps"], told["--temperature"]) == ("mixed-omni", "30", "0.5")
    assert (told["--diff_lvl"], told["--sleep_after_execution"]) == ("hard", "3")


def test_an_agent_of_ones_own_may_have_arguments_and_navi_has_none() -> None:
    assert client_flags(WaaSettings(agent="mine"), "m", {"depth": "2"})[-2:] == ["--depth", "2"]
    with pytest.raises(RequestError, match=r"-A 'max_step' is nothing that navi takes.*'max_steps'"):
        client_flags(WaaSettings(), "m", {"max_step": "2"})
    with pytest.raises(
        RequestError, match="takes it for its own flag --max_steps; use --set max_steps=VALUE"
    ):
        client_flags(WaaSettings(agent="mine"), "m", {"max_step": "2"})
    with pytest.raises(RequestError, match="takes it for its own flag --worker_id; write another name"):
        client_flags(WaaSettings(agent="mine"), "m", {"worker": "2"})
    assert client_flags(WaaSettings(agent="mine"), "m", {"stop_token": "x"})[-2:] == ["--stop_token", "x"]
    flags = client_flags(WaaSettings(agent="mine", screen_width=1280, screen_height=720), "m", {})
    assert flags[flags.index("--screen_width") :][:4] == ["--screen_width", "1280", "--screen_height", "720"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"golden": "https://x.blob/g?sig=abc"}, "golden_token=NAME"),
        ({"golden": "relative/path"}, "a URL or an absolute path"),
        ({"registry_password": "hunter 2", "registry_user": "u"}, "never values"),
        ({"registry_password": "PASSWORD"}, "needs registry_user"),
        ({"ram": "lots"}, "a size such as 8G"),
        ({"agent": "a b"}, "write its name"),
        (
            {"som_origin": "a11y", "observation_type": "screenshot"},
            "takes marks from the accessibility tree.*say observation_type=a11y_tree, or som_origin=oss",
        ),
        (
            {"screen_width": 1280},
            "screen_width is 1280, and navi of windowsarena/winarena:latest never uses it; leave it out",
        ),
        (
            {"top_p": 0.5},
            "top_p is 0.5, and navi of windowsarena/winarena:latest never uses it; leave it out",
        ),
        ({"agent": "claude"}, "starts with no other than navi; give an image that has your agent"),
        ({"api": "azure"}, "asks OpenAI's API alone; say api=openai and base_url="),
    ],
)
def test_what_cannot_work_is_refused(checkout: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words) as refusal:
        load(checkout.parent, **settings)
    assert "sig=abc" not in str(refusal.value)
    assert "hunter 2" not in str(refusal.value)


def test_an_unknown_setting_is_refused_with_a_suggestion(checkout: Path) -> None:
    request = RunRequest(benchmark="waa", model="m", settings={"som_orgin": "oss"})
    with pytest.raises(RequestError, match="did you mean 'som_origin'"):
        resolve(request, environ={"OPENAI_API_KEY": "k"}, cwd=checkout.parent, now=0)


def test_a_value_that_is_none_of_those_there_are_is_refused_with_those(checkout: Path) -> None:
    request = RunRequest(benchmark="waa", model="m", settings={"som_origin": "os"})
    with pytest.raises(RequestError, match="write one of oss, a11y, mixed-oss, omni, mixed-omni"):
        resolve(request, environ={"OPENAI_API_KEY": "k"}, cwd=checkout.parent, now=0)


# -- tasks -----------------------------------------------------------------------------------------


def test_a_checkout_is_found_beside_the_configuration_and_by_name(checkout: Path) -> None:
    inside = "WindowsAgentArena/src/win-arena-container/client/evaluation_examples_windows"
    for base, given in ((checkout.parent, ""), (checkout, "."), (Path("/"), str(checkout.parent / inside))):
        tasks = load(base, waa=given).tasks
        assert [(task.id, task.domain) for task in tasks] == [
            ("n1", "notepad"),
            ("n2", "notepad"),
            ("v1", "vlc"),
        ]
        assert {task.timeout_s for task in tasks} == {900.0}


def test_without_a_list_both_ways_to_one_are_told(tmp_path: Path) -> None:
    ways = r"`git clone --depth 1 .*WindowsAgentArena`.*`evalfleet pool prepare POOL waa`"
    with pytest.raises(RequestError, match=ways):
        load(tmp_path)
    with pytest.raises(RequestError, match="is no folder"):
        load(tmp_path, waa="nowhere")
    with pytest.raises(RequestError, match=r"has no test_all\.json"):
        load(tmp_path, waa=".")


def test_other_lists_can_be_taken(checkout: Path) -> None:
    assert [task.id for task in load(checkout.parent, task_list="test_small").tasks] == ["v1"]
    with pytest.raises(RequestError, match="did you mean 'test_small'"):
        load(checkout.parent, task_list="test_smal")


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        ({"a": ["x"], "b": ["x"]}, "'x' is in 'a' and 'b'"),
        ({"a": ["../x"]}, "no name of a task"),
        ({"a": []}, "has no tasks"),
        ({"a": 3}, "is no list of tasks"),
    ],
)
def test_a_bad_list_is_refused(tmp_path: Path, listed: object, words: str) -> None:
    (tmp_path / "test_all.json").write_text(json.dumps(listed))
    with pytest.raises(RequestError, match=words):
        load(tmp_path, waa=".")


def test_a_task_that_nobody_defines_is_doubted(checkout: Path) -> None:
    assert load(checkout.parent).warnings == ()
    inside = checkout / "src/win-arena-container/client/evaluation_examples_windows"
    (inside / "examples/vlc/v1.json").unlink()
    (warning,) = load(checkout.parent).warnings
    assert "defines no task 'v1' (1 such)" in warning


def told(digest: str = DIGEST, /, **lists: object) -> bytes:
    """What a machine writes into result.json."""
    texts = {f"{name}.json": json.dumps(listed) for name, listed in lists.items()}
    return json.dumps({"name": "", "digest": digest, "texts": texts, "defined": DEFINED}).encode()


def test_what_a_machine_tells_serves_runs_with_its_image(tmp_path: Path) -> None:
    made = benchmark(image="mine:1")
    made.keep_tasks(told(test_all=LISTED, test_odd={"vlc": ["v9"]}), tmp_path / "home")
    loaded = load(tmp_path, image="mine:1")
    assert [task.id for task in loaded.tasks] == ["n1", "n2", "v1"]
    assert loaded.warnings == (f"tasks: from mine:1@{DIGEST}",)
    (_, doubt) = load(tmp_path, image="mine:1", task_list="test_odd").warnings
    assert "defines no task 'v9' (1 such)" in doubt
    with pytest.raises(RequestError, match="did you mean 'test_odd'"):
        load(tmp_path, image="mine:1", task_list="test_old")
    with pytest.raises(RequestError, match="git clone"):
        load(tmp_path, image="mine:2")
    made.keep_tasks(told("sha256:" + "b" * 64, test_all={"vlc": ["v1"]}), tmp_path / "home")
    assert [task.id for task in load(tmp_path, image="mine:1").tasks] == ["v1"], "the name has moved on"


@pytest.mark.parametrize(
    ("days", "words"),
    [
        (10, ()),
        (80, ("the licence of the Windows in golden=https://store/g ends in 9 days",)),
        (120, ("the licence of the Windows in golden=https://store/g ended 30 days ago",)),
    ],
)
def test_a_plan_tells_when_the_licence_of_its_golden_windows_ends(
    checkout: Path, days: int, words: tuple[str, ...]
) -> None:
    golden, installed_s = "https://store/g", time.time() - 86_400 * days - 3600
    listed = json.loads(told(test_all=LISTED)) | {"installed": installed_s}
    made = benchmark(golden=golden)
    made.keep_tasks(json.dumps(listed).encode(), checkout.parent / "home")
    assert made.good_until(json.dumps(listed).encode()) == int((installed_s + 90 * 86_400) * 1e6)
    warnings = load(checkout.parent, golden=golden).warnings
    assert tuple(warning.partition(" (")[0] for warning in warnings) == words
    assert load(checkout.parent, golden="https://other/g").warnings == ()
    assert load(checkout.parent, preset="waa-auto").warnings == (), "that one is installed anew"


@pytest.mark.parametrize("installed", [-1, 1e300, "yesterday", None, 0])
def test_a_machine_that_lies_about_its_windows_is_not_believed(tmp_path: Path, installed: object) -> None:
    listed = json.dumps(json.loads(told(test_all=LISTED)) | {"installed": installed}).encode()
    made = benchmark(golden="https://store/g")
    assert made.good_until(listed) is None
    made.keep_tasks(listed, tmp_path)
    assert not (tmp_path / ".waa/told/licences.json").exists()


def test_a_checkout_comes_before_what_a_machine_told(checkout: Path) -> None:
    benchmark().keep_tasks(told(test_all={"vlc": ["v1"]}), checkout.parent / "home")
    assert [task.id for task in load(checkout.parent).tasks] == ["n1", "n2", "v1"]


def test_a_list_that_an_earlier_version_read_from_a_registry_still_serves(tmp_path: Path) -> None:
    """As it was written by the version that had readers of images."""
    kept = tmp_path / "home/.waa/tasks"
    kept.mkdir(parents=True)
    (kept / "names.json").write_text(f'{{"windowsarena/winarena:latest":"{DIGEST}"}}')
    (kept / f"{DIGEST.replace(':', '-')}.json").write_text(
        f'{{"name":"windowsarena/winarena:latest","digest":"{DIGEST}",'
        '"texts":{"test_all.json":"{\\"vlc\\": [\\"v1\\"]}"},"defined":["examples/vlc/v1.json"]}'
    )
    loaded = load(tmp_path)
    assert [task.id for task in loaded.tasks] == ["v1"]
    assert loaded.warnings == (f"tasks: from windowsarena/winarena:latest@{DIGEST}",)


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        (b"", "what it tells is no list of tasks"),
        (b"[]", "what it tells is no list of tasks"),
        (told("sha256:../../x", test_all=LISTED), "its digest or a name in it is malformed"),
        (told(**{"test_all": LISTED, "test_\x1b[2J": LISTED}), "its digest or a name in it is malformed"),
        (told(test_small=LISTED), r"has no test_all\.json"),
    ],
)
def test_what_is_no_list_is_not_kept(tmp_path: Path, listed: bytes, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        benchmark().keep_tasks(listed, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_checkout_of_the_other_arena_is_refused(tmp_path: Path) -> None:
    client = tmp_path / "V2/src/win-arena-container/client"
    (client / "evaluation_examples_windows").mkdir(parents=True)
    (client / "evaluation_examples_windows/test_all.json").write_text(json.dumps(LISTED))
    load(tmp_path, waa="V2")
    (client / "check_setup.py").write_text("")
    with pytest.raises(RequestError, match="is of WindowsAgentArena-V2, whose client has other flags"):
        load(tmp_path, waa="V2")


def test_a_kept_list_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    benchmark().keep_tasks(told(test_all=LISTED), tmp_path / "home")
    (file,) = (tmp_path / "home/.waa/told").glob("sha256-*.json")
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(RequestError, match="git clone"):
        load(tmp_path)


def test_a_machine_can_be_set_up_before_the_tasks_are_known(tmp_path: Path) -> None:
    (tmp_path / "evalfleet.toml").write_text('[defaults]\ntasks = 30\n[benchmarks.waa]\ntask_list = "new"\n')
    request = RunRequest(benchmark="waa")
    found = resolve(request, environ={}, cwd=tmp_path, now=0, purpose="setup")
    assert found.tasks == ()
    assert benchmark_of(found.plan).bundle.steps
    with pytest.raises(RequestError, match="git clone"):
        resolve(request, environ={"OPENAI_API_KEY": "k"}, cwd=tmp_path, now=0)


# -- a plan ----------------------------------------------------------------------------------------


def test_a_plan_has_what_people_expect(checkout: Path) -> None:
    settings = {"preset": "waa-auto"}
    request = RunRequest("waa", model="gpt-4o", domains=["notepad"], schedule="slices", settings=settings)
    resolved = resolve(request, environ={"OPENAI_API_KEY": "k"}, cwd=checkout.parent, now=0)
    plan = resolved.plan
    assert (plan.machine_names, plan.schedule, plan.slots) == ("waa-eval-{n}", "slices", 1)
    assert [task.id for task in resolved.tasks] == ["n1", "n2"]
    assert plan.model_usd is not None
    assert [round(154 * usd) for usd in plan.model_usd] == [15, 100]
    assert plan.limits.boot_timeout_s > 2 * 3600, "Windows may have to be installed"
    assert resolved.secrets == {"OPENAI_API_KEY": "k"}
    made = benchmark_of(plan)
    assert made.needs == Needs(
        cpus=8, memory_gb=32.0, disk_gb=128.0, nested_virtualization=True, strict=False
    )


def test_an_agent_without_models_of_its_own_needs_less() -> None:
    assert benchmark(som_origin="a11y").needs == Needs(
        4, 16.0, 128.0, nested_virtualization=True, strict=False
    )
    assert not benchmark(kvm=False).needs.nested_virtualization


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, ("OPENAI_API_KEY",)),
        ({"api": "azure", "image": "mine"}, ("AZURE_API_KEY", "AZURE_ENDPOINT")),
        ({"api": "none"}, ()),
        ({"api": "none", "secrets": ["ANTHROPIC_API_KEY"]}, ("ANTHROPIC_API_KEY",)),
        (
            {"registry_user": "u", "registry_password": "PW", "golden_token": "SAS"},
            ("OPENAI_API_KEY", "PW", "SAS"),
        ),
    ],
)
def test_secrets_by_name(checkout: Path, settings: dict[str, Any], names: tuple[str, ...]) -> None:
    assert load(checkout.parent, **settings).secrets == names


# -- on the machine --------------------------------------------------------------------------------


def test_steps_have_names_and_only_those_secrets_that_they_need() -> None:
    bundle = benchmark(registry_user="u", registry_password="PW", golden_token="SAS").bundle
    assert [step.name for step in bundle.steps] == list(STEPS)
    assert {step.name: step.command.secrets for step in bundle.steps if step.command.secrets} == {
        "image": ("PW",),
        "golden": ("SAS",),
    }
    assert {f"waa/host/{path.name}" for path in FOLDER.glob("host/*.py")} < set(bundle.files)
    assert not [name for name in bundle.files if "benchmark" in name or "settings" in name]


def test_a_machine_that_is_set_up_serves_other_models_and_not_other_images() -> None:
    plain = benchmark().bundle.digest
    assert WaaBenchmark(WaaSettings(max_steps=3, fresh="each"), model="other").bundle.digest == plain
    assert benchmark(image="mine:latest").bundle.digest != plain


def test_an_attempt_is_told_everything_but_secrets() -> None:
    made = benchmark(fresh="each", base_url="http://x/v1")
    order = order_of(made)
    assert (order["attempt"], order["task"], order["domain"]) == ("n1.2", "n1", "notepad")
    assert (order["limit_s"], order["fresh"], order["secrets"]) == (900.0, True, ["OPENAI_API_KEY"])
    assert order["environ"] == ["OPENAI_BASE_URL=http://x/v1"]
    assert made.command(TASK, AttemptId("n1.2")).secrets == ("OPENAI_API_KEY",)


def test_outcomes() -> None:
    made = benchmark()
    scored = made.outcome(TASK, Ended("exited", 0, 30.0, b'{"score": 1, "seconds": 12}'), True)
    assert scored == Scored(1.0, success=True, seconds=12.0)
    stuck = made.outcome(TASK, Ended("timed_out", None, 3000.0), True)
    assert isinstance(stuck, Broken)
    assert stuck.cause is Cause.STUCK


@pytest.mark.parametrize(("total", "workers"), [(154, 10), (154, 40), (30, 5), (7, 7), (3, 5), (1, 1)])
def test_slices_are_those_of_waas_own_client(total: int, workers: int) -> None:
    """As in run.py, with --worker_id and --num_workers."""
    tasks_per_worker, extra = total // workers, total % workers
    expected: list[int] = []
    for worker in range(workers):
        start = worker * tasks_per_worker + min(worker, extra)
        end = start + tasks_per_worker + (1 if worker < extra else 0)
        expected += [worker] * (end - start)
    assert [in_slices(index, total, workers) for index in range(total)] == expected


def test_preparing_asks_for_the_registrys_password_and_never_for_the_models_key(checkout: Path) -> None:
    given = {"waa": str(checkout), "registry_user": "me", "registry_password": "ACR"}
    request = RunRequest(benchmark="waa", settings=given)
    environ = {"ACR": "hunter2", "HOME": str(checkout)}
    found = resolve(request, environ=environ, cwd=checkout, now=0, purpose="setup")
    assert found.secrets == {"ACR": "hunter2"}
    with pytest.raises(RequestError, match="OPENAI_API_KEY"):
        resolve(request, environ=environ, cwd=checkout, now=0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("data", bad) for bad in ("", "windows", "./x", "/", "/a b", "/a:b")),
        *(
            ("iso", bad)
            for bad in ("host:win.iso", "host:/a:b", "https://a/b.iso", "https://a/b.iso#sha256=1")
        ),
        *(("image", bad) for bad in ("-v", "a b")),
        *(("version", "1 1"), ("emulator_ip", "20.20.20.21 --foo"), ("emulator_ip", "-x")),
        *(("action_space", bad) for bad in ("", "..", "../../x", "a/b")),
        *(("base_url", bad) for bad in ("api.example.org", "ftp://x")),
    ],
)
def test_what_would_only_fail_on_the_machine_is_refused_here(checkout: Path, key: str, value: str) -> None:
    with pytest.raises(RequestError, match=rf"benchmark 'waa': {key} is .*; write "):
        load(checkout.parent, **{key: value})


@pytest.mark.parametrize("model", ["../x", "a//b", "/a", "-m", "a/", "a\nb"])
def test_a_model_that_would_lead_out_of_its_folder_is_refused(model: str) -> None:
    with pytest.raises(RequestError, match="is no name of a model; write one"):
        client_flags(WaaSettings(), model, {})


def test_models_with_slashes_and_colons_are_names() -> None:
    for model in ("gpt-4o", "meta-llama/Llama-3.2-90B", "ft:gpt-4o:me::x", "a b"):
        assert model in client_flags(WaaSettings(), model, {})


def test_a_large_guest_needs_a_large_machine() -> None:
    assert benchmark(ram="64G").needs.memory_gb == 96.0


@pytest.mark.parametrize(("text", "hint"), [("inf", "a finite number"), ("soon", "a number")])
def test_a_wrong_number_is_refused_in_words(checkout: Path, text: str, hint: str) -> None:
    request = RunRequest(benchmark="waa", model="m", settings={"waa": str(checkout), "boot_s": text})
    with pytest.raises(RequestError, match=rf"--set 'boot_s' is '{text}'; write {hint}"):
        resolve(request, environ={"OPENAI_API_KEY": "x"}, cwd=checkout, now=0)


def test_an_endless_number_in_a_file_is_refused(checkout: Path) -> None:
    (checkout / "evalfleet.toml").write_text("[benchmarks.waa]\nboot_s = inf\n")
    request = RunRequest(benchmark="waa", model="m", settings={"waa": str(checkout)})
    with pytest.raises(RequestError, match="key 'boot_s' is no finite number; write one"):
        resolve(request, environ={"OPENAI_API_KEY": "x"}, cwd=checkout, now=0)


def test_no_more_secrets_are_none(checkout: Path) -> None:
    request = RunRequest(
        benchmark="waa", model="m", settings={"waa": str(checkout), "golden": "/g", "secrets": ""}
    )
    assert set(resolve(request, environ={"OPENAI_API_KEY": "x"}, cwd=checkout, now=0).secrets) == {
        "OPENAI_API_KEY"
    }


# -- what tasks need in Windows --------------------------------------------------------------------


def test_a_task_knows_its_programs_and_asks_for_those_of_all_that_are_chosen(tmp_path: Path) -> None:
    needs: dict[str, dict[str, Any]] = {
        "libreoffice_calc": {"a": ["libreoffice calc"], "b": ["libreoffice-calc", "chrome"]},
        "vs_code": {"c": ["vscode"]},
        "vlc": {"undefined": None},
        "notepad": {"n": ["notepad"]},
        "settings": {"odd": 7},
    }
    for domain, tasks in needs.items():
        folder = tmp_path / "examples" / domain
        folder.mkdir(parents=True)
        for task, apps in tasks.items():
            if apps is not None:
                (folder / f"{task}.json").write_text(json.dumps({"id": task, "related_apps": apps}))
    (tmp_path / "test_all.json").write_text(json.dumps({name: list(tasks) for name, tasks in needs.items()}))
    loaded = load(tmp_path, waa=".")
    assert {task.id: task.params["programs"] for task in loaded.tasks} == {
        "a": ["LibreOffice"],
        "b": ["LibreOffice", "Google Chrome"],
        "c": ["VS Code"],
        "undefined": ["VLC"],
        "n": [],
        "odd": [],
    }
    assert loaded.settle is not None
    chosen = loaded.settle(loaded.tasks[:3])
    assert [task.params for task in chosen] == [
        {"programs": {"Google Chrome": 1, "LibreOffice": 2, "VS Code": 1}}
    ] * 3, "every one asks for what any of them needs"
    assert [task.params for task in loaded.settle(loaded.tasks[-2:])] == [{}, {}]


@pytest.mark.parametrize(("programs", "asked"), [("needed", {"VLC": 21}), ("any", {})])
def test_an_attempt_asks_for_its_programs_unless_any_will_do(programs: str, asked: dict[str, int]) -> None:
    task = Task(TaskId("v"), "vlc", {"programs": {"VLC": 21}})
    command = benchmark(programs=programs).command(task, AttemptId("v.0"))
    assert json.loads(command.env["EVALFLEET_WAA_ATTEMPT"])["programs"] == asked


# -- what Windows comes from -----------------------------------------------------------------------


def test_the_original_image_is_refused_with_nothing_to_install_windows_from(checkout: Path) -> None:
    def asked(**settings: str) -> RunRequest:
        return RunRequest(benchmark="waa", model="m", settings={"waa": str(checkout), **settings})

    def resolved(request: RunRequest, **more: Any) -> Resolved:
        return resolve(request, environ={"OPENAI_API_KEY": "k"}, cwd=checkout, now=0, **more)

    with pytest.raises(RequestError, match=r"holds no Windows.*Evaluation ISO from https.*iso=PATH.*golden="):
        resolved(asked())
    iso = write_iso(checkout / "windows.iso")
    for good in ({"iso": str(iso)}, {"iso": "windows.iso"}, {"golden": "machine"}, {"preset": "waa-auto"}):
        resolved(asked(**good))
    resolved(asked(), pool=LentPool(resolved(asked(golden="/g")).plan))
    resolved(asked(), purpose="setup")
    told = resolved(asked(), purpose="forecast").warnings
    assert [each[:48] for each in told if "Windows" in each] == [
        "before it can run: windowsarena/winarena:latest "
    ]


def test_an_iso_here_is_checked_and_known_by_its_contents(checkout: Path) -> None:
    path = write_iso(checkout / "windows.iso")
    loaded = load(checkout, waa=str(checkout), iso="windows.iso")
    made = WaaBenchmark.from_spec(loaded.spec, model="m", agent={}, settings={})
    (file,) = [step.file for step in made.bundle.steps if step.file is not None]
    assert (file.path, file.bytes) == (str(path), 101 << 20)
    told = json.loads(made.bundle.steps[0].command.env["EVALFLEET_WAA"])["iso"]
    assert told == f"sent:{file.name}:2:{101 << 20}"
    with path.open("r+b") as other:
        other.write(b"another")
    assert load(checkout, waa=str(checkout), iso="windows.iso").spec["iso"]["name"] != file.name
    for content, problem in ((b"PK", "is no ISO: it lacks the mark of one"), (None, "cannot be read")):
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(RequestError, match=f"windows.iso {problem}.*host:PATH for one that is on the"):
            load(checkout, waa=str(checkout), iso=str(path))


def test_golden_storage_here_is_known_by_its_contents_and_needs_a_pool_that_is_prepared(
    checkout: Path,
) -> None:
    golden, home = checkout / "storage", checkout / "home"
    golden.mkdir()
    home.mkdir()
    for name in ("windows.boot", "windows.rom", "windows.vars", "data.img", "notes.txt"):
        (golden / name).write_text(name)

    def made() -> WaaBenchmark:
        loaded = load(checkout, waa=str(checkout), golden="here:storage")
        assert "pool prepare" in loaded.setup_missing, "a run without a pool is refused"
        return WaaBenchmark.from_spec(loaded.spec, model="m", agent={}, settings={})

    (step,) = [step for step in made().bundle.steps if step.kept is not None]
    kept = step.kept
    assert kept is not None
    assert set(kept.paths) == {"windows.boot", "windows.rom", "windows.vars", "data.img"}
    told = json.loads(step.command.env["EVALFLEET_WAA"])["golden"]
    assert told == f"sent:{kept.name}"
    assert step.command.secrets == (), "a machine that has it needs no address"
    assert made().bundle.digest == made().bundle.digest
    other = (golden / "data.img").stat()
    (golden / "data.img").write_text("DATA.IMG")  # of the same size, and of the same time
    os.utime(golden / "data.img", ns=(other.st_atime_ns, other.st_mtime_ns + 1))
    (changed,) = [step.kept for step in made().bundle.steps if step.kept is not None]
    assert changed.name != kept.name
    (golden / "windows.rom").unlink()
    with pytest.raises(RequestError, match=r"storage has no windows\.rom; name the folder `storage`"):
        made()
    with pytest.raises(RequestError, match=r"nowhere has no windows\.boot"):
        load(checkout, waa=str(checkout), golden="here:nowhere")


def test_a_preset_says_what_goes_with_its_image() -> None:
    auto = WaaBenchmark(WaaSettings(preset="waa-auto", ram="16G"))
    told = json.loads(auto.bundle.steps[0].command.env["EVALFLEET_WAA"])
    assert (told["image"], told["version"], told["ram"], told["disk"]) == (
        "waa-auto:latest",
        "11e",
        "16G",
        "64G",
    )
    words = HostConfig({**told, "golden": "/g"}).run_words()
    assert words[-5:] == ["/entry.sh", "--prepare-image", "false", "--start-client", "false"]
    assert "--entrypoint" not in words
    own = WaaBenchmark(WaaSettings(image="mine/waa:7"))
    told = json.loads(own.bundle.steps[0].command.env["EVALFLEET_WAA"])
    words = HostConfig(told).run_words()
    at = words.index("mine/waa:7")
    assert words[at - 2 : at] == ["--entrypoint", "/bin/bash"]
    assert words[at + 1 :] == ["-c", "./entry.sh --prepare-image false --start-client false"]
