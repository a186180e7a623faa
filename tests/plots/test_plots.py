import math

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.collections import QuadMesh
from matplotlib.text import Text

from kmp import plots
from kmp.advice import WhatIf, what_if
from kmp.records import BIN_COUNT, BinCounts, ExponentHistogram, GradientSample, LayerError, Replay, Run

INF_BIN, NAN_BIN = BIN_COUNT - 2, BIN_COUNT - 1


def counted(**bins):
    """Returns counts by bin. The keywords are `e<exponent>` (`m` for a minus sign), `zero`, `inf` and `nan`."""
    indices = {"zero": 0, "inf": INF_BIN, "nan": NAN_BIN}
    counts = np.zeros(BIN_COUNT, np.int64)
    for name, count in bins.items():
        counts[indices[name] if name in indices else 150 + int(name[1:].replace("m", "-"))] = count
    return counts


def histogram(scale=2.0**10, unscaled=None, **bins):
    counts = counted(**(bins or {"zero": 25, "em20": 70, "e3": 5}))
    return ExponentHistogram(counts, step=7, loss_scale=scale, unscaled_counts=unscaled)


def sample(step, scale=8.0, amax=8.0, **bins):
    counts = counted(**(bins or {"zero": 20, "em20": 60, "e3": 20}))[None]
    data = GradientSample(step, scale, ("m/kernel",), BinCounts.of(counts), amax=np.array([amax]), norm=np.ones(1))
    return {"step": step, "sample": data}


def nonempty_exponents(ax, label):
    patch = next(p for p in ax.patches if p.get_label().startswith(label))
    is_nonempty = patch.get_data().values > 0
    return patch.get_data().edges[:-1][is_nonempty].tolist()


def legend_labels(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def line(ax, label):
    return next(line for line in ax.lines if line.get_label().startswith(label))


def texts_in(ax):
    return [text.get_text() for text in ax.texts]


def test_gradient_exponents_draws_counts_with_and_without_the_loss_scale():
    ax = plots.gradient_exponents(histogram())
    assert nonempty_exponents(ax, "gradient times loss scale $2^{10}$") == [-20, 3]
    assert nonempty_exponents(ax, "gradient without the loss scale") == [-30, -7]
    assert "25.0% are zero" in legend_labels(ax)[1]
    assert "log2 |g|" in ax.get_xlabel()
    assert ax.get_ylabel() == "gradient elements"
    assert ax.get_title(loc="left") == "Step 7: 25.0% of gradients zero, 95.0% without scaling"
    assert ax.get_yscale() == "log"


def test_gradient_exponents_shades_the_limits_of_float16():
    ax = plots.gradient_exponents(histogram())
    low, high = ax.get_xlim()
    assert low < -30
    assert high > 16
    zones = {"zero (below $2^{-25}$)", "subnormal", "float16's normal range", "within 3 bits of overflow", "overflow"}
    assert set(texts_in(ax)) == zones
    shaded = [(patch.get_x(), patch.get_x() + patch.get_width()) for patch in ax.patches if hasattr(patch, "get_x")]
    assert shaded == [(low, -25), (-25, -14), (13, 16), (16, high)]


def test_zone_labels_are_vertical_where_they_do_not_fit():
    rotations = {text.get_text(): text.get_rotation() for text in plots.gradient_exponents(histogram()).texts}
    assert rotations["float16's normal range"] == 0
    assert rotations["within 3 bits of overflow"] == 90


def test_gradient_with_a_scale_of_one_is_drawn_once():
    ax = plots.gradient_exponents(histogram(scale=1.0))
    assert nonempty_exponents(ax, "gradient (loss scale 1)") == [-20, 3]
    assert len(legend_labels(ax)) == 1


def test_unscaled_gradient_is_omitted_if_it_is_unknown():
    ax = plots.gradient_exponents(histogram(scale=20000.0))
    assert legend_labels(ax) == ["gradient times loss scale 20,000; 25.0% are zero"]


def test_recorded_unscaled_counts_are_drawn():
    ax = plots.gradient_exponents(histogram(scale=20000.0, unscaled=counted(em34=75, em11=25)))
    assert nonempty_exponents(ax, "gradient without the loss scale") == [-34, -11]


def test_legend_counts_nonfinite_elements():
    ax = plots.gradient_exponents(histogram(e3=1, inf=1200, nan=4))
    assert legend_labels(ax)[1].endswith("0.0% are zero; 1,200 Inf; 4 NaN")


def test_histogram_without_finite_elements_is_labelled_and_has_zones():
    ax = plots.gradient_exponents(histogram(nan=4))
    assert "No element is finite and nonzero." in texts_in(ax)
    assert "subnormal" in texts_in(ax)
    assert legend_labels(ax)[1].endswith("4 NaN")


def test_histogram_without_elements_is_an_empty_figure():
    ax = plots.gradient_exponents(ExponentHistogram(np.zeros(BIN_COUNT, np.int64), 1, 2.0))
    assert texts_in(ax) == ["No gradients were sampled."]


def mesh(ax):
    return next(child for child in ax.collections if isinstance(child, QuadMesh))


def test_heat_map_draws_each_share_at_its_step_and_exponent():
    ax = plots.exponents_over_steps(Run([sample(10), sample(20, e3=1), sample(100)]))
    corners = mesh(ax).get_coordinates()
    assert corners[0, :, 0].tolist() == [5, 15, 60, 140]
    exponents = corners[:-1, 0, 1].tolist()
    shares = mesh(ax).get_array().filled(0)
    assert shares[exponents.index(-20)].tolist() == [0.6, 0, 0.6]
    assert shares[exponents.index(3)].tolist() == [0.2, 1.0, 0.2]
    assert np.count_nonzero(shares) == 5


def test_heat_map_has_axis_labels_and_a_labelled_colour_bar():
    ax = plots.exponents_over_steps(Run([sample(10), sample(20)]))
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("training step", "binary exponent, floor(log2 |g|)")
    (colour_bar,) = [other for other in ax.figure.axes if other is not ax]
    assert colour_bar.get_ylabel() == "share of gradient elements, log scale"
    assert "loss-scaled" in ax.get_title(loc="left")


def test_heat_map_labels_the_limits_of_float16():
    ax = plots.exponents_over_steps(Run([sample(10), sample(20)]))
    assert texts_in(ax) == ["overflow from $2^{16}$", "subnormal below $2^{-14}$", "smallest subnormal, $2^{-24}$"]
    assert {drawn.get_ydata()[0] for drawn in ax.lines} == {16, -14, -24}
    low, high = ax.get_ylim()
    assert -30 < low < -24
    assert 16 < high < 20


def test_heat_map_includes_exponents_outside_float16():
    low, high = plots.exponents_over_steps(Run([sample(10, em60=1, e40=1)])).get_ylim()
    assert low == -60
    assert high > 41


def test_heat_map_marks_nonfinite_samples():
    ax = plots.exponents_over_steps(Run([sample(10), sample(20, e3=1, inf=1), sample(30), sample(45, nan=3)]))
    marks = line(ax, "sample with NaN or Inf")
    assert marks.get_xdata().tolist() == [20, 45]
    assert legend_labels(ax) == ["sample with NaN or Inf (2 of 4)"]


def test_heat_map_of_nonfinite_samples_has_only_marks():
    ax = plots.exponents_over_steps(Run([sample(10, nan=3), sample(20, nan=3)]))
    assert line(ax, "sample with NaN or Inf").get_xdata().tolist() == [10, 20]
    assert not ax.collections
    assert ax.get_xlim() == (5, 25)


def test_heat_map_is_ordered_by_step_and_uses_the_newest_sample_of_a_step():
    ax = plots.exponents_over_steps(Run([sample(20), sample(10), sample(10, e3=1)]))
    assert mesh(ax).get_array().filled(0).max(0).tolist() == [1.0, 0.6]


def test_heat_map_of_one_sample_has_a_tick_at_its_step():
    ax = plots.exponents_over_steps(Run([sample(10)]))
    assert [tick for tick in ax.get_xticks() if ax.get_xlim()[0] <= tick <= ax.get_xlim()[1]] == [10]


def test_loss_scale_marks_records_with_overflows():
    rows = [
        {"step": step, "loss_scale": scale, "overflow_count": count, "overflow_rate": rate}
        for step, scale, count, rate in [(101, 8.0, 5, 0.0), (110, 4.0, 6, 0.1), (120, 4.0, 6, 0.0), (130, 2.0, 8, 0.2)]
    ]
    ax = plots.loss_scale(Run(rows))
    drawn, marks = ax.lines
    assert drawn.get_xydata().tolist() == [[101, 8], [110, 4], [120, 4], [130, 2]]
    assert marks.get_xydata().tolist() == [[110, 4], [130, 2]]
    assert marks.get_label() == "last skipped step of each record (8 in total)"
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_yscale()) == ("training step", "loss scale", "log")


def test_overflow_is_marked_in_its_step_at_its_scale():
    rows = [
        {"step": 20, "loss_scale": 8.0, "overflow_count": 0, "overflow_rate": 0.0, "clean_steps": 20},
        {"step": 40, "loss_scale": 8.0, "overflow_count": 1, "overflow_rate": 0.05, "clean_steps": 3},  # 16 in between
        {"step": 60, "loss_scale": 8.0, "overflow_count": 2, "overflow_rate": 0.05, "clean_steps": 23},  # unknown
    ]
    ax = plots.loss_scale(Run(rows))
    assert line(ax, "last skipped").get_xydata().tolist() == [[37, 16], [60, 8]]
    grown = plots.loss_scale(Run(rows, {"settings": {"rule": "DynamicScale", "growth_interval": 20}}))
    assert line(grown, "last skipped").get_xydata().tolist() == [[40, 8], [60, 8]]  # clean since the growth
    assert ax.get_ylim()[1] >= 16
    fixed = plots.loss_scale(Run(rows, {"settings": {"rule": "FixedScale"}}))
    assert line(fixed, "last skipped").get_xydata().tolist() == [[37, 8], [60, 8]]
    assert ax.get_title(loc="left") == "The loss scale ends at $2^{3}$; 2 of 60 steps were skipped"


def test_steps_that_set_layers_to_float32_are_marked_with_one_legend_entry():
    rows = [{"step": step, "loss_scale": 8.0} for step in (10, 20, 30)]
    rows += [{"step": step, "fallback": ["net/dense"], "fallback_reason": "why"} for step in (12, 25)]
    ax = plots.loss_scale(Run(rows))
    (marks,) = ax.collections
    assert [segment[0][0] for segment in marks.get_segments()] == [12, 25]
    assert legend_labels(ax).count("layers set to float32") == 1
    assert not plots.loss_scale(Run(rows[:3])).collections


def compared(*errors, step=9, output_error=0.002, **values):
    """Returns a record of a comparison: of each layer, the error of its outputs and its new error."""
    layers = [LayerError(f"net/layer_{index}", *pair) for index, pair in enumerate(errors)]
    replay = Replay(32, 8.0, 1.0, 1.0, True, True, output_error=output_error, layer_errors=layers, **values)
    return {"step": step, "replay": replay}


def test_errors_of_the_layers_are_those_of_the_last_comparison():
    not_finite = {"step": 20, "replay": Replay(32, 8.0, None, 1.0, False, True)}
    rows = [compared((0.3, 0.3), step=5), compared((1e-3, 1e-4), (0.0, None), (2e-3, 0.0)), not_finite]
    ax = plots.layer_errors(Run(rows))
    assert line(ax, "outputs").get_xydata().tolist() == [[1e-3, 0], [1e-6, 1], [2e-3, 2]]
    np.testing.assert_array_equal(line(ax, "new error").get_xdata(), [1e-4, np.nan, 1e-6])
    assert line(ax, "limit, 0.05").get_xdata() == [0.05, 0.05]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["net/layer_0", "net/layer_1", "net/layer_2"]
    assert (ax.get_xscale(), ax.get_xlabel()) == ("log", "relative error of outputs in step 9")
    assert ax.get_title(loc="left") == "The model's outputs differ by 0.002"
    assert not ax.collections
    assert ax.get_ylim()[0] > ax.get_ylim()[1]  # the first layer is at the top


def test_layer_where_a_harmful_error_begins_is_marked():
    errors = (0.001, 0.001), (0.9, 0.8), (1.2, 1.1), (1.2, 0.001)
    ax = plots.layer_errors(Run([compared(*errors, output_error=1.2)]))
    assert ax.collections[0].get_offsets().tolist() == [[1.1, 2]]
    assert ax.get_title(loc="left") == "Harmful error begins at net/layer_2"
    cured = plots.layer_errors(Run([compared(*errors, output_error=1.2, float32_layers=["net/layer_1"])]))
    assert cured.collections[0].get_offsets().tolist() == [[0.8, 1]]
    assert not plots.layer_errors(Run([compared(*errors)])).collections  # the outputs agree


@pytest.mark.parametrize("origin", [None, 0, 87, 199])
def test_errors_of_many_layers_have_as_many_names_as_fit(origin):
    errors = [(1.0, 1.0) if index == origin else (1e-3, 1e-4) for index in range(200)]
    ax = plots.layer_errors(Run([compared(*errors, output_error=0.002 if origin is None else 1.0)]))
    rows = ax.get_yticks().tolist()
    assert 10 <= len(rows) <= 15
    assert set(np.diff(rows)) == {15}
    assert origin is None or origin in rows
    assert ax.get_ylabel() == "layer, first to last of 200"


def test_metric_has_a_line_for_each_run():
    runs = {
        name: Run([{"step": step, "metrics": {"acc": step * factor}} for step in (10, 20)])
        for name, factor in (("a", 0.01), ("b", 0.02))
    }
    ax = plots.metric(runs | {"without": Run()}, "acc")
    assert legend_labels(ax) == ["a", "b"]
    assert ax.get_title(loc="left") == "acc at the end: 0.2, 0.4"
    assert [drawn.get_ydata().tolist() for drawn in ax.lines] == [[0.1, 0.2], [0.2, 0.4]]
    assert len({drawn.get_linestyle() for drawn in ax.lines}) == 2  # in greyscale too
    assert [text.get_text() for text in plots.metric(runs, "none").texts] == ["No none was recorded."]


def test_dollar_signs_in_names_are_drawn():
    row = {"step": 9, "metrics": {"$x_{$": 0.5}, "overflow_origins_by_variable": {"a/$b_{$": 3}}
    for ax in (plots.metric({"$r_{$": Run([row])}, "$x_{$"), plots.overflowing_variables(Run([row]))):
        ax.figure.canvas.draw()
    assert ax.get_title(loc="left") == "3 of 3 overflows begin at\na/\\$b_{\\$"


def test_shares_of_the_what_if_plot_have_ticks_in_percent():
    ax = plots.what_if(Run([sample(1, e0=4)]))
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels[0] == "0"
    assert labels[-1] == "100 %"
    assert 3 <= len(labels) <= 7


@pytest.mark.parametrize("elements", [10**5, 10**6, 10**7])
def test_small_shares_have_short_ticks(elements):
    counts = {f"e{exponent}": elements for exponent in (4, 5)} | {"em30": 1}
    ax = plots.what_if(Run([sample(1, **counts)]))
    assert max(len(label.get_text()) for label in ax.get_yticklabels()) <= len("0.000001 %")


def test_many_marks_are_smaller():
    def marks(count):
        rows = [{"step": step, "loss_scale": 8.0, "overflow_rate": 0.5} for step in range(1, count + 1)]
        return line(plots.loss_scale(Run(rows)), "last skipped")

    assert marks(10).get_markersize() > marks(100).get_markersize()
    assert marks(100).get_label() == "last skipped step of each record"


def test_fixed_scale_is_a_flat_line_between_powers_of_two():
    ax = plots.loss_scale(Run([{"step": step, "loss_scale": 1000.0} for step in (1, 50, 100)]))
    assert legend_labels(ax) == ["loss scale, 1,000 throughout"]
    low, high = ax.get_ylim()
    ticks = [tick for tick in ax.get_yticks() if low <= tick <= high]
    assert ticks == [256, 512, 1024, 2048]
    assert ax.yaxis.get_major_formatter()(512) == r"$\mathdefault{2^{9}}$"


def test_single_record_is_a_point():
    ax = plots.loss_scale(Run([{"step": 1, "loss_scale": 8.0}]))
    (drawn,) = ax.lines
    assert drawn.get_marker() == "o"
    assert [tick for tick in ax.get_xticks() if ax.get_xlim()[0] <= tick <= ax.get_xlim()[1]] == [1]


def test_nonfinite_scale_is_omitted():
    ax = plots.loss_scale(Run([{"step": 1, "loss_scale": 8.0}, {"step": 2, "loss_scale": None}]))
    assert ax.lines[0].get_xydata().tolist() == [[1, 8]]


def test_repeated_steps_are_drawn_once_with_their_newest_value():
    rows = [
        {"step": step, "loss_scale": scale} for step, scale in [(10, 8.0), (20, 4.0), (30, 2.0), (20, 16.0), (30, 32.0)]
    ]
    assert plots.loss_scale(Run(rows)).lines[0].get_xydata().tolist() == [[10, 8], [20, 16], [30, 32]]


def curve(is_measured=False, recommended=(9, 11), in_use=10.0):
    scales = np.arange(6, 14)
    falling, rising = np.array([0.5, 0.2, 0.1, 1e-2, 1e-3, 0, 0, 0]), np.array([0, 0, 0, 0, 0, 1e-4, 0.1, 0.5])
    bound = falling if is_measured else falling + 0.1
    return WhatIf(scales, falling, bound, rising, rising * 2, in_use, is_measured, recommended)


def joined(ax, label):
    """Returns the joined points of the lines in a colour, the x at which dashed lines begin, and the lines."""
    solid = line(ax, label)
    lines = [drawn for drawn in ax.lines if drawn.get_color() == solid.get_color()]
    parts = [drawn.get_xydata() for drawn in lines]
    return np.concatenate([parts[0], *(part[1:] for part in parts[1:])]), [part[0, 0] for part in parts[1:]], lines


@pytest.mark.parametrize("name", ["underflow", "overflow", "skipped"])
def test_what_if_draws_the_curve_with_a_dashed_extrapolation(name):
    expected = curve()
    data, dashed_from, lines = joined(plots.what_if(expected), f"{name}: share of")
    np.testing.assert_array_equal(data, np.column_stack([expected.log2_scales, getattr(expected, name)]))
    assert dashed_from == [10]
    assert [drawn.is_dashed() for drawn in lines] == [False, True]


def test_what_if_of_a_measured_curve_is_solid_and_has_no_band():
    ax = plots.what_if(curve(is_measured=True))
    assert legend_labels(ax) == [
        *("underflow: share of elements", "overflow: share of elements", "skipped: share of sampled steps"),
        *("in use: $2^{10}$", "recommended: $2^{9}$ to $2^{11}$"),
    ]
    assert joined(ax, "underflow")[1] == []
    assert not ax.collections


def test_what_if_fills_between_underflow_and_its_bound():
    ax = plots.what_if(curve())
    assert "underflow if all zeros were flushed" in legend_labels(ax)
    assert "dashed: extrapolation" in legend_labels(ax)
    (band,) = ax.collections
    corners = {tuple(corner) for corner in band.get_paths()[0].vertices.tolist()}
    assert {(6, 0.5), (6, 0.6), (13, 0), (13, 0.1)} <= corners


def test_what_if_marks_the_scale_in_use_and_the_recommended_ones():
    ax = plots.what_if(curve())
    assert line(ax, "in use").get_xdata() == [10, 10]
    (span,) = ax.patches
    assert (span.get_x(), span.get_width()) == (9, 2)


def test_what_if_shades_half_a_bit_around_a_single_recommended_scale():
    ax = plots.what_if(curve(recommended=(9, 9)))
    assert (ax.patches[0].get_x(), ax.patches[0].get_width()) == (8.5, 1)
    assert "recommended: $2^{9}$" in legend_labels(ax)


def test_what_if_without_a_recommended_scale_has_a_legend_entry():
    ax = plots.what_if(curve(recommended=None))
    assert "no scale is recommended" in legend_labels(ax)
    assert not ax.patches


def test_what_if_labels_a_scale_in_use_that_is_not_a_power_of_two():
    assert "in use: 20,000" in legend_labels(plots.what_if(curve(in_use=math.log2(20000))))


def test_what_if_has_axis_labels_and_includes_zero():
    ax = plots.what_if(curve())
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("loss scale", "share of elements, or of steps")
    assert ax.xaxis.get_major_formatter()(8) == "$2^{8}$"
    assert ax.get_yscale() == "symlog"
    assert ax.get_ylim()[0] < 0
    assert ax.get_ylim()[1] > 1
    assert 0 in ax.get_yticks()


def test_what_if_of_a_run_draws_the_result_of_kmp_what_if():
    run = Run([sample(10), sample(20)])
    data, _, _ = joined(plots.what_if(run), "underflow")
    np.testing.assert_array_equal(data[:, 1], what_if(run).underflow)


def run_with_overflows(overflows, overflow_origins, **rest):
    return Run(
        [{"step": 1, "overflows_by_variable": overflows, "overflow_origins_by_variable": overflow_origins, **rest}]
    )


def bar_widths(ax, label):
    container = next(bars for bars in ax.containers if bars.get_label() == label)
    return [bar.get_width() for bar in container]


def test_bars_show_nonfinite_gradients_and_overflow_origins():
    ax = plots.overflowing_variables(run_with_overflows({"a": 7, "b": 9, "c": 5, "d": 0}, {"c": 4, "a": 3}))
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["c", "a", "b"]
    assert bar_widths(ax, "gradient not finite") == [5, 7, 9]
    assert bar_widths(ax, "overflow origin") == [4, 3, 0]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("training steps", "variable")
    assert ax.get_ylim()[0] > ax.get_ylim()[1]


def test_bars_are_distinguishable_without_colour():
    ax = plots.overflowing_variables(run_with_overflows({"a": 7}, {"a": 3}))
    light, dark = (bars[0] for bars in ax.containers)
    assert dark.get_hatch()
    assert not light.get_hatch()
    assert np.mean(light.get_facecolor()[:3]) > np.mean(dark.get_facecolor()[:3]) + 0.4


def test_bars_are_of_the_newest_record():
    run = run_with_overflows({"a": 1}, {"a": 1})
    run.append({"step": 2, "overflows_by_variable": {"a": 6}, "overflow_origins_by_variable": {"a": 2}})
    assert bar_widths(plots.overflowing_variables(run), "gradient not finite") == [6]


def test_only_the_worst_variables_are_drawn_and_the_label_has_their_number():
    counts = {f"v{number}": number for number in range(1, 13)}
    ax = plots.overflowing_variables(run_with_overflows(counts, {"v3": 1}), top=3)
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["v3", "v12", "v11"]
    assert ax.get_ylabel() == "variable (the worst 3 of 12)"


def test_ticks_of_the_bars_are_integers():
    ticks = plots.overflowing_variables(run_with_overflows({"a": 2}, {"a": 1})).get_xticks()
    assert ticks.tolist() == np.round(ticks).tolist()


@pytest.mark.parametrize("top", [0, -1])
def test_top_must_be_positive(top):
    with pytest.raises(ValueError, match="top"):
        plots.overflowing_variables(Run(), top=top)


def test_no_overflow_is_distinguished_from_no_counts():
    assert texts_in(plots.overflowing_variables(run_with_overflows({}, {}))) == ["No overflow."]
    assert texts_in(plots.overflowing_variables(Run())) == ["Overflows were not counted by variable."]


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["resnet50/conv5_block3_out/conv5_block3_3_conv/kernel"], ["resnet50/…/conv5_block3_3_conv/kernel"]),
        (["a_layer_with_a_very_long_name_of_a_model_1/kernel"], ["a_layer_with…_name_of_a_model_1/kernel"]),
        ([f"network/block_{i}/convolution_layer/kernel" for i in "12"],) * 2,  # would be equal, so they are longer
        ([f"{'x' * 90}{i}{'x' * 90}" for i in "12"], [f"{'x' * 15}…{'x' * 32}{n}" for n in ("", "#2")]),
    ],
)
def test_long_paths_keep_both_ends_and_stay_unique(paths, names):
    ax = plots.overflowing_variables(run_with_overflows(dict.fromkeys(paths, 1), {}))
    assert [label.get_text() for label in ax.get_yticklabels()] == names


EMPTY = [
    (plots.exponents_over_steps, "No gradients were sampled."),
    (plots.layer_errors, "No batch was compared with float32."),
    (plots.loss_scale, "No loss scale was recorded."),
    (plots.what_if, "No finite gradients were sampled."),
    (plots.overflowing_variables, "Overflows were not counted by variable."),
]


@pytest.mark.parametrize(("draw", "reason"), EMPTY)
@pytest.mark.parametrize("rows", [[], [{"step": 1, "last_loss": 0.5}]], ids=["empty", "other"])
def test_run_without_records_is_an_empty_figure_with_a_reason(draw, reason, rows):
    ax = draw(Run(rows))
    assert texts_in(ax) == [reason]
    assert not ax.lines
    assert not ax.patches
    assert ax.get_xticks().size == ax.get_yticks().size == 0
    assert ax.get_xlabel()
    assert ax.get_ylabel()


def test_what_if_of_overflowed_samples_is_an_empty_figure():
    assert texts_in(plots.what_if(Run([sample(10, nan=4)]))) == ["No finite gradients were sampled."]


FULL = Run([sample(10), sample(20), {"step": 20, "loss_scale": 8.0, "overflow_rate": 0.1, "overflow_count": 2}])
FULL.append(compared((1.2, 1.2), (1.2, 1e-4), output_error=1.2) | {"fallback": ["net/layer_0"]})
FULL.append({"step": 20, "overflows_by_variable": {"m/kernel": 2}, "overflow_origins_by_variable": {"m/kernel": 2}})
LONG_NAMES = {
    "encoder_of_images/block_1/convolution_2/kernel": 2000,
    "a_layer_with_a_very_long_name_of_a_model_1/kernel": 1,
}
LONG = Run(
    [*FULL.rows, {"step": 21} | dict.fromkeys(("overflows_by_variable", "overflow_origins_by_variable"), LONG_NAMES)]
)


@pytest.mark.parametrize(
    "draw", [draw for draw, _ in EMPTY] + [lambda run, ax: plots.gradient_exponents(run.histograms[0], ax)]
)
@pytest.mark.parametrize("run", [FULL, Run([sample(10), *FULL.rows[2:]]), LONG], ids=["two", "one", "long"])
def test_plots_use_the_given_axes_and_fit_a_small_figure(draw, run):
    figure, ax = plt.subplots(figsize=(5.2, 3.6), layout="constrained")
    assert draw(run, ax=ax) is ax
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    texts = [child for child in ax.get_children() if isinstance(child, Text)]
    for artist in filter(None, [*texts, ax.get_legend(), ax.xaxis.label, ax.yaxis.label]):
        box = artist.get_window_extent(renderer)
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1
    assert figure.axes[0].get_window_extent().width > 0.4 * figure.bbox.width


def test_legend_wider_than_the_axes_does_not_shrink_them():
    figure, axes = plt.subplots(1, 2, figsize=(5.2, 3.6), layout="constrained")
    plots.gradient_exponents(histogram(zero=1, inf=10**9, nan=10**9), axes[0])
    figure.canvas.draw()
    assert axes[0].get_window_extent().width > 0.3 * figure.bbox.width


def test_save_writes_a_png_and_closes_the_figure(tmp_path):
    open_figures = plt.get_fignums()
    plots.save(plots.gradient_exponents(histogram()), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert plt.get_fignums() == open_figures


FIGURES = [
    *("exponents_over_steps", "gradient_exponents", "layer_errors", "loss_scale", "overflowing_variables", "what_if"),
]


@pytest.mark.parametrize("name", FIGURES)
def test_path_of_a_run_is_an_error(name):
    with pytest.raises(TypeError, match="must be a kmp.records"):
        getattr(plots, name)("runs/first")


@pytest.mark.parametrize("name", FIGURES)
def test_axes_of_another_type_are_an_error(name):
    data = histogram() if name == "gradient_exponents" else FULL
    with pytest.raises(TypeError, match=r"`ax` must be axes of matplotlib, or None for new ones. Received: ax=3"):
        getattr(plots, name)(data, ax=3)


def test_wrong_arguments_of_save_are_errors(tmp_path):
    with pytest.raises(TypeError, match="`ax` must be axes of matplotlib.*Received: ax=3"):
        plots.save(3, tmp_path / "figure.png")
    with pytest.raises(TypeError, match="`path` must be the path of the PNG file. Received: path=3"):
        plots.save(plots.gradient_exponents(histogram()), 3)


def test_names_are_drawn_literally():
    counts = {"$x_{$/kernel": 3, "a\x1b[2J\u202e": 2}
    ax = plots.overflowing_variables(run_with_overflows(counts, {}))
    ax.figure.canvas.draw()  # mathtext would raise
    assert [label.get_text() for label in ax.get_yticklabels()] == [r"\$x_{\$/kernel", r"a\x1b[2J\u202e"]


def test_figures_of_many_records_have_a_bounded_number_of_marks_and_cells():
    rows = [{"step": step, "loss_scale": 8.0, "overflow_rate": 0.5} for step in range(1, 5001)]
    ax = plots.loss_scale(Run(rows))
    assert 1000 <= line(ax, "last skipped step").get_xdata().size <= 2000
    drawn = plots.exponents_over_steps(Run([sample(step, nan=4, e0=4) for step in range(1, 2502)]))
    assert mesh(drawn).get_array().shape[1] == 834
    assert drawn.get_xlim() == (0.5, 2501.5)
    assert np.unique(mesh(drawn).get_array().compressed()).tolist() == [0.5]
    assert line(drawn, "sample with NaN or Inf (2501 of 2501)").get_xdata().size <= 1000


def test_newest_record_of_a_repeated_step_is_drawn():
    rows = [{"step": step, "loss_scale": scale} for step, scale in ((1, 2.0), (9, 4.0), (3, 8.0), (9, 16.0), (3, None))]
    drawn = line(plots.loss_scale(Run(rows)), "loss scale")
    assert (drawn.get_xdata().tolist(), drawn.get_ydata().tolist()) == ([1, 9], [2.0, 16.0])
