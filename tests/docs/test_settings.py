"""Pages of places name every setting that there is, and none that there is not."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from evalfleet.benchmarks.waa.settings import WaaSettings
from evalfleet.planning.plugins import place_kind
from evalfleet.toml_tables import convert
from tests.docs.pages import ROOT

KINDS = {"azure-ml.md": "azure_ml", "azure-batch.md": "azure_batch"}
TOML = re.compile(r"^```toml\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(("page", "kind"), KINDS.items())
def test_the_table_of_settings_has_all_of_them(page: str, kind: str) -> None:
    text = (ROOT / "docs" / page).read_text("utf-8")
    table = text.partition("\n## Settings\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    fields = set(place_kind(kind).Settings.__struct_fields__)
    assert named == fields


def examples() -> list[tuple[str, str, dict[str, Any]]]:
    """Of all pages: tables of places that name their kind, and what is shown without a head on these two."""
    found: list[tuple[str, str, dict[str, Any]]] = []
    for page in sorted((ROOT / "docs").glob("*.md")):
        for block in TOML.findall(page.read_text("utf-8")):
            shown = tomllib.loads(block)
            places = [place for place in shown.get("places", {}).values() if "kind" in place]
            found += [
                (page.name, place["kind"], {k: v for k, v in place.items() if k != "kind"})
                for place in places
            ]
            is_benchmark = "tasks" in shown
            if (
                page.name in KINDS
                and not is_benchmark
                and not any(isinstance(v, dict) for v in shown.values())
            ):
                found.append((page.name, KINDS[page.name], shown))
    return found


@pytest.mark.parametrize(
    ("page", "kind", "shown"), examples(), ids=lambda each: each if isinstance(each, str) else ""
)
def test_what_a_page_shows_of_a_place_can_be_written_so(page: str, kind: str, shown: dict[str, Any]) -> None:
    assert convert(shown, place_kind(kind).Settings, page)


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_what_a_page_shows_of_windows_agent_arena_can_be_written_so(page: Path) -> None:
    for block in TOML.findall(page.read_text("utf-8")):
        settings = tomllib.loads(block).get("benchmarks", {}).get("waa")
        if settings is not None:
            assert convert(settings, WaaSettings, page.name)
