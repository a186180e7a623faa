import matplotlib.pyplot as plt
import numpy as np
import pytest

from kmp import plots
from kmp.records import BIN_COUNT, ExponentHistogram, Run


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def histogram(scale=2.0**10):
    counts = np.zeros(BIN_COUNT, np.int64)
    counts[0], counts[150 - 20], counts[150 + 3] = 25, 70, 5
    return ExponentHistogram(counts, step=7, loss_scale=scale)


def extent(ax, label):
    patch = next(p for p in ax.patches if p.get_label().startswith(label))
    filled = patch.get_data().values > 0
    return patch.get_data().edges[:-1][filled].tolist()


def test_gradient_exponents_draws_the_counts_at_their_exponents_with_and_without_scale():
    ax = plots.gradient_exponents(histogram())
    assert extent(ax, "gradient times loss scale $2^{10}$") == [-20, 3]
    assert extent(ax, "gradient") == [-30, -7]
    labels = " ".join(text.get_text() for text in ax.get_legend().get_texts())
    assert "25.0% are zero" in labels
    assert "log2 |g|" in ax.get_xlabel()
    assert ax.get_ylabel() == "gradient elements"
    assert "step 7" in ax.get_title()
    assert ax.get_yscale() == "log"


def test_gradient_exponents_shades_where_float16_ends():
    ax = plots.gradient_exponents(histogram())
    low, high = ax.get_xlim()
    assert low < -30
    assert high > 16
    zones = {text.get_text() for text in ax.texts}
    assert zones == {"zero (below $2^{-25}$)", "subnormal", "overflow", "float16's normal range"}


def test_a_scale_of_one_is_drawn_once():
    ax = plots.gradient_exponents(histogram(scale=1.0))
    assert extent(ax, "gradient (loss scale 1)") == [-20, 3]
    assert len(ax.get_legend().get_texts()) == 1


def test_histogram_without_a_finite_element_is_drawn_empty():
    counts = np.zeros(BIN_COUNT, np.int64)
    counts[-1] = 4
    ax = plots.gradient_exponents(ExponentHistogram(counts, 1, 2.0))
    assert len(ax.get_legend().get_texts()) == 2


def test_loss_scale_marks_the_readings_that_saw_overflows():
    rows = [
        {"step": step, "loss_scale": scale, "overflow_count": count, "overflow_rate": rate}
        for step, scale, count, rate in [(101, 8.0, 5, 0.0), (110, 4.0, 6, 0.1), (120, 4.0, 6, 0.0), (130, 2.0, 8, 0.2)]
    ]
    ax = plots.loss_scale(Run(rows))
    line, marks = ax.lines
    assert line.get_xydata().tolist() == [[101, 8], [110, 4], [120, 4], [130, 2]]
    assert marks.get_xydata().tolist() == [[110, 4], [130, 2]]
    assert "8 steps in all" in marks.get_label()
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_yscale()) == ("training step", "loss scale", "log")


def test_loss_scale_needs_no_overflow_readings():
    assert len(plots.loss_scale(Run([{"step": 1, "loss_scale": 8.0}])).lines) == 1


def test_both_draw_on_the_axes_they_are_given_and_return_them():
    _, axes = plt.subplots(2)
    assert plots.gradient_exponents(histogram(), axes[0]) is axes[0]
    assert plots.loss_scale(Run([{"step": 1, "loss_scale": 8.0}]), axes[1]) is axes[1]


def test_save_writes_a_png_and_closes_the_figure(tmp_path):
    plots.save(plots.gradient_exponents(histogram()), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert not plt.get_fignums()
