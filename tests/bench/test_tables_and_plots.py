import io

import matplotlib.pyplot as plt
import numpy as np
from rich.console import Console

from kmp.bench import tables_and_plots
from kmp.bench.resnet_bert import VARIANTS
from kmp.bench.timing import Measurement

RESULTS = [
    Measurement("optimizer step", "Adam, 8 large", "graph", "bare", 0.0125, "s", None),
    Measurement("optimizer step", "Adam, 8 large", "graph", "kmp", 0.02, "s", 1.6, (0.019, 0.024), (1.55, 1.9)),
    Measurement("optimizer step", "Adam, 8 large", "graph", "kmp, jit_compile", 0.005, "s", 0.4),
    Measurement("optimizer step", "Adam, 8 large", "XLA", "bare", 0.01, "s", None),
    Measurement("optimizer step", "Adam, 8 large", "XLA", "kmp", 0.011, "s", 1.1),
    Measurement("peak memory", "Adam, 8 large", "XLA", "bare", 100 * 2**20, "B", None),
    Measurement("peak memory", "Adam, 8 large", "XLA", "kmp", 105 * 2**20, "B", 1.05),
    Measurement("throughput", "MLP", "XLA", "float32", 12345.6, "images/s", None),
]


def printed(function, *arguments):
    text = io.StringIO()
    function(Console(file=text, width=160), *arguments)
    return text.getvalue()


def test_tables_have_a_row_for_each_case_and_a_column_for_each_variant():
    shown = printed(tables_and_plots.show, RESULTS)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if line.startswith("│")]
    times = "\N{MULTIPLICATION SIGN}"
    assert rows == [
        ["Adam, 8 large", "graph", "12.50 ms", f"20.00 ms {times}1.60 (1.55-1.90)", f"5.00 ms {times}0.40"],
        ["Adam, 8 large", "XLA", "10.00 ms", f"11.00 ms {times}1.10", ""],
        ["Adam, 8 large", "XLA", "100 MiB", f"105 MiB {times}1.05"],
        ["MLP", "XLA", "12,346 images/s"],
    ]
    assert [title for title in ("optimizer step", "peak memory", "throughput") if title not in shown] == []


def test_many_variants_are_the_rows_of_a_table():
    variants = [
        Measurement("step", "MLP", mode, f"variant {number}", 1.0, "s", None)
        for mode in ("graph", "XLA")
        for number in range(5)
    ]
    shown = printed(tables_and_plots.show, variants[:-1])
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if line.startswith("│")]
    assert rows == [[f"variant {number}", "1.00 s", "1.00 s" if number < 4 else ""] for number in range(5)]
    assert "step: MLP" in shown
    assert ["graph", "XLA"] in [line.replace("\u2503", " ").split() for line in shown.splitlines()]


def network_results():
    for section in ("network throughput", "network memory"):
        for mode in ("graph", "XLA"):
            for number, variant in enumerate(VARIANTS):
                yield Measurement(section, "BERT-base, 512 of 128", mode, variant, 1e5, "tokens/s", number or None)


def test_names_of_variants_are_not_cut_on_a_narrow_terminal():
    text = io.StringIO()
    tables_and_plots.show(Console(file=text, width=80), list(network_results()))
    names = [line.split("│")[1].strip() for line in text.getvalue().splitlines() if line.startswith("│")]
    assert [name for name in names if name] == 2 * [*VARIANTS]


def test_legends_are_within_the_figure():
    figure = tables_and_plots.ratio_figure(list(network_results()))
    figure.draw_without_rendering()
    for ax in figure.axes:
        legend, title = ax.get_legend().get_window_extent(), ax._left_title.get_window_extent()
        assert legend.x0 >= 0
        assert legend.x1 <= figure.bbox.x1
        assert ax.bbox.y1 <= legend.y0
        assert legend.y1 <= title.y0
    plt.close(figure)


def test_variants_differ_in_colour_or_marker():
    variants = [Measurement("step", "MLP", "graph", f"variant {n}", 1.0, "s", n or None) for n in range(9)]
    figure = tables_and_plots.ratio_figure(variants)
    drawn = [line for line in figure.axes[0].lines if not line.get_label().startswith("_")]
    assert len({(line.get_color(), line.get_marker()) for line in drawn}) == len(drawn) == 8
    plt.close(figure)


def test_comparison_is_one_line_of_text():
    line = tables_and_plots.in_words(RESULTS[5:7])
    assert line == "peak memory, Adam, 8 large, XLA: bare 100 MiB; kmp 105 MiB \N{MULTIPLICATION SIGN}1.05"


def test_what_runs_outside_tensorflow_has_no_mode():
    results = [Measurement("growth", "load_run", "", f"{n} variables", 1536.0, "B", n - 1 or None) for n in (1, 2)]
    assert tables_and_plots.in_words(results).startswith("growth, load_run: 1 variables 1.5 KiB; ")
    figure = tables_and_plots.ratio_figure(results)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["load_run"]
    plt.close(figure)


def test_header_names_versions_and_hardware():
    shown = printed(tables_and_plots.show_header, {"keras": "3.15", "gpus": [], "skipped by": {"Adam": "branch"}})
    assert shown == "keras: 3.15\ngpus: none\nskipped by: Adam: branch\n"


def test_figure_has_each_ratio_in_the_row_of_its_case():
    figure = tables_and_plots.ratio_figure(RESULTS)
    steps, memory = figure.axes
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["optimizer step", "peak memory"]
    assert [label.get_text() for label in steps.get_yticklabels()] == ["Adam, 8 large, graph", "Adam, 8 large, XLA"]
    drawn = {line.get_label(): list(line.get_xdata()) for line in steps.lines if not line.get_label().startswith("_")}
    assert drawn["kmp"] == [1.6, 1.1]
    assert drawn["kmp, jit_compile"][0] == 0.4
    ranges = {collection: collection.get_segments() for collection in steps.collections}
    assert [np.array(segments).tolist() for segments in ranges.values() if segments] == [[[[1.55, 0], [1.9, 0]]]]
    for ax in figure.axes:
        low, high = ax.get_xlim()
        assert all(low < x < high for line in ax.lines for x in line.get_xdata() if np.isfinite(x))
    assert steps.get_xlim()[1] > 1.9
    assert list(memory.lines[0].get_xdata()) == [1.05]
    plt.close(figure)
