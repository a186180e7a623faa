import io

import keras
from rich.console import Console

from kmp.bench import results
from kmp.bench.measurement import Measurement
from kmp.bench.precision import VARIANTS

TIMES = "\N{MULTIPLICATION SIGN}"
RESULTS = [
    Measurement("optimizer step", "Adam, 8 large", "graph", "bare", 0.0125, "s", None),
    Measurement("optimizer step", "Adam, 8 large", "graph", "kmp", 0.02, "s", 1.6, (0.019, 0.024), (1.55, 1.9)),
    Measurement("optimizer step", "Adam, 8 large", "graph", "kmp, jit_compile", 0.005, "s", 0.4),
    Measurement("optimizer step", "Adam, 8 large", "XLA", "bare", 0.01, "s", None),
    Measurement("optimizer step", "Adam, 8 large", "XLA", "kmp", 0.011, "s", 1.1),
    Measurement("peak memory", "Adam, 8 large", "", "bare", 100 * 2**20, "B", None),
    Measurement("peak memory", "Adam, 8 large", "", "kmp", 105 * 2**20, "B", 1.05),
    Measurement("throughput", "MLP", "XLA", "float32", 12345.6, "images/s", None),
]


def shown(measured, width=160):
    text = io.StringIO()
    results.run(Console(file=text, width=width), [measured])
    return text.getvalue()


def rows_of(text):
    lines = [line for line in text.splitlines() if line.startswith("\u2502")]
    return [[cell.strip() for cell in line.split("\u2502")[1:-1]] for line in lines]


def test_tables_have_a_row_for_each_variant_and_a_column_for_each_mode():
    text = shown(RESULTS)
    assert rows_of(text) == [
        ["bare", "12.50 ms", "10.00 ms"],
        ["kmp", f"20.00 ms {TIMES}1.60 (1.55-1.90)", f"11.00 ms {TIMES}1.10"],
        ["kmp, jit_compile", f"5.00 ms {TIMES}0.40", ""],
        ["bare", "100 MiB"],
        ["kmp", f"105 MiB {TIMES}1.05"],
        ["float32", "12,346 images/s"],
    ]
    titles = ("optimizer step: Adam, 8 large", "peak memory: Adam, 8 large", "throughput: MLP")
    assert [title for title in titles if title not in " ".join(text.split())] == []


def test_names_of_variants_are_not_cut_on_a_narrow_terminal():
    measured = [
        Measurement("network throughput", "BERT-base, 32 of 128", mode, variant, 1e5, "tokens/s", 1.0, (1, 1), (1, 1))
        for mode in ("graph", "XLA")
        for variant in VARIANTS
    ]
    names = [row[0] for row in rows_of(shown(measured, width=80))]
    assert " ".join(names).split() == " ".join(VARIANTS).split()


def test_comparison_is_one_line_of_text_when_it_is_done_after_the_versions():
    lines = shown(RESULTS[5:7], width=20).splitlines()
    assert f"peak memory, Adam, 8 large: bare 100 MiB; kmp 105 MiB {TIMES}1.05" in lines
    assert f"keras: {keras.__version__}" in lines
    assert "1.5 KiB" in shown([Measurement("log", "a sample", "", "50 variables", 1536.0, "B", None)])
