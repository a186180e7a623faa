import io

import keras
from rich.console import Console

from kmp_bench import results
from kmp_bench.measurement import Measurement
from kmp_bench.precision import VARIANTS

STEPS = [
    Measurement("optimizer step", "Adam, 8 large", "graph", "bare", 0.0125, "s", None),
    Measurement(
        "optimizer step",
        "Adam, 8 large",
        "graph",
        "kmp",
        1.02,
        "s",
        81.6,
        (0.9, 1.1),
        (81.55, 81.9),
    ),
    Measurement("optimizer step", "Adam, 8 large", "graph", "kmp, jit_compile", 0.005, "s", 0.4),
]
MEMORY = [
    Measurement("peak memory", "Adam, 8 large", "", "bare", 100 * 2**20, "B", None),
    Measurement("peak memory", "Adam, 8 large", "", "kmp", 1536.0, "B", 0.05),
]


def shown(*comparisons, width=160):
    text = io.StringIO()
    results.run(Console(file=text, width=width), comparisons)
    return text.getvalue()


def rows_of(text):
    lines = [line for line in text.splitlines() if line.startswith("\u2502")]
    return [[cell.strip() for cell in line.split("\u2502")[1:-1]] for line in lines]


def test_each_comparison_is_a_table_with_a_row_for_each_variant():
    text = shown(
        STEPS,
        MEMORY,
        [Measurement("throughput", "MLP", "XLA", "float32", 12345.6, "images/s", None)],
    )
    assert rows_of(text) == [
        ["bare", "12.50 ms", ""],
        ["kmp", "1.02 s", "81.60 (81.55-81.90)"],
        ["kmp, jit_compile", "5.00 ms", "0.40"],
        ["bare", "100 MiB", ""],
        ["kmp", "1.5 KiB", "0.05"],
        ["float32", "12,346 images/s", ""],
    ]
    titles = (
        "optimizer step: Adam, 8 large, graph",
        "peak memory: Adam, 8 large",
        "throughput: MLP, XLA",
    )
    assert [title for title in titles if title not in " ".join(text.split())] == []
    assert f"keras: {keras.__version__}" in text.splitlines()


def test_names_of_variants_are_not_cut_on_a_narrow_terminal():
    measured = [
        Measurement(
            "network throughput",
            "BERT-base, 32 of 128",
            "XLA",
            variant,
            1e5,
            "tokens/s",
            1.0,
            (1, 1),
            (1, 1),
        )
        for variant in VARIANTS
    ]
    names = [row[0] for row in rows_of(shown(measured, width=80))]
    assert " ".join(names).split() == " ".join(VARIANTS).split()
