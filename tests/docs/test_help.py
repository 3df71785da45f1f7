"""Every command is documented, and the help in the docs is the help that is printed."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys

import pytest

from evalfleet.cli import DEVELOPER_VERBS, VERBS, parser_of
from evalfleet.cli.pool import VERBS as POOL_VERBS
from evalfleet.cli.pool import add_verb_arguments
from tests.docs.pages import ROOT
from tests.waiting import PATIENCE_S

SHELL = re.compile(r"^```(?:sh|text)\n(.*?)^```", re.DOTALL | re.MULTILINE)
CLI = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("verb", [*VERBS, *DEVELOPER_VERBS])
def test_every_verb_is_documented(verb: str) -> None:
    level = "##" if verb in VERBS else "###"
    assert f"\n{level} {verb}\n" in CLI
    assert f"<!-- generated: evalfleet {verb} --help -->" in CLI


@pytest.mark.parametrize("verb", [*VERBS, *DEVELOPER_VERBS])
def test_every_argument_says_what_it_is(verb: str) -> None:
    assert not [action.dest for action in parser_of(verb)._actions if not action.help]


@pytest.mark.parametrize("verb", POOL_VERBS)
def test_every_verb_of_pools_is_documented(verb: str) -> None:
    assert f"\n### pool {verb}\n" in CLI
    assert f"<!-- generated: evalfleet pool {verb} --help -->" in CLI
    parser = argparse.ArgumentParser()
    add_verb_arguments(parser, verb)
    assert not [action.dest for action in parser._actions if not action.help]


def test_generated_help_is_current() -> None:
    script = ROOT / "tools" / "update-docs"
    done = subprocess.run(
        [sys.executable, str(script), "--check"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def shown() -> list[str]:
    """Commands in blocks that no test runs, since they need a subscription or Windows."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    blocks = [block for page in pages for block in SHELL.findall(page.read_text())]
    lines = [line for block in blocks for line in block.splitlines()]
    return sorted({line.removeprefix("evalfleet ") for line in lines if line.startswith("evalfleet ")})


@pytest.mark.parametrize("command", shown())
def test_a_command_that_no_test_runs_is_one_at_least(command: str) -> None:
    verb, *words = shlex.split(command, comments=True)
    assert parser_of(verb).parse_args(words)
