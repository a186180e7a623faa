import itertools
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


def kinds_of_outputs(notebook):
    """What each cell puts out, one after another; what is printed may come in several pieces, and counts as one."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    shown = [[output.output_type for output in cell.outputs if output.get("name") != "stderr"] for cell in cells]
    return [[kind for kind, _ in itertools.groupby(kinds)] for kinds in shown]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")  # of Jupyter's own packages
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_is_stored_with_its_outputs(path, monkeypatch):
    monkeypatch.delenv("MPLBACKEND", raising=False)  # pictures are shown in the notebook, as Jupyter does
    notebook = nbformat.read(path, as_version=4)
    stored = kinds_of_outputs(notebook)
    executed = NotebookClient(notebook, timeout=120, resources={"metadata": {"path": path.parent}}).execute()
    assert kinds_of_outputs(executed) == stored


def test_there_are_notebooks():
    assert NOTEBOOKS
