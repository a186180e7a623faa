import importlib.util
import itertools
import re
import runpy
import shlex
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import keras
import nbformat
import numpy as np
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient
from packaging.requirements import Requirement

import kmp
from kmp.enabling import Gpu

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

# Phrases with numbers that no cell computes, each with the reason.
KNOWN_FACTS = {
    "IEEE 754": "a standard",
    "Micikevicius et al. 2018": "the year of a paper",
    **dict.fromkeys(("section 3.2", "section 3.3"), "of that paper"),
    "1,797 images": "scikit-learn's digits",
    **dict.fromkeys(("5 exponent bits", "11 significant bits", "all 11 bits"), "float16"),
    "2^{e-15}": "the exponent bias of float16",
    "$e$ from 1 to 30": "the exponents of float16's normal numbers",
    "$e = 31$": "all 5 exponent bits of float16 are set",
    "$2^{16}$, where Inf begins": "float16",
    "| below 2^-24 |": "beyond float16",
    "| 2^-24 to 2^-14 |": "float16's smallest exponents",
    "| 2^13 to 2^16 |": "float16's largest exponents",
    "| 2^16 and more |": "beyond float16",
    "Keras 3.15 alone": "the version that the table describes",
    "The default is every 2,000.": "`growth_interval`, asserted in notebook 6",
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


def words(notebook, cell_type):
    cells = [cell for cell in notebook.cells if cell.id != HEADS["CELL_ID"]]
    return sum(len(cell.source.split()) for cell in cells if cell.cell_type == cell_type)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_read_in_ten_minutes(path):
    notebook = nbformat.read(path, as_version=4)
    assert words(notebook, "markdown") / 200 + words(notebook, "code") / 120 <= 10


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


SCRIPT = ROOT / "docs" / "generate_notebook_heads.py"
HEADS = runpy.run_path(str(SCRIPT))
MADE_UP = "https://github.com/someone/something"
IN_COLAB = "https://colab.research.google.com/github/someone/something/blob/main/notebooks/"


def cell_of(notebook, cell_id):
    """The source of a cell."""
    return next(cell.source for cell in notebook.cells if cell.id == cell_id)


def with_head(path, address):
    notebook = nbformat.read(path, as_version=4)
    HEADS["write_head"](notebook, path.name, address)
    return notebook


def links_to_colab(notebook):
    return re.findall(r"\[Open in Colab\]\((.*?)\)", notebook.cells[0].source)


def run_head(notebook, spec):
    """Runs the first code cell where `find_spec` returns `spec`; returns what it gives to pip."""
    lines = []
    shell = SimpleNamespace(run_line_magic=lambda *line: lines.append(line))
    code = TransformerManager().transform_cell(cell_of(notebook, HEADS["CELL_ID"]))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(importlib.util, "find_spec", {"kmp": spec}.get)
        exec(code, {"get_ipython": lambda: shell})
    return lines


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_head_of_a_notebook_is_what_the_script_writes(path):
    written = with_head(path, HEADS["repository_address"]())
    assert written == nbformat.read(path, as_version=4), f"run: python docs/{SCRIPT.name}"
    assert [cell.cell_type for cell in written.cells[:2]] == ["markdown", "code"]
    assert written.cells[1].id == HEADS["CELL_ID"]


def test_address_in_pyproject_toml_and_the_script_give_all_notebooks_their_links(tmp_path):
    for folder in ("docs", "notebooks"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    script, project = str(tmp_path / "docs" / SCRIPT.name), tmp_path / "pyproject.toml"
    notebooks = [tmp_path / "notebooks" / path.name for path in NOTEBOOKS]

    project.write_text(f'[project]\n[project.urls]\nRepository = "{MADE_UP}"', encoding="utf-8")
    runpy.run_path(script, run_name="__main__")
    for path in notebooks:
        assert links_to_colab(nbformat.read(path, as_version=4)) == [IN_COLAB + path.name]

    shutil.copy(ROOT / "pyproject.toml", project)
    runpy.run_path(script, run_name="__main__")
    assert [path.read_bytes() for path in notebooks] == [path.read_bytes() for path in NOTEBOOKS]


@pytest.mark.parametrize("address", [MADE_UP, f"{MADE_UP}.git", f"{MADE_UP}/"])
def test_cell_with_an_address_installs_kmp_from_there_where_it_is_missing(address):
    notebook = with_head(NOTEBOOKS[0], address)
    assert links_to_colab(notebook) == [IN_COLAB + NOTEBOOKS[0].name]
    assert run_head(notebook, spec=True) == []
    [(magic, options)] = run_head(notebook, spec=None)
    requirement = Requirement(shlex.split(options)[-1])
    assert (magic, requirement.name, requirement.extras) == ("pip", "kmp", {"demo"})
    assert requirement.url == f"git+{MADE_UP}"


def test_cell_without_an_address_says_how_to_install_kmp_where_it_is_missing():
    notebook = with_head(NOTEBOOKS[0], "")
    assert links_to_colab(notebook) == []
    assert run_head(notebook, spec=True) == []
    with pytest.raises(ModuleNotFoundError, match=r'pip install "\.\[cpu,demo\]"'):
        run_head(notebook, spec=None)


def test_address_that_colab_cannot_open_is_no_link_but_kmp_is_installed_from_it():
    notebook = with_head(NOTEBOOKS[0], "https://git.example.org/someone/something")
    assert links_to_colab(notebook) == []
    [(_, options)] = run_head(notebook, spec=None)
    assert '"kmp[demo] @ git+https://git.example.org/someone/something"' in options


@pytest.mark.slow
def test_table_of_notebook_1_times_second_epochs_of_three_precisions_with_one_jit_compile(
    monkeypatch, capsys
):
    trained = []
    fit = keras.Model.fit

    def recording_fit(model, *args, **kwargs):
        if not model.jit_compile:  # XLA takes a minute on a CPU
            fit(model, *args, **kwargs)
        trained.append((model, model.train_function))

    monkeypatch.setattr(keras.Model, "fit", recording_fit)
    monkeypatch.setattr(kmp, "gpus", lambda: [Gpu("Tesla T4", (7, 5))])
    names = {"keras": keras, "kmp": kmp, "np": np}
    notebook = nbformat.read(NOTEBOOKS[0], as_version=4)
    exec(cell_of(notebook, "speed-functions"), names)
    random_images = names["random_images"]
    names["random_images"] = lambda count, batch: random_images(8, batch=4)
    names["compare"] = partial(names["compare"], width=8, blocks=1)
    exec(cell_of(notebook, "speed-table"), names)

    assert trained[0::2] == trained[1::2]  # the epoch that is timed traces nothing
    models = [model for model, _ in trained[0::2]]
    assert [type(model.optimizer) for model in models] == 2 * [
        keras.optimizers.Adam,
        keras.optimizers.LossScaleOptimizer,
        kmp.LossScaleOptimizer,
    ]
    assert [model.jit_compile for model in models] == 3 * [False] + 3 * [True]
    dtypes = [model.get_layer(index=2).compute_dtype for model in models]
    assert dtypes == 2 * ["float32", "float16", "float16"]
    assert {model.get_layer(index=-1).compute_dtype for model in models} == {"float32"}
    tables = capsys.readouterr().out
    assert tables.startswith("Tesla T4 (compute capability 7.5), without TF32\n")
    assert re.findall(r"(?m)^(\S.*?)  +\d+\.\d\d +[\d,]+ +\d+\.\d\d$", tables) == 2 * [
        "float32",
        "mixed_float16, Keras",
        "mixed_float16, kmp",
    ]
    assert keras.config.dtype_policy().name == "float32"
