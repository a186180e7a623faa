"""Writes the heads of the notebooks: `python docs/generate_notebook_heads.py`.

A head is a link that opens the notebook in Colab, and a cell that installs kmp where it is missing.
Both need the repository's address: `Repository` under `[project.urls]` in pyproject.toml. Without
it, there is no link, and the cell says how to install kmp from a checkout.
"""

import re
import tomllib
from pathlib import Path

import nbformat

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CELL_ID = "install"
_GITHUB = "https://github.com/"  # Colab opens notebooks from nowhere else
_LINK = re.compile(r"\[Open in Colab\]\(.*\)\n\n")

_CELL = """\
# Colab: choose a GPU under Runtime, Change runtime type. Kaggle: under Settings, Accelerator.
# Where kmp is installed, this cell does nothing.
import importlib.util

if importlib.util.find_spec("kmp") is None:
{installation}"""
# Checked with the packages of Colab's images of May and August 2026.
_FROM_ADDRESS = """\
    # Kaggle: turn on the Internet under Settings. In both, Keras, TensorFlow and NumPy are recent
    # enough: pip keeps them, and the kernel need not be restarted.
    %pip install -q "kmp[demo] @ git+{address}\""""
_FROM_CHECKOUT = """\
    raise ModuleNotFoundError(
        'kmp is not installed. In a checkout of its repository, run: pip install ".[cpu,demo]"'
        ' (with an NVIDIA GPU: ".[cuda,demo]"; in Colab and Kaggle: ".[demo]").'
    )"""


def repository_address() -> str:
    """Returns the address in pyproject.toml; empty if there is none."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project.get("urls", {}).get("Repository", "")


def write_head(notebook: nbformat.NotebookNode, name: str, address: str) -> None:
    """Replaces the head of a notebook, or adds one.

    Args:
        notebook: The notebook, which begins with a heading.
        name: The name of its file.
        address: The address of the repository; empty if there is none.
    """
    address = address.removesuffix("/").removesuffix(".git")
    notebook.metadata["accelerator"] = "GPU"  # Colab then opens it with one
    title, _, text = notebook.cells[0].source.partition("\n\n")
    text = _LINK.sub("", text)
    if address.startswith(_GITHUB):
        text = f"[Open in Colab]({_colab_url(address, name)})\n\n{text}"
    notebook.cells[0].source = f"{title}\n\n{text}"
    if notebook.cells[1].id != CELL_ID:
        notebook.cells.insert(1, nbformat.v4.new_code_cell(id=CELL_ID))
    installation = _FROM_ADDRESS.format(address=address) if address else _FROM_CHECKOUT
    notebook.cells[1].source = _CELL.format(installation=installation)


def _colab_url(address: str, name: str) -> str:
    repository = address.removeprefix(_GITHUB)
    return f"https://colab.research.google.com/github/{repository}/blob/main/notebooks/{name}"


if __name__ == "__main__":
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, as_version=4)
        write_head(notebook, path.name, repository_address())
        nbformat.write(notebook, path)
