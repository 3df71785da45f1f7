"""The notebook runs from top to bottom, and is kept without outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.docs.pages import ROOT
from tests.waiting import PATIENCE_S

NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"


def cells() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return found


def test_the_notebook_is_kept_without_outputs() -> None:
    for cell in cells():
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None


@pytest.mark.slow  # a kernel takes seconds to start
def test_the_notebook_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("TMPDIR", str(folder))
    notebook = nbformat.read(NOTEBOOK, as_version=4)

    class Client(nbclient.NotebookClient):  # type: ignore[misc, name-defined]
        """Keeps every picture that the kernel sent."""

        updates: ClassVar[list[str]] = []

        def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
            if "display_data" in msg["msg_type"]:
                self.updates.append(msg["content"]["data"].get("text/html", ""))
            return super().process_message(msg, cell, cell_index)

    client = Client(
        notebook,
        timeout=PATIENCE_S,
        startup_timeout=PATIENCE_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert [output["text"] for output in outputs if "text" in output] == [
        "2 of 6 solved, 95% interval [0.096771, 0.700007]\n"
    ]
    # the bar was drawn once, and its last picture is that of the end; a run shows itself in the same way
    pictures = [output["data"] for output in outputs if "text/html" in output.get("data", {})]
    assert [output["output_type"] for output in outputs if "text/html" in output.get("data", {})] == [
        "display_data",
        "execute_result",
    ]
    for picture in pictures:
        html = "".join(picture["text/html"])
        assert "6/6 100%" in html
        assert "done" in html
    assert "6/6 100%" in "".join(pictures[0]["text/plain"])
    assert [update for update in client.updates if "6/6" not in update], "it was not drawn while it ran"
