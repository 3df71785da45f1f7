"""What a `.gitignore` ignores, compared with git itself."""

from __future__ import annotations

import subprocess
from pathlib import Path, PurePosixPath

import pytest

from evalfleet.benchmarks.files import IgnoreRules

PATHS = (
    *("a.txt", "a.log", "b/a.log", "b/c/a.log", "b/c/keep.log", "build/x", "src/build/y", "src/build.py"),
    *(
        "doc/a/b/c.md",
        "doc/c.md",
        "x/foo/bar",
        "foo/bar",
        "foo/baz/bar",
        "f[1].txt",
        "f1.txt",
        "#odd",
        "!odd",
    ),
    *("trail ", "trail", "deep/er/secret.key", "data/raw/1.csv", "data/1.csv", "tmp1/z", "tmpa/z", "a b.txt"),
)
PATTERNS = (
    "*.log",
    "*.log\n!keep.log",
    "/a.log",
    "build/",
    "build",
    "/build",
    "src/build",
    "doc/**/c.md",
    "**/bar",
    "foo/**",
    "foo/*",
    "/foo/bar",
    "f[1].txt",
    "f\\[1\\].txt",
    "tmp[0-9]",
    "tmp[!0-9]/",
    "\\#odd\n\\!odd",
    "# a comment\n\n   \n",
    "trail\\ ",
    "trail   ",
    "secret.?ey",
    "data/*\n!data/raw/",
    "*\n!*.txt\n!*/",
    "a b.txt",
    "b/**/a.log",
    "**",
)


def ignored_by_git(folder: Path) -> set[str]:
    argv = ["git", "-c", "core.excludesFile=/dev/null", "ls-files", "--others", "--ignored", "-z"]
    told = subprocess.run(
        [*argv, "--exclude-per-directory=.gitignore"], cwd=folder, capture_output=True, check=True
    )
    return {name for name in told.stdout.decode().split("\0") if name and not name.endswith(".gitignore")}


def ignored_by_us(folder: Path) -> set[str]:
    rules = IgnoreRules(folder)

    def is_ignored(path: PurePosixPath) -> bool:
        above = [parent for parent in reversed(path.parents) if parent.parts]
        return any(rules.ignores(parent, True) for parent in above) or rules.ignores(path, False)

    return {name for name in PATHS if is_ignored(PurePosixPath(name))}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    for name in PATHS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize("patterns", PATTERNS)
def test_the_same_is_ignored_as_by_git(repository: Path, patterns: str) -> None:
    (repository / ".gitignore").write_text(patterns)
    assert ignored_by_us(repository) == ignored_by_git(repository)


def test_inner_files_have_the_last_word(repository: Path) -> None:
    (repository / ".gitignore").write_text("*.log\n")
    (repository / "b" / ".gitignore").write_text("!a.log\n/c/\n")
    found = ignored_by_us(repository)
    assert found == ignored_by_git(repository)
    assert found == {"a.log", "b/c/a.log", "b/c/keep.log"}


def test_a_benchmark_in_a_repository_is_under_the_rules_above_it(repository: Path) -> None:
    (repository / ".gitignore").write_text("/b/c/\n")
    assert IgnoreRules(repository / "b").ignores(PurePosixPath("c"), True)
    assert not IgnoreRules(repository / "b").ignores(PurePosixPath("a.log"), False)
