import itertools
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))

# Phrases with numbers that no cell computes, each with the reason.
KNOWN_FACTS = {
    "IEEE 754": "a standard",
    "Micikevicius et al. 2018": "the year of a paper",
    **dict.fromkeys(("section 3.1", "section 3.2", "section 3.3"), "of that paper"),
    "1,797 images": "scikit-learn's digits",
    **dict.fromkeys(("5 exponent bits", "11 significant bits", "all 11 bits"), "float16"),
    "2^{e-15}": "the exponent bias of float16",
    "$e = 31$": "all 5 exponent bits of float16 are set",
    "$2^{16}$, where Inf begins": "float16",
    "| 2^13 to 2^16 |": "float16's largest exponents",
    "| 2^16 and more |": "beyond float16",
    "has 22, and float32 has 24": "the significant bits of a product and of float32",
    "The default is every 2,000.": "`growth_interval`, asserted in notebook 3",
}

# Code, and the targets of links.
NOT_PROSE = re.compile(r"```.*?```|`[^`]*`|\]\([^)]*\)|https?://\S+")
# Comments, and the format specifications of f-strings.
NOT_VALUES = re.compile(r"#.*|:[^\s{}]+(?=})")
SEPARATORS = re.compile(r"(?<=\d)[,_](?=\d{3})|[{}]")  # 10,000 and 10_000; 2^{-24}
# Without its sign.
NUMBER = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?(?:e[+-]?\d+)?)(?:\^([+-]?\d+))?(\s?%)?")


def numbers(text):
    """Yields `(number, values)` for each number in a text.

    2^-24, $2^{-24}$ and 2.0**-24 have the same value.
    """
    for match in NUMBER.finditer(SEPARATORS.sub("", text.replace("**", "^"))):
        number, exponent, percent = match.groups()
        value = float(number) ** int(exponent or 1)
        yield match[0], [value, value / 100] if percent else [value]


def values_in_code_and_outputs(notebook):
    texts = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            texts.append(NOT_VALUES.sub("", cell.source))
            outputs = [
                output.get("text") or output.get("data", {}).get("text/plain", "")
                for output in cell.outputs
            ]
            texts += [output for output in outputs if "<Figure" not in output]
    return [value for text in texts for _, values in numbers(text) for value in values]


def occurs(number, values, known_values):
    """A number of three or more digits may be rounded; shorter numbers and powers are exact."""
    digits = re.sub(r"\D", "", number.split("e")[0]).lstrip("0")
    precision = 12 if len(digits) < 3 or "^" in number else len(digits)
    return bool(
        {f"{value:.{precision}g}" for value in values}
        & {f"{value:.{precision}g}" for value in known_values}
    )


def numbers_only_in_prose(notebook):
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    prose = NOT_PROSE.sub("", " ".join(" ".join(cells).split()))
    for fact in KNOWN_FACTS:
        prose = prose.replace(fact, "")
    known_values = values_in_code_and_outputs(notebook)
    return [number for number, values in numbers(prose) if not occurs(number, values, known_values)]


def test_numbers_in_the_text_occur_in_code_or_outputs():
    found = {
        path.stem: numbers_only_in_prose(nbformat.read(path, as_version=4)) for path in NOTEBOOKS
    }
    assert found
    assert not any(found.values()), found


@pytest.mark.parametrize(
    ("output", "prose", "missing"),
    [
        ("2^-24 1797 16.12 0.001", "$2^{-24}$ of 1,797: 16.1 and 0.1 %", []),
        ("scale 2^17, accuracy 0.938", "scale 2^16, accuracy 0.931", ["2^16", "0.931"]),
        ("1 of 417 steps (2%)", "3 of 4170 steps (4%) [here](7.html) `8`", ["3", "4170", "4%"]),
    ],
)
def test_number_that_is_in_no_output_is_found(output, prose, missing):
    cell = nbformat.v4.new_code_cell(outputs=[nbformat.v4.new_output("stream", text=output)])
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(prose), cell])
    assert numbers_only_in_prose(notebook) == missing


def output_types(notebook):
    """Returns the sequence of output types of each cell.

    Consecutive outputs of the same type are merged.
    """
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    types = [
        [output.output_type for output in cell.outputs if output.get("name") != "stderr"]
        for cell in cells
    ]
    return [
        [output_type for output_type, _ in itertools.groupby(cell_types)] for cell_types in types
    ]


@pytest.mark.slow
# From Jupyter's own packages.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_stored_outputs_have_the_same_types(path, monkeypatch):
    monkeypatch.delenv("MPLBACKEND", raising=False)  # Jupyter shows figures inline
    notebook = nbformat.read(path, as_version=4)
    stored = output_types(notebook)
    executed = NotebookClient(
        notebook, timeout=120, resources={"metadata": {"path": path.parent}}
    ).execute()
    assert output_types(executed) == stored
