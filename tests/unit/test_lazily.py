"""Modules that tests import only when they use them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.lazily import lazily


def test_only_what_is_public_has_a_module_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "takes_long_to_import.py").write_text("value = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = lazily("takes_long_to_import")
    assert getattr(module, "_mock_name", None) is None  # pytest asks all that a file of tests holds
    assert "takes_long_to_import" not in sys.modules
    assert module.value == 3
    monkeypatch.delitem(sys.modules, "takes_long_to_import")
