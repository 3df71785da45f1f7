"""A benchmark as a file: what it gives, and every mistake told with its place and its fix."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from evalfleet.benchmarks.benchmark_file import load_benchmark
from evalfleet.benchmarks.command import CommandBenchmark
from evalfleet.benchmarks.loaded import Loaded
from evalfleet.benchmarks.tasks import default_domain
from evalfleet.errors import RequestError
from evalfleet.model import Needs, Task, TaskId

FULL = """
name = "mybench"
tasks = "tasks.jsonl"
command = ["bash", "run.sh", "{task_id}", "{params.n}"]
files = ["run.sh", "data/"]
setup = [["bash", "setup.sh"]]
probe = ["test", "-e", "/dev/kvm"]
timeout_s = 600
stall_s = 120
on_timeout = "zero"
secrets = ["OPENAI_API_KEY"]
needs = {cpus = 2, memory_gb = 4, disk_gb = 30, nested_virtualization = false}
slots = 2
usual_s = 30
"""
TASKS = """{"id": "a_1", "domain": "x", "params": {"n": 3}, "timeout_s": 60, "stall_s": 0}

{"id": "b_b_2", "params": {"n": "k"}}
"""
MINIMAL = 'name = "b"\ncommand = ["true"]\n'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "run.sh").write_text("echo")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x.txt").write_text("x")
    (tmp_path / "tasks.jsonl").write_text(TASKS)
    return tmp_path


def load(root: Path, text: str) -> Loaded:
    path = root / "b.toml"
    path.write_text(text)
    return load_benchmark(path)


def fails(root: Path, text: str, message: str) -> None:
    """The whole message, with `@` for the benchmark's folder."""
    with pytest.raises(RequestError) as caught:
        load(root, text)
    told = str(caught.value).replace(str(root), "@")
    assert told == message
    assert "\n" not in told


def changed(key: str, value: str) -> str:
    """FULL with one key's value replaced."""
    return re.sub(rf"(?m)^{key} = .*$", lambda _: f"{key} = {value}", FULL)


def test_a_whole_file(root: Path) -> None:
    loaded = load(root, FULL)
    assert loaded.name == "mybench"
    assert loaded.tasks == (
        Task(TaskId("a_1"), "x", {"n": 3}, 60.0),
        Task(TaskId("b_b_2"), "b_b", {"n": "k"}, 600.0, stall_s=120.0),
    )
    assert (loaded.secrets, loaded.slots) == (("OPENAI_API_KEY",), 2)
    assert loaded.usual_s == {"": 30.0}
    assert loaded.files == (root / "data", root / "run.sh")
    bench = CommandBenchmark.from_spec(loaded.spec)
    assert bench.needs == Needs(cpus=2, memory_gb=4, disk_gb=30)
    assert sorted(bench.bundle.files) == ["data", "run.sh"]


def test_the_smallest_file_has_its_tasks_inline(root: Path) -> None:
    loaded = load(
        root, MINIMAL + '[[tasks]]\nid = "a_1"\n[[tasks]]\nid = "b"\nparams = {d = [1, {e = "f"}]}\n'
    )
    assert [(task.id, task.domain, task.timeout_s) for task in loaded.tasks] == [
        ("a_1", "a", 3600.0),
        ("b", "b", 3600.0),
    ]
    assert loaded.tasks[1].params == {"d": [1, {"e": "f"}]}
    assert loaded.warnings == ()


def test_line_ends_and_marks_of_other_systems_are_read(root: Path) -> None:
    # A line separator inside a string is no end of a line of the file.
    (root / "t.jsonl").write_bytes(
        '\ufeff{"id": "a", "params": {"t": "x\u2028y"}}\r\n{"id": "b"}\r\n'.encode()
    )
    assert [task.id for task in load(root, MINIMAL + 'tasks = "t.jsonl"').tasks] == ["a", "b"]


@pytest.mark.parametrize(("id", "domain"), [("a_1", "a"), ("a_b_1", "a_b"), ("solo", "solo"), ("_1", "_1")])
def test_the_default_domain(id: str, domain: str) -> None:
    assert default_domain(id) == domain


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (FULL.replace("command =", "comand ="), "@/b.toml: key 'comand' is unknown; did you mean 'command'?"),
        (
            FULL + "zzz = 1",
            "@/b.toml: key 'zzz' is unknown; there are command, container, env, files, image, isolation, "
            "model_key, name, needs, on_timeout, probe, score and 16 more",
        ),
        (FULL.replace('name = "mybench"', ""), "@/b.toml: key 'name' is missing; add it"),
        (MINIMAL, "@/b.toml: key 'tasks' is missing; add it"),
        ('name = "b"\ntasks = "tasks.jsonl"', "@/b.toml: key 'command' is missing; add it"),
        ('name = "b"\ncommand = [\n"a"\n"b"]', "@/b.toml:4: not valid TOML: unclosed array"),
        ("name = ", "@/b.toml: at its end: not valid TOML: invalid value"),
        (changed("command", '"bash run.sh"'), "@/b.toml: key 'command' must be a list, not a string"),
        (
            changed("command", '["bash", 3]'),
            "@/b.toml: entry 2 of key 'command' must be a string, not a whole number",
        ),
        (
            changed("command", "[]"),
            "@/b.toml: key 'command' is empty; write a program and its arguments, "
            'such as ["bash", "run.sh"]',
        ),
        (
            changed("command", '[" ", "x"]'),
            "@/b.toml: key 'command' is empty; write a program and its arguments, "
            'such as ["bash", "run.sh"]',
        ),
        (
            changed("command", '["a", "\\u0000"]'),
            "@/b.toml: key 'command' has a NUL character, which no argument may; take it out",
        ),
        (
            changed("setup", "[[]]"),
            "@/b.toml: key 'setup (step 1)' is empty; write a program and its arguments, "
            'such as ["bash", "run.sh"]',
        ),
        (changed("setup", '["bash", "x"]'), "@/b.toml: entry 1 of key 'setup' must be a list, not a string"),
        (
            changed("probe", "[]"),
            '@/b.toml: key \'probe\' is empty; write a program and its arguments, such as ["bash", "run.sh"]',
        ),
        (
            changed("timeout_s", "0"),
            "@/b.toml: key 'timeout_s' is 0; write seconds above 0, at most 2592000 (30 days)",
        ),
        (
            changed("timeout_s", "-1"),
            "@/b.toml: key 'timeout_s' is -1; write seconds above 0, at most 2592000 (30 days)",
        ),
        (
            changed("usual_s", "0"),
            "@/b.toml: key 'usual_s' is 0; write seconds above 0, at most 2592000 (30 days)",
        ),
        (
            changed("timeout_s", "nan"),
            "@/b.toml: key 'timeout_s' is nan; write seconds above 0, at most 2592000 (30 days)",
        ),
        (
            changed("timeout_s", "inf"),
            "@/b.toml: key 'timeout_s' is inf; write seconds above 0, at most 2592000 (30 days)",
        ),
        (
            changed("stall_s", "-1"),
            "@/b.toml: key 'stall_s' is -1; write seconds, at most 2592000 (30 days), or 0 for never",
        ),
        (changed("timeout_s", '"10m"'), "@/b.toml: key 'timeout_s' must be a number, not a string"),
        (
            changed("on_timeout", '"Zero"'),
            "@/b.toml: key 'on_timeout' is 'Zero'; write \"zero\" or \"broken\"",
        ),
        (changed("slots", "0"), "@/b.toml: key 'slots' is 0; write a whole number from 1 to 1000"),
        (changed("slots", "true"), "@/b.toml: key 'slots' must be a whole number, not true or false"),
        (
            changed("name", '"my bench"'),
            "@/b.toml: key 'name' is 'my bench'; write 1 to 60 letters, digits, "
            "'.', '_' or '-', the first a letter or digit",
        ),
        (
            changed("secrets", '["sk-123=abc"]'),
            "@/b.toml: key 'secrets' has an entry that is no variable name; "
            'write names such as "OPENAI_API_KEY", never values',
        ),
        (changed("needs", "{cpu = 2}"), "@/b.toml: key 'needs.cpu' is unknown; did you mean 'cpus'?"),
        (changed("needs", '{cpus = "2"}'), "@/b.toml: key 'needs.cpus' must be a whole number, not a string"),
        (changed("needs", "{cpus = 0}"), "@/b.toml: key 'needs.cpus' is 0; write a number from 1 to 1000000"),
        (
            changed("needs", "{disk_gb = nan}"),
            "@/b.toml: key 'needs.disk_gb' is nan; write a number from 0 to 1000000",
        ),
        (
            changed("tasks", '"none.jsonl"'),
            "@/b.toml: key 'tasks': @/none.jsonl does not exist; create it or correct the key",
        ),
        (changed("tasks", '"data"'), "@/b.toml: key 'tasks': @/data cannot be read (is a directory)"),
        (
            changed("tasks", "3"),
            "@/b.toml: key 'tasks' must be a string or a table or a list, not a whole number",
        ),
        (changed("tasks", "[]"), "@/b.toml: key 'tasks' has no tasks; write at least one"),
        (changed("tasks", '["a"]'), '@/b.toml: [[tasks]] number 1: must be a table such as {id = "a_1"}'),
        (changed("tasks", "[{}]"), "@/b.toml: [[tasks]] number 1: key 'id' is missing; add it"),
        (
            changed("tasks", '[{id = "a", params = {n = 1}}, {id = "a", params = {n = 1}}]'),
            "@/b.toml: [[tasks]] number 2: id 'a' is already used by "
            "@/b.toml: [[tasks]] number 1; rename one",
        ),
        (
            changed("tasks", '[{id = "a", params = {n = 2026-01-01}}]'),
            "@/b.toml: [[tasks]] number 1: key 'params.n' is not JSON (a date, nan or inf); write a string",
        ),
        (
            changed("tasks", '[{id = "a", params = {n = [inf]}}]'),
            "@/b.toml: [[tasks]] number 1: key 'params.n' is not JSON (a date, nan or inf); write a string",
        ),
        (
            changed("files", '["run.sh", "none.sh"]'),
            "@/b.toml: 'files' has 'none.sh', which does not exist; create @/none.sh or take it out",
        ),
        (
            changed("files", '["run.sh/x"]'),
            "@/b.toml: 'files' has 'run.sh/x', which cannot be read (not a directory)",
        ),
        (
            changed("files", '["../x"]'),
            "@/b.toml: 'files' has '../x', outside the benchmark's folder; copy it into @",
        ),
        (
            changed("files", '["data/../../x"]'),
            "@/b.toml: 'files' has 'data/../../x', outside the benchmark's folder; copy it into @",
        ),
        (
            changed("files", '["/etc/passwd"]'),
            "@/b.toml: 'files' has '/etc/passwd', outside the benchmark's folder; copy it into @",
        ),
        (changed("files", '["."]'), "@/b.toml: 'files' has '.', the folder itself; list what is in it"),
        (changed("files", '[""]'), "@/b.toml: 'files' has '', the folder itself; list what is in it"),
    ],
)
def test_a_wrong_file_is_refused_with_its_place_and_the_fix(root: Path, text: str, message: str) -> None:
    fails(root, text, message)


LINE = '{"id": "a_1", "params": {"n": 1}}\n'


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            LINE + "\n{oops}\n",
            "@/tasks.jsonl:3: not JSON (object keys must be strings (byte 1)); write one task a line, "
            "such as "
            '{"id": "a_1"}',
        ),
        (
            LINE + '{"id": "b"',
            "@/tasks.jsonl:2: not JSON (Input data was truncated); write one task a line, such as "
            '{"id": "a_1"}',
        ),
        (
            "[\n",
            "@/tasks.jsonl:1: not JSON (Input data was truncated); write one task a line, "
            'such as {"id": "a_1"}',
        ),
        ('["a"]', '@/tasks.jsonl:1: must be a JSON object, one a line, such as {"id": "a_1"}'),
        (LINE + "\n" + LINE, "@/tasks.jsonl:3: id 'a_1' is already used by @/tasks.jsonl:1; rename one"),
        ('{"params": {}}', "@/tasks.jsonl:1: key 'id' is missing; add it"),
        ('{"id": 3}', "@/tasks.jsonl:1: key 'id' must be a string, not a whole number"),
        ('{"id": "a", "timeout": 3}', "@/tasks.jsonl:1: key 'timeout' is unknown; did you mean 'timeout_s'?"),
        ('{"id": "a", "params": [1]}', "@/tasks.jsonl:1: key 'params' must be a table, not a list"),
        (LINE + '{"id": ""}', "@/tasks.jsonl:2: key 'id' is empty; give every task a name of its own"),
        ('{"id": "' + "x" * 201 + '"}', "@/tasks.jsonl:1: key 'id' is 201 bytes long; shorten it to 200"),
        (
            '{"id": "a\\u0000"}',
            "@/tasks.jsonl:1: key 'id' has a control or other unprintable character; take it out",
        ),
        (
            '{"id": "a\\nb"}',
            "@/tasks.jsonl:1: key 'id' has a control or other unprintable character; take it out",
        ),
        (
            '{"id": "a", "domain": "d\\n"}',
            "@/tasks.jsonl:1: key 'domain' has a control or other unprintable character; take it out",
        ),
        ('{"id": " a"}', "@/tasks.jsonl:1: key 'id' starts or ends with a space; take it out"),
        (
            '{"id": "a", "timeout_s": 0}',
            "@/tasks.jsonl:1: key 'timeout_s' is 0; write seconds above 0, at most 2592000 (30 days)",
        ),
        (
            '{"id": "a", "stall_s": -5}',
            "@/tasks.jsonl:1: key 'stall_s' is -5; write seconds, at most 2592000 (30 days), or 0 for never",
        ),
        ('{"id": "a", "timeout_s": "5"}', "@/tasks.jsonl:1: key 'timeout_s' must be a number, not a string"),
        (
            LINE + '{"id": "b", "params": {"m": 1}}',
            "@/tasks.jsonl:2: task 'b' has no param 'n', but the command has {params.n}; add it",
        ),
        (
            '{"id": "b", "params": {"n": "\\u0000"}}',
            "@/tasks.jsonl:1: key 'params.n' has a NUL character, which no argument may; take it out",
        ),
        (
            '{"id": "b", "params": {"n": "' + "x" * 100_000 + '"}}',
            "@/tasks.jsonl:1: key 'params' is 100008 bytes, more than 100000; put big data into 'files'",
        ),
        ("\n\n", "@/b.toml: key 'tasks' has no tasks; write at least one"),
    ],
)
def test_a_wrong_task_is_refused_with_its_line_and_the_fix(root: Path, lines: str, message: str) -> None:
    (root / "tasks.jsonl").write_text(lines)
    fails(root, FULL, message)


def test_a_task_line_that_is_not_utf8_is_refused_with_its_line(root: Path) -> None:
    (root / "tasks.jsonl").write_bytes(LINE.encode() + b'{"id": "\xff"}\n')
    with pytest.raises(RequestError, match=r"tasks\.jsonl:2: not JSON \('utf-8' codec can't decode"):
        load(root, FULL)


def test_a_task_line_nested_without_end_is_refused_with_its_line(root: Path) -> None:
    (root / "tasks.jsonl").write_text('{"id": "a", "params": {"n": ' + "[" * 100_000)
    with pytest.raises(RequestError, match=r"tasks\.jsonl:1: not JSON \(maximum recursion"):
        load(root, FULL)


def test_a_benchmark_file_that_is_not_there_or_not_text(root: Path) -> None:
    with pytest.raises(RequestError, match=r"none\.toml: no such file; check the path"):
        load_benchmark(root / "none.toml")
    with pytest.raises(RequestError, match=r"data: is a folder; name a file in it"):
        load_benchmark(root / "data")
    (root / "bin.toml").write_bytes(b"name = \xff")
    with pytest.raises(RequestError, match=r"bin\.toml: byte 7 is not UTF-8; save the file as UTF-8"):
        load_benchmark(root / "bin.toml")


def test_a_link_to_a_file_in_the_folder_is_sent_as_that_file(root: Path) -> None:
    (root / "data" / "link.sh").symlink_to("../run.sh")
    bundle = CommandBenchmark.from_spec(load(root, FULL).spec).bundle
    assert bundle.files == {
        "run.sh": str(root / "run.sh"),
        "data/link.sh": str((root / "run.sh").resolve()),
        "data/x.txt": str((root / "data" / "x.txt").resolve()),
    }


def test_other_links_are_refused_wherever_they_are(root: Path) -> None:
    (root / "link.sh").symlink_to("/etc/passwd")
    (root / ".env").write_text("KEY=secret")
    (root / "hidden").symlink_to(".env")
    (root / "folder").symlink_to(root / "data")
    (root / "loop").symlink_to("loop")
    told = "is a symbolic link to no file in the benchmark's folder; put a copy of its target there"
    fails(root, changed("files", '["hidden"]'), f"@/b.toml: 'files' has 'hidden', but hidden {told}")
    fails(root, changed("files", '["link.sh"]'), f"@/b.toml: 'files' has 'link.sh', but link.sh {told}")
    fails(
        root, changed("files", '["folder/x.txt"]'), f"@/b.toml: 'files' has 'folder/x.txt', but folder {told}"
    )
    (root / "data" / "out").symlink_to("/etc")
    fails(root, changed("files", '["data"]'), f"@/b.toml: 'files' has 'data', but data/out {told}")


def test_what_is_neither_file_nor_folder_is_refused(root: Path) -> None:
    os.mkfifo(root / "data" / "pipe")
    fails(
        root, FULL, "@/b.toml: 'files' has 'data/', but data/pipe is neither a file nor a folder; take it out"
    )


def test_dotenv_is_never_uploaded(root: Path) -> None:
    (root / "data" / ".env").write_text("KEY=1")
    fails(
        root,
        FULL,
        "@/b.toml: 'files' has 'data/', but data/.env holds secrets and is never uploaded; "
        "name them in 'secrets'",
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_refused(root: Path) -> None:
    (root / "run.sh").chmod(0)
    fails(root, FULL, "@/b.toml: 'files' has 'run.sh', but run.sh cannot be read; check its permissions")


@pytest.mark.parametrize(
    ("command", "files", "warning"),
    [
        (
            '["bash", "run.sh"]',
            "[]",
            "key 'command' names 'run.sh', which is not in 'files'; add 'run.sh' to it",
        ),
        (
            '["python", "gone.py"]',
            "[]",
            "key 'command' names 'gone.py', which is not in 'files'; no machine has it unless setup makes it",
        ),
        (
            '["./run.sh"]',
            '["run.sh"]',
            "key 'command' starts with './run.sh', not executable; chmod +x it or name its interpreter",
        ),
        (
            '["run.sh"]',
            '["run.sh"]',
            "key 'command' starts with the file 'run.sh'; write './run.sh' to run it",
        ),
        (
            '["echo", "{parms.n}"]',
            "[]",
            "key 'command' has '{parms.n}', which stays as it is; did you mean '{params.n}'?",
        ),
        (
            '["echo", "{params}"]',
            "[]",
            "key 'command' has '{params}', which stays as it is; did you mean '{params.NAME}'?",
        ),
        (
            '["echo", "{taskid}"]',
            "[]",
            "key 'command' has '{taskid}', which stays as it is; did you mean '{task_id}'?",
        ),
        (
            '["sh", "-c", "echo ${domain}"]',
            "[]",
            "key 'command' has '${domain}': the value is put after the '$'; "
            "write '{domain}', or a variable such as $EVALFLEET_TASK_ID",
        ),
    ],
)
def test_what_looks_wrong_but_may_be_meant_is_a_warning(
    root: Path, command: str, files: str, warning: str
) -> None:
    loaded = load(root, f'name = "b"\ncommand = {command}\nfiles = {files}\n[[tasks]]\nid = "a"\n')
    assert loaded.warnings == (f"{root}/b.toml: {warning}",)


def test_set_up_and_probe_are_looked_at_too(root: Path) -> None:
    loaded = load(root, MINIMAL + 'setup = [["bash", "setup.sh", "{task_id}"]]\n[[tasks]]\nid = "a"\n')
    assert loaded.warnings == (
        f"{root}/b.toml: key 'setup (step 1)' has '{{task_id}}', which is replaced in the command alone; "
        "it stays as it is",
        f"{root}/b.toml: key 'setup (step 1)' names 'setup.sh', which is not in 'files'; "
        "no machine has it unless setup makes it",
    )


@pytest.mark.parametrize(
    "command",
    [
        '["bash", "data/x.txt", "./run.sh", "/opt/x.sh", "--x=run.sh", "${HOME}/a.sh", "a b.sh"]',
        '["awk", "{print $1}", "{x}", "{}", "${task}"]',
    ],
)
def test_what_is_fine_gives_no_warning(root: Path, command: str) -> None:
    text = f'name = "b"\ncommand = {command}\nfiles = ["run.sh", "data/"]\n[[tasks]]\nid = "a"\n'
    assert load(root, text).warnings == ()


def test_many_tasks_are_read_fast(root: Path) -> None:
    lines = "".join(f'{{"id": "a_{n}", "params": {{"n": {n}}}}}\n' for n in range(100_000))
    (root / "tasks.jsonl").write_text(lines)
    assert len(load(root, FULL).tasks) == 100_000
