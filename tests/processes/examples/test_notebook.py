"""The notebook of examples/, executed in a kernel as Jupyter does."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[3] / "examples" / "notebook.ipynb"


def _outputs(notebook):
    """Return the text that each cell of code shows."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [[out.get("text") or out.get("data", {}).get("text/plain") for out in cell.outputs] for cell in cells]


@pytest.mark.trial
def test_notebook_example_shows_its_stored_outputs():
    stored = nbformat.read(NOTEBOOK, as_version=4)
    fresh = nbformat.read(NOTEBOOK, as_version=4)
    for cell in fresh.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    NotebookClient(fresh, timeout=240, kernel_name="python3", record_timing=False).execute()
    assert _outputs(fresh) == _outputs(stored)
    assert ["(8, 2)"] in _outputs(stored), "the stored notebook was executed"
