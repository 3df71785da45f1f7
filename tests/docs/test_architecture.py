"""docs/architecture.md is true: every top-level name and every word of the code is on it."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "src" / "evalfleet"
TOP_LEVEL = sorted(
    f"{path.name}/" if path.is_dir() else path.name
    for path in PACKAGE.iterdir()
    if (path.suffix == ".py" and not path.name.startswith("__")) or (path / "__init__.py").exists()
)
WORDS = (
    *(
        "benchmark",
        "task",
        "attempt",
        "outcome",
        "place",
        "machine",
        "lane",
        "channel",
        "supervisor",
        "pilot",
    ),
    *("bundle", "offer", "mend", "pool", "hold", "run", "journal", "controller", "epoch", "home"),
    *("grader", "mailbox", "meter", "allowance", "tier", "circuit", "appliance", "store", "guest", "estate"),
    *("canary", "step", "parcel", "lease", "expiry", "fence"),
)


@pytest.mark.parametrize("name", TOP_LEVEL)
def test_every_top_level_name_is_on_the_page(name: str) -> None:
    assert f"`{name}`" in PAGE


def test_the_page_names_nothing_that_is_gone() -> None:
    table = PAGE[PAGE.index("| layer, highest first |") : PAGE.index("Imports go down only")]
    named = set(re.findall(r"`(\w+(?:/|\.py))`", table))
    assert named == set(TOP_LEVEL)


@pytest.mark.parametrize("word", WORDS)
def test_every_word_has_a_meaning(word: str) -> None:
    assert f"\n| {word} | " in PAGE
