"""What README and docs show is run, and what they say about it is true."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import PAGES, ROOT, Code, File, Shell, matches, steps
from tests.waiting import PATIENCE_S

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
DOCUMENTS = (*PAGES, *sorted((ROOT / "designs").glob("*.md")))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_shows_runs(page: Path, folder: Path, environment: Mapping[str, str]) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for step in steps(page):
        match step:
            case File(name, content):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(content, encoding="utf-8")
            case Shell():
                run_command(step, folder, environment)
            case Code(source):
                run_code(source, page, names)


def run_command(step: Shell, folder: Path, environment: Mapping[str, str]) -> None:
    done = subprocess.run(
        ["bash", "-c", step.command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    said = f"$ {step.command}\n{done.stdout}"
    code = done.returncode if done.returncode >= 0 else 128 - done.returncode  # as a shell tells it
    assert code == step.exit_code, said
    if step.expected is not None:
        assert matches(step.expected, done.stdout), f"{said}\nThe page says:\n{step.expected}"


def run_code(source: str, page: Path, names: dict[str, Any]) -> None:
    """Blocks of one page share their names. `# prints: TEXT` is what the block should print."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(source, str(page), "exec"), names)
    expected = "\n".join(re.findall(r"# prints: (.*)$", source, re.MULTILINE))
    if expected:
        assert matches(expected, out.getvalue()), f"{source}\nprinted:\n{out.getvalue()}"


def test_the_example_is_the_one_in_the_readme() -> None:
    shown = {step.name: step.content for step in steps(ROOT / "README.md") if isinstance(step, File)}
    kept = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "examples/mybench").iterdir()}
    assert shown == kept


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(FENCED.sub("", page.read_text(encoding="utf-8"))):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name} links to {link}"
        assert target.is_relative_to(ROOT), f"{page.name} links to {link}, outside the repository"
        if anchor:
            assert anchor in anchors(target), f"{page.name} links to {link}, but there is no such heading"


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(text))
    return {heading.strip().replace(" ", "-") for heading in kept}


def test_every_page_is_linked_from_the_readme() -> None:
    linked = set(LINK.findall((ROOT / "README.md").read_text(encoding="utf-8")))
    assert {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")} <= linked


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("a\n...\nd\n", "a\nb\nc\nd\n", True),
        ("a\n...\nd\n", "a\nd\n", True),
        ("a\n...\nd\n", "a\nb\n", False),
        ("took 1.5s at 10:20:30\n", "took 0.1s at 23:59:59\n", True),
        ("took 1.5s\n", "took 2 days\n", False),
        ("x ... z\n", "x y z\n", True),
        ("x ... z\n", "x y\nz\n", False),
    ],
)
def test_the_comparison_itself(expected: str, printed: str, same: bool) -> None:
    assert matches(expected, printed) is same


INSTALLED_BY_NAME = re.compile(
    r"\b(?:pipx?|uv) (?:tool |pip )?(?:install|run|add) [^\n|;&`]*?"
    r"(?<![\w./@#-])evalfleet(?:\[[\w,]+\])?(?![\w./-]|\[|\s*@)"
)
"""The name in package indexes is not ours: a stranger could take it."""


def test_nothing_installs_evalfleet_by_its_name() -> None:
    for wrong in (
        "pip install evalfleet",
        "uv tool install evalfleet[ssh]",
        "pipx install -q evalfleet==1.0",
    ):
        assert INSTALLED_BY_NAME.search(wrong), wrong
    for right in (
        "pipx install .",
        "pip install './evalfleet[ssh]'",
        "pip install 'evalfleet @ git+https://x@abc'",
    ):
        assert not INSTALLED_BY_NAME.search(right), right
    sources = [
        path
        for kind in ("py", "md", "toml", "ipynb", "yml", "sh")
        for path in ROOT.glob(f"[!.]*/**/*.{kind}")
    ]
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in (ROOT / "README.md", *sources)
        if path != Path(__file__)
        for match in INSTALLED_BY_NAME.finditer(path.read_text(encoding="utf-8"))
    ]
    assert not found, found
