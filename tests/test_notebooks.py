import itertools
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


def output_types(notebook):
    """Returns the sequence of output types of each cell; consecutive outputs of the same type are merged."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    types = [[output.output_type for output in cell.outputs if output.get("name") != "stderr"] for cell in cells]
    return [[output_type for output_type, _ in itertools.groupby(cell_types)] for cell_types in types]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")  # from Jupyter's own packages
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_stored_outputs_have_the_same_types(path, monkeypatch):
    monkeypatch.delenv("MPLBACKEND", raising=False)  # Jupyter shows figures inline
    notebook = nbformat.read(path, as_version=4)
    stored = output_types(notebook)
    executed = NotebookClient(notebook, timeout=120, resources={"metadata": {"path": path.parent}}).execute()
    assert output_types(executed) == stored


def test_notebooks_exist():
    assert NOTEBOOKS
