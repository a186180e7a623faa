import math

import matplotlib.pyplot as plt
import numpy as np
import pytest
from built_runs import bin_counts, make_replay
from matplotlib.collections import QuadMesh
from matplotlib.text import Text

from kmp import plots
from kmp.advice import WhatIf, what_if
from kmp.records import ExponentHistogram, GradientSample, Header, Record, Run, Settings
from kmp.records.replay import LayerError


def histogram(scale=2.0**10, **bins):
    counts = bin_counts(**(bins or {"exponents": {-20: 70, 3: 5}, "zero": 25}))
    return ExponentHistogram(counts, step=7, loss_scale=scale)


def sample(step, **bins):
    counts = bin_counts(**(bins or {"exponents": {-20: 60, 3: 20}, "zero": 20}))[None]
    data = GradientSample(step, 8.0, ("m/kernel",), counts, amax=np.array([8.0]), norm=np.ones(1))
    return Record(step=step, sample=data)


def scales_of(*pairs, **values):
    """Returns the records of a run with these steps and loss scales."""
    return [Record(step=step, loss_scale=scale, **values) for step, scale in pairs]


def overflows_of(overflows, origins=None, step=1):
    """Returns the record of overflows by variable."""
    return Record(
        step=step, overflows_by_variable=overflows, overflow_origins_by_variable=origins or {}
    )


def compared(*errors, step=9, output_error=0.002, **values):
    """Returns a record of a comparison, with the errors of each layer."""
    layers = [LayerError(f"net/layer_{index}", *pair) for index, pair in enumerate(errors)]
    replay = make_replay(
        32, 8.0, 1.0, 1.0, True, True, output_error=output_error, layer_errors=layers, **values
    )
    return Record(step=step, replay=replay)


def curve(is_measured=False, recommended=(9, 11), in_use=10.0):
    scales = np.arange(6, 14)
    falling, rising = (
        np.array([0.5, 0.2, 0.1, 1e-2, 1e-3, 0, 0, 0]),
        np.array([0, 0, 0, 0, 0, 1e-4, 0.1, 0.5]),
    )
    bound = falling if is_measured else falling + 0.1
    return WhatIf(scales, falling, bound, rising, rising * 2, in_use, is_measured, recommended)


def nonempty_exponents(ax, label):
    patch = next(p for p in ax.patches if p.get_label().startswith(label))
    is_nonempty = patch.get_data().values > 0
    return patch.get_data().edges[:-1][is_nonempty].tolist()


def texts_of(artists):
    return [text.get_text() for text in artists]


def legend_labels(ax):
    return texts_of(ax.get_legend().get_texts())


def line(ax, label):
    return next(line for line in ax.lines if line.get_label().startswith(label))


def mesh(ax):
    return next(child for child in ax.collections if isinstance(child, QuadMesh))


def bar_widths(ax, label):
    container = next(bars for bars in ax.containers if bars.get_label() == label)
    return [bar.get_width() for bar in container]


def visible_ticks(axis, limits):
    return [tick for tick in axis.get_ticklocs() if limits[0] <= tick <= limits[1]]


def test_gradient_exponents_draws_counts_with_and_without_the_scale_and_the_limits_of_float16():
    ax = plots.gradient_exponents(histogram())
    assert nonempty_exponents(ax, "gradient times loss scale $2^{10}$") == [-20, 3]
    assert nonempty_exponents(ax, "gradient without the loss scale") == [-30, -7]
    assert "25.0% are zero" in legend_labels(ax)[1]
    assert "log2 |g|" in ax.get_xlabel()
    assert (ax.get_ylabel(), ax.get_yscale()) == ("gradient elements", "log")
    assert ax.get_title(loc="left") == "Step 7: 25.0% of gradients zero, 95.0% without scaling"
    low, high = ax.get_xlim()
    assert low < -30
    assert high > 16
    assert {text.get_text(): text.get_rotation() for text in ax.texts} == {
        **{"zero (below $2^{-25}$)": 0, "subnormal": 0, "float16's normal range": 0},
        **{"within 3 bits of overflow": 90, "overflow": 0},  # vertical where it does not fit
    }
    shaded = [
        (patch.get_x(), patch.get_x() + patch.get_width())
        for patch in ax.patches
        if hasattr(patch, "get_x")
    ]
    assert shaded == [(low, -25), (-25, -14), (13, 16), (16, high)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gradient_exponents_mark_only_the_limits_that_gradients_come_near_to(dtype):
    ax = plots.gradient_exponents(histogram(1.0), dtype=dtype)
    assert texts_of(ax.texts) == [f"{dtype}'s normal range"]
    assert legend_labels(ax) == ["gradient; 25.0% are zero"]
    assert ax.get_title(loc="left") == "Step 7: 25.0% of gradients zero"
    low, high = ax.get_xlim()
    assert -30 < low < -20
    assert 3 < high < 12
    tiny = ExponentHistogram(bin_counts(exponents={-128: 2, -120: 5}), 1, 1.0)
    ax = plots.gradient_exponents(tiny, dtype=dtype)
    assert "subnormal" in texts_of(ax.texts)
    assert "overflow" not in texts_of(ax.texts)


def test_gradient_is_drawn_without_the_scale_where_that_differs():
    ax = plots.gradient_exponents(histogram(20000.0))
    unscaled, scaled = legend_labels(ax)
    assert nonempty_exponents(ax, unscaled) == [-34, -11]
    assert (unscaled, scaled) == (
        *("gradient without the loss scale", "gradient times loss scale 20,000; 25.0% are zero"),
    )
    assert legend_labels(plots.gradient_exponents(histogram(1.0))) == [
        "gradient (loss scale 1); 25.0% are zero"
    ]


def test_histogram_without_finite_elements_has_zones_and_one_without_elements_is_empty():
    ax = plots.gradient_exponents(histogram(inf=1200, nan=4))
    assert {"No element is finite and nonzero.", "subnormal"} <= {*texts_of(ax.texts)}
    assert (
        legend_labels(ax)[1]
        == "gradient times loss scale $2^{10}$; 0.0% are zero; 1,200 Inf; 4 NaN"
    )
    empty = ExponentHistogram(bin_counts(), 1, 2.0)
    assert texts_of(plots.gradient_exponents(empty).texts) == ["No gradients were sampled."]


def test_heat_map_draws_each_share_at_its_step_and_exponent():
    older = sample(10, exponents={5: 1})
    # The newest sample of a step, in order.
    rows = [sample(20, exponents={3: 1}), older, sample(10), sample(100)]
    ax = plots.exponents_over_steps(Run(rows))
    corners = mesh(ax).get_coordinates()
    assert corners[0, :, 0].tolist() == [5, 15, 60, 140]
    exponents = corners[:-1, 0, 1].tolist()
    shares = mesh(ax).get_array().filled(0)
    assert shares[exponents.index(-20)].tolist() == [0.6, 0, 0.6]
    assert shares[exponents.index(3)].tolist() == [0.2, 1.0, 0.2]
    assert np.count_nonzero(shares) == 5
    low, high = plots.exponents_over_steps(Run([sample(10, exponents={-60: 1, 40: 1})])).get_ylim()
    assert low == -60  # outside float16
    assert high > 41


def test_heat_map_labels_axes_colours_and_the_limits_of_float16():
    ax = plots.exponents_over_steps(Run([sample(10), sample(20)]))
    assert (ax.get_xlabel(), ax.get_ylabel()) == (
        "training step",
        "binary exponent, floor(log2 |g|)",
    )
    (colour_bar,) = [other for other in ax.figure.axes if other is not ax]
    assert colour_bar.get_ylabel() == "share of gradient elements, log scale"
    assert "loss-scaled" in ax.get_title(loc="left")
    limits = [
        "overflow from $2^{16}$",
        "subnormal below $2^{-14}$",
        "smallest subnormal, $2^{-24}$",
    ]
    assert texts_of(ax.texts) == limits
    assert {drawn.get_ydata()[0] for drawn in ax.lines} == {16, -14, -24}
    low, high = ax.get_ylim()
    assert -30 < low < -24
    assert 16 < high < 20


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_heat_map_of_another_format_has_neither_limits_nor_a_loss_scale(dtype):
    ax = plots.exponents_over_steps(Run([sample(10), sample(20)], without_scale(dtype)))
    assert not ax.texts
    assert ax.get_title(loc="left") == "Of the gradient: 20% zero"
    low, high = ax.get_ylim()
    assert low == -24  # four bits beside the gradients
    assert high < 12


def without_scale(dtype):
    """Returns the header of a run whose layers compute in a dtype, with the scale it gets."""
    settings = Settings(rule="FixedScale", initial_scale=1.0, compute_dtypes=[dtype])
    return Header(settings=settings)


def test_heat_map_marks_nonfinite_samples():
    rows = [sample(10), sample(20, exponents={3: 1}, inf=1), sample(30), sample(45, nan=3)]
    ax = plots.exponents_over_steps(Run(rows))
    assert line(ax, "sample with NaN or Inf").get_xdata().tolist() == [20, 45]
    assert legend_labels(ax) == ["sample with NaN or Inf (2 of 4)"]
    alone = plots.exponents_over_steps(Run([sample(10, nan=3), sample(20, nan=3)]))
    assert line(alone, "sample with NaN or Inf").get_xdata().tolist() == [10, 20]
    assert not alone.collections
    assert alone.get_xlim() == (5, 25)


def test_overflow_is_marked_in_its_step_at_its_scale_or_where_that_is_unknown_at_its_record():
    rows = [
        Record(step=20, loss_scale=4.0, overflow_count=0, overflow_rate=0.0, clean_steps=20),
        # 16 in between.
        Record(step=40, loss_scale=8.0, overflow_count=1, overflow_rate=0.05, clean_steps=3),
        # Unknown.
        Record(step=60, loss_scale=8.0, overflow_count=3, overflow_rate=0.1, clean_steps=23),
    ]
    ax = plots.loss_scale(Run(rows))
    drawn, marks = ax.lines
    assert drawn.get_xydata().tolist() == [[20, 4], [40, 8], [60, 8]]
    assert marks.get_xydata().tolist() == [[37, 16], [60, 8]]
    assert marks.get_label() == "last skipped step of each record (3 in total)"
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_yscale()) == (
        "training step",
        "loss scale",
        "log",
    )
    assert ax.get_ylim()[1] >= 16
    assert ax.get_title(loc="left") == "The loss scale ends at $2^{3}$; 3 of 60 steps were skipped"
    grown = plots.loss_scale(
        Run(rows, Header(settings=Settings(rule="DynamicScale", growth_interval=20)))
    )
    # Clean since the growth.
    assert line(grown, "last skipped").get_xydata().tolist() == [[40, 8], [60, 8]]
    fixed = plots.loss_scale(Run(rows, Header(settings=Settings(rule="FixedScale"))))
    assert line(fixed, "last skipped").get_xydata().tolist() == [[37, 8], [60, 8]]


def test_steps_that_set_layers_to_float32_are_marked_with_one_legend_entry():
    rows = scales_of((10, 8.0), (20, 8.0), (30, 8.0))
    fallbacks = [
        Record(step=step, fallback=["net/dense"], fallback_reason="why") for step in (12, 25)
    ]
    ax = plots.loss_scale(Run([*rows, *fallbacks]))
    (marks,) = ax.collections
    assert [segment[0][0] for segment in marks.get_segments()] == [12, 25]
    assert legend_labels(ax).count("layers set to float32") == 1
    assert not plots.loss_scale(Run(rows)).collections


def test_fixed_scale_is_a_flat_line_between_powers_of_two_and_a_single_record_a_point():
    ax = plots.loss_scale(Run(scales_of((1, 1000.0), (50, 1000.0), (100, 1000.0))))
    assert legend_labels(ax) == ["loss scale, 1,000 throughout"]
    assert visible_ticks(ax.yaxis, ax.get_ylim()) == [256, 512, 1024, 2048]
    assert ax.yaxis.get_major_formatter()(512) == r"$\mathdefault{2^{9}}$"
    scale = plots.loss_scale(Run(scales_of((10, 8.0))))
    assert scale.lines[0].get_marker() == "o"
    for ax in (scale, plots.exponents_over_steps(Run([sample(10)]))):
        assert visible_ticks(ax.xaxis, ax.get_xlim()) == [10]


def test_newest_finite_scale_of_a_repeated_step_is_drawn():
    (drawn,) = plots.loss_scale(
        Run(scales_of((1, 2.0), (9, 4.0), (3, 8.0), (9, 16.0), (3, None)))
    ).lines
    assert drawn.get_xydata().tolist() == [[1, 2], [9, 16]]


def test_figures_of_many_records_have_a_bounded_number_of_marks_and_cells():
    few, many, most = (
        line(
            plots.loss_scale(
                Run(scales_of(*((n, 8.0) for n in range(1, count)), overflow_rate=0.5))
            ),
            "last skipped",
        )
        for count in (10, 100, 2501)
    )
    assert few.get_markersize() > many.get_markersize()
    assert many.get_label() == "last skipped step of each record"
    assert 1000 <= most.get_xdata().size <= 2000
    drawn = plots.exponents_over_steps(
        Run([sample(step, exponents={0: 4}, nan=4) for step in range(1, 1502)])
    )
    assert mesh(drawn).get_array().shape[1] == 751
    assert drawn.get_xlim() == (0.5, 1501.5)
    assert np.unique(mesh(drawn).get_array().compressed()).tolist() == [0.5]
    assert line(drawn, "sample with NaN or Inf (1501 of 1501)").get_xdata().size <= 1000


def test_errors_of_the_layers_are_those_of_the_last_comparison():
    not_finite = Record(step=20, replay=make_replay(32, 8.0, None, 1.0, False, True))
    rows = [
        compared((0.3, 0.3), step=5),
        compared((1e-3, 1e-4), (0.0, None), (2e-3, 0.0)),
        not_finite,
    ]
    ax = plots.layer_errors(Run(rows))
    assert line(ax, "outputs").get_xydata().tolist() == [[1e-3, 0], [1e-6, 1], [2e-3, 2]]
    np.testing.assert_array_equal(line(ax, "new error").get_xdata(), [1e-4, np.nan, 1e-6])
    assert line(ax, "limit, 0.05").get_xdata() == [0.05, 0.05]
    assert texts_of(ax.get_yticklabels()) == ["net/layer_0", "net/layer_1", "net/layer_2"]
    assert (ax.get_xscale(), ax.get_xlabel()) == ("log", "relative error of outputs in step 9")
    assert ax.get_title(loc="left") == "The model's outputs differ by 0.002"
    assert not ax.collections
    assert ax.get_ylim()[0] > ax.get_ylim()[1]  # the first layer is at the top


def test_layer_where_a_harmful_error_begins_is_marked():
    errors = (0.001, 0.001), (0.9, 0.8), (1.2, 1.1), (1.2, 0.001)
    ax = plots.layer_errors(Run([compared(*errors, output_error=1.2)]))
    assert ax.collections[0].get_offsets().tolist() == [[1.1, 2]]
    assert ax.get_title(loc="left") == "Harmful error begins at net/layer_2"
    cured = plots.layer_errors(
        Run([compared(*errors, output_error=1.2, float32_layers=["net/layer_1"])])
    )
    assert cured.collections[0].get_offsets().tolist() == [[0.8, 1]]
    assert not plots.layer_errors(Run([compared(*errors)])).collections  # the outputs agree


@pytest.mark.parametrize("origin", [None, 87, 199])
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
        name: Run([Record(step=step, metrics={"acc": step * factor}) for step in (10, 20)])
        for name, factor in (("a", 0.01), ("b", 0.02))
    }
    ax = plots.metric(runs | {"without": Run()}, "acc")
    assert legend_labels(ax) == ["a", "b"]
    assert ax.get_title(loc="left") == "acc at the end: 0.2, 0.4"
    assert [drawn.get_ydata().tolist() for drawn in ax.lines] == [[0.1, 0.2], [0.2, 0.4]]
    assert len({drawn.get_linestyle() for drawn in ax.lines}) == 2  # in greyscale too
    assert texts_of(plots.metric(runs, "none").texts) == ["No none was recorded."]


def joined(ax, label):
    """Returns the points of the lines in a colour, and where dashed lines begin."""
    solid = line(ax, label)
    lines = [drawn for drawn in ax.lines if drawn.get_color() == solid.get_color()]
    parts = [drawn.get_xydata() for drawn in lines]
    return (
        np.concatenate([parts[0], *(part[1:] for part in parts[1:])]),
        [part[0, 0] for part in parts[1:]],
        lines,
    )


def test_what_if_draws_each_curve_also_of_a_run_with_a_dashed_extrapolation():
    expected = curve()
    ax = plots.what_if(expected)
    for name in ("underflow", "overflow", "skipped"):
        data, dashed_from, lines = joined(ax, f"{name}: share of")
        np.testing.assert_array_equal(
            data, np.column_stack([expected.log2_scales, getattr(expected, name)])
        )
        assert dashed_from == [10]
        assert [drawn.is_dashed() for drawn in lines] == [False, True]
    run = Run([sample(10), sample(20)])
    np.testing.assert_array_equal(
        joined(plots.what_if(run), "underflow")[0][:, 1], what_if(run).underflow
    )


def test_what_if_of_a_measured_curve_is_solid_and_has_no_band():
    ax = plots.what_if(curve(is_measured=True))
    assert legend_labels(ax) == [
        *(
            "underflow: share of elements",
            "overflow: share of elements",
            "skipped: share of sampled steps",
        ),
        *("in use: $2^{10}$", "recommended: $2^{9}$ to $2^{11}$"),
    ]
    assert joined(ax, "underflow")[1] == []
    assert not ax.collections


def test_what_if_marks_the_bound_of_the_underflow_and_the_scale_in_use_on_axes_with_labels():
    ax = plots.what_if(curve())
    assert {"underflow if all zeros were flushed", "dashed: extrapolation"} <= {*legend_labels(ax)}
    (band,) = ax.collections
    corners = {tuple(corner) for corner in band.get_paths()[0].vertices.tolist()}
    assert {(6, 0.5), (6, 0.6), (13, 0), (13, 0.1)} <= corners
    assert line(ax, "in use").get_xdata() == [10, 10]
    assert "in use: 20,000" in legend_labels(plots.what_if(curve(in_use=math.log2(20000))))
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("loss scale", "share of elements, or of steps")
    assert ax.xaxis.get_major_formatter()(8) == "$2^{8}$"
    assert (ax.get_yscale(), 0 in ax.get_yticks()) == ("symlog", True)
    assert ax.get_ylim()[0] < 0
    assert ax.get_ylim()[1] > 1


@pytest.mark.parametrize(
    ("recommended", "label", "spans"),
    [
        ((9, 11), "recommended: $2^{9}$ to $2^{11}$", [(9, 2)]),
        ((9, 9), "recommended: $2^{9}$", [(8.5, 1)]),  # a single scale has no width
        (None, "no scale is recommended", []),
    ],
)
def test_what_if_shades_the_recommended_scales(recommended, label, spans):
    ax = plots.what_if(curve(is_measured=True, recommended=recommended))
    assert label in legend_labels(ax)
    assert [(patch.get_x(), patch.get_width()) for patch in ax.patches] == spans


@pytest.mark.parametrize("elements", [0, 10**5, 10**7])
def test_shares_have_short_ticks_in_percent(elements):
    exponents = {-30: 1, 5: elements, 4: elements} if elements else {4: 4}
    labels = texts_of(plots.what_if(Run([sample(1, exponents=exponents)])).get_yticklabels())
    assert labels[0] == "0"
    assert elements or labels[-1] == "100 %"
    assert 3 <= len(labels) <= 7
    assert max(map(len, labels)) <= len("0.000001 %")


def test_bars_show_nonfinite_gradients_and_origins_of_the_newest_record_also_without_colour():
    newest = overflows_of({"a": 7, "b": 9, "c": 5, "d": 0}, {"c": 4, "a": 3}, step=2)
    ax = plots.overflowing_variables(Run([overflows_of({"a": 1}, {"a": 1}), newest]))
    assert texts_of(ax.get_yticklabels()) == ["c", "a", "b"]
    assert bar_widths(ax, "gradient not finite") == [5, 7, 9]
    assert bar_widths(ax, "overflow origin") == [4, 3, 0]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("training steps", "variable")
    assert ax.get_ylim()[0] > ax.get_ylim()[1]
    light, dark = (bars[0] for bars in ax.containers)
    assert (bool(light.get_hatch()), bool(dark.get_hatch())) == (False, True)
    assert np.mean(light.get_facecolor()[:3]) > np.mean(dark.get_facecolor()[:3]) + 0.4
    ticks = plots.overflowing_variables(Run([overflows_of({"a": 2}, {"a": 1})])).get_xticks()
    assert ticks.tolist() == np.round(ticks).tolist()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bars_of_another_format_are_of_gradients_that_are_not_finite(dtype):
    header = without_scale(dtype)
    ax = plots.overflowing_variables(Run([overflows_of({"a": 7}, {"a": 4})], header))
    assert legend_labels(ax) == ["gradient not finite", "origin"]
    assert ax.get_title(loc="left") == "4 of 4 NaN or Inf gradients begin at\na"
    ax = plots.overflowing_variables(Run([overflows_of({}, {})], header))
    assert ax.get_title(loc="left") == "Variables with NaN or Inf gradients"
    assert texts_of(ax.texts) == ["No gradient was NaN or Inf."]


def test_only_the_worst_variables_are_drawn_and_the_label_has_their_number():
    run = Run([overflows_of({f"v{number}": number for number in range(1, 13)}, {"v3": 1})])
    ax = plots.overflowing_variables(run, top=3)
    assert texts_of(ax.get_yticklabels()) == ["v3", "v12", "v11"]
    assert ax.get_ylabel() == "variable (the worst 3 of 12)"
    for top in (0, -1):
        with pytest.raises(ValueError, match="top"):
            plots.overflowing_variables(run, top=top)


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (
            ["resnet50/conv5_block3_out/conv5_block3_3_conv/kernel"],
            ["resnet50/…/conv5_block3_3_conv/kernel"],
        ),
        (
            ["a_layer_with_a_very_long_name_of_a_model_1/kernel"],
            ["a_layer_with…_name_of_a_model_1/kernel"],
        ),
        ([f"network/block_{i}/convolution_layer/kernel" for i in "12"],)
        * 2,  # would be equal, so they are longer
        (
            [f"{'x' * 90}{i}{'x' * 90}" for i in "12"],
            [f"{'x' * 15}…{'x' * 32}{n}" for n in ("", "#2")],
        ),
    ],
)
def test_long_paths_keep_both_ends_and_stay_unique(paths, names):
    ax = plots.overflowing_variables(Run([overflows_of(dict.fromkeys(paths, 1), {paths[0]: 1})]))
    assert texts_of(ax.get_yticklabels()) == names
    assert ax.get_title(loc="left").startswith("1 of 1 overflows begin at\n")


def test_names_are_drawn_literally():
    variables = {"$x_{$/kernel": 2, "a\x1b[2J\u202e": 1}
    bars = plots.overflowing_variables(Run([overflows_of(variables, variables)]))
    assert texts_of(bars.get_yticklabels()) == [r"\$x_{\$/kernel", r"a\x1b[2J\u202e"]
    lines = plots.metric({"$r_{$": Run([Record(step=9, metrics={"$x_{$": 0.5})])}, "$x_{$")
    assert lines.get_title(loc="left") == r"\$x_{\$ at the end: 0.5"
    for ax in (bars, lines):
        ax.figure.canvas.draw()  # mathtext would raise


@pytest.mark.parametrize(
    ("draw", "reason", "rows"),
    [
        (plots.exponents_over_steps, "No gradients were sampled.", []),
        (plots.layer_errors, "No batch was compared with float32.", []),
        (plots.loss_scale, "No loss scale was recorded.", []),
        (plots.what_if, "No finite gradients were sampled.", []),
        (plots.what_if, "No finite gradients were sampled.", [sample(10, nan=4)]),
        (plots.overflowing_variables, "Overflows were not counted by variable.", []),
        (plots.overflowing_variables, "No overflow.", [overflows_of({}, {})]),
    ],
)
def test_run_without_records_is_an_empty_figure_with_a_reason(draw, reason, rows):
    for ax in (draw(Run(rows)), draw(Run([*rows, Record(step=1, last_loss=0.5)]))):
        assert texts_of(ax.texts) == [reason]
        assert not ax.lines
        assert not ax.patches
        assert ax.get_xticks().size == ax.get_yticks().size == 0
        assert ax.get_xlabel()
        assert ax.get_ylabel()


LONG_NAMES = [
    "encoder_of_images/block_1/convolution_2/kernel",
    "a_layer_with_a_very_long_name_of_a_model_1/kernel",
]
FULL = Run(
    [
        *(
            sample(10),
            sample(20),
            Record(step=20, loss_scale=8.0, overflow_rate=0.1, overflow_count=2),
        ),
        compared((1.2, 1.2), (1.2, 1e-4), output_error=1.2),
        Record(step=9, fallback=["net/layer_0"]),
        overflows_of(dict.fromkeys(LONG_NAMES, 2000), {LONG_NAMES[0]: 2000}, step=20),
    ]
)
FIGURES = [name for name in plots.__all__ if name not in ("metric", "save")]


def drawn_of(name, run, ax=None):
    return getattr(plots, name)(run.histograms[0] if name == "gradient_exponents" else run, ax=ax)


@pytest.mark.parametrize(
    ("name", "run"),
    [*((name, FULL) for name in FIGURES), ("exponents_over_steps", Run([sample(10)]))],
)
def test_plots_use_the_given_axes_and_fit_a_small_figure(name, run):
    figure, ax = plt.subplots(figsize=(5.2, 3.6), layout="constrained")
    assert drawn_of(name, run, ax) is ax
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    texts = [child for child in ax.get_children() if isinstance(child, Text)]
    for artist in filter(None, [*texts, ax.get_legend(), ax.xaxis.label, ax.yaxis.label]):
        box = artist.get_window_extent(renderer)
        assert min(box.x0, box.y0) >= 0
        assert (box.x1 <= figure.bbox.x1, box.y1 <= figure.bbox.y1) == (True, True)
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
    with pytest.raises(TypeError, match="`ax` must be axes of matplotlib.*Received: ax=3"):
        plots.save(3, tmp_path / "figure.png")
    with pytest.raises(
        TypeError, match="`path` must be the path of the PNG file. Received: path=3"
    ):
        plots.save(plots.gradient_exponents(histogram()), 3)


@pytest.mark.parametrize("name", FIGURES)
def test_arguments_of_another_type_are_errors(name):
    with pytest.raises(TypeError, match="must be a kmp.records"):
        getattr(plots, name)("runs/first")
    with pytest.raises(
        TypeError, match=r"`ax` must be axes of matplotlib, or None for new ones. Received: ax=3"
    ):
        drawn_of(name, FULL, ax=3)
