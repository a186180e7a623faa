import html as html_module
import io
import math
import os
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import keras
import matplotlib as mpl
import matplotlib.pyplot as plt
import msgspec
import numpy as np
import pytest
import tensorflow as tf
from conftest import compiled_model, file_size_limit, fit, make_replay, sample_from, without_replays
from msgspec import UNSET
from rich.console import Console

import kmp
from kmp import report
from kmp.callbacks import Monitor
from kmp.callbacks.report_writer import ReportWriter
from kmp.records import BIN_COUNT, Header, Record, Run, Settings
from kmp.records.exponent_histogram import ZERO_BIN
from kmp.records.jsonl import to_line
from kmp.records.replay import GradientError, LayerError
from kmp.report.run_comparison import comparison, difference
from kmp.report.run_summary import RunSummary
from kmp.report.run_tables import gradients, layer_errors, other_scales, overflow_and_underflow
from kmp.report.texts import number, share

GOLDEN = Path(__file__).parent / "golden"
LONG = "encoder/" + "block_with_a_very_long_layer_name_in_it_" * 3 + "/kernel"


def sample(
    step, names=("m/first/kernel", "m/first/bias", "m/last/kernel"), shift=0, loss_scale=16.0, inf=0
):
    """Returns a sample with bell-shaped counts, at larger exponents in each next variable."""
    bell = [int(1 + 1000 * math.exp(-(((index - 11) / 4) ** 2))) for index in range(23)]
    columns = {
        "norm": 0.5,
        "weight_norm": 2.0,
        "update_norm": 0.002,
        "updates": 200,
        "lost_updates": 50,
    }
    variables = {}
    for index, name in enumerate(names):
        first = -30 + 6 * index + shift
        variables[name] = columns | {
            "first": first,
            "counts": bell,
            "zero": 500 * index,
            "inf": inf,
        }
        variables[name]["amax"] = math.inf if inf else 2.0 ** (first + 23)
    return sample_from(step, loss_scale, variables)


def record_of(taken):
    return Record(step=taken.step, grad_zeros=0.125, grad_norm=0.75, sample=taken)


def header(**settings):
    defaults = Settings(
        rule="FixedScale",
        initial_scale=16.0,
        model="m",
        optimizer="Adam",
        compute_dtypes=["float16", "float32"],
        parameters=12345,
    )
    settings = msgspec.structs.replace(defaults, **settings)
    return Header(started="2026-11-01T10:00:00+00:00", keras="3.15.1", settings=settings)


def make_run(
    names=("m/first/kernel", "m/first/bias", "m/last/kernel"),
    skipped=0,
    shift=0,
    steps=300,
    **settings,
):
    """Returns a run at a fixed scale, of 16 unless the settings have another.

    In float16 it underflows, skips steps, or is healthy with a large `shift`.
    """
    rows, scale = [], settings.get("initial_scale", 16.0)
    for step in range(10, steps + 1, 10):
        count = skipped * step // steps
        counters = Record(
            step=step,
            overflow_count=count,
            overflow_rate=count / step,
            nonfinite_loss_count=0,
            overflows_in_a_row=0,
            overflows_by_variable=dict.fromkeys(names, count) if count else {},
            overflow_origins_by_variable={names[-1]: count} if count else {},
            overflow_origin=names[-1] if count else None,
            last_loss=3 / step,
        )
        rows += [Record(step=step, loss_scale=scale, clean_steps=step), counters]
        if step % 50 == 0:
            rows.append(record_of(sample(step, names, shift, scale)))
    return Run(rows, header(**settings))


def make_compared_run(layers=("m/first", "m/last"), **arguments):
    """Returns a run with a comparison in which the error begins in the last layer."""
    errors = [LayerError(layer, 0.002, 0.0005) for layer in layers[:-1]]
    errors += [LayerError(layers[-1], 1.25, 1.5), LayerError("m", 1.25)]
    of_gradients = [
        GradientError(f"{layers[-1]}/cell_{index}", 0.5 + index, 0.5, 1.0, 0.1) for index in (1, 0)
    ]
    values = {"output_error": 1.25, "layer_errors": errors, "gradient_errors": of_gradients}
    run = make_run(shift=20, layers=dict.fromkeys(layers, "LSTM"), **arguments)
    run.append(Record(step=300, replay=make_replay(32, 16.0, 1.0, 1.0, True, True, **values)))
    return run


def make_run_without_scale(*dtypes, **arguments):
    """Returns a run whose layers compute in these dtypes, with the loss scale that they get."""
    return make_run(shift=20, compute_dtypes=list(dtypes), initial_scale=1.0, **arguments)


def make_three_runs():
    return {
        "float32": make_run_without_scale("float32"),
        "float16": make_run(),
        "bfloat16": make_run_without_scale("bfloat16", "float32"),
    }


def write_log(folder, run):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kmp.jsonl").write_text("".join(map(to_line, [run.header, *run.rows])))
    return folder


def printed(runs):
    console = Console(width=80, no_color=True, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(report.summary(runs))
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def text_of(page):
    """Returns the text of a page, without its tags."""
    return normalized(html_module.unescape(re.sub("<[^>]*>", " ", page.replace("<wbr>", ""))))


def values_of(page, *attributes):
    """Returns the values of these attributes in all tags, without links within the page."""
    values = re.findall(rf'<[^>]* (?:{"|".join(attributes)})="([^"#][^"]*)"', page)
    return [html_module.unescape(value) for value in values]


def loaded_by(page):
    return values_of(page, "src", "srcset", "data", "poster", "href")


@pytest.fixture(scope="module")
def page_of_one():
    """The run of a page, and the page."""
    run = make_run(skipped=60)
    return run, report.html({"first": run})


def files_in(folder):
    return [file.name for file in folder.iterdir()]


def normalized(text):
    return " ".join(text.split())


SUMMARIES = {
    "one": lambda: {"first": make_run()},
    "three": make_three_runs,
    "empty": lambda: {"empty": Run()},
}


@pytest.mark.parametrize("name", SUMMARIES)
def test_summary_matches_the_golden_file(name):
    text, golden = printed(SUMMARIES[name]()), GOLDEN / f"report_{name}.txt"
    if os.environ.get("KMP_WRITE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()
    assert max(map(len, text.splitlines())) <= 80


def test_summary_shows_long_names_and_markup_literally():
    run = make_run(names=(LONG, "m/last/[blue]"), skipped=60)
    run.rows[-2].overflow_origin = LONG
    text = printed({"[red]a-run-with-a-name-that-is-longer-than-one-line[/red]" * 2: run})
    assert max(map(len, text.splitlines())) <= 80
    assert LONG in re.sub(r"\s", "", text)
    assert "…" not in text
    assert "[red]a-run" in text
    assert "m/last/[blue]" in text


def test_page_has_verdict_findings_figures_tables_and_settings_in_this_order(page_of_one):
    run, text = page_of_one
    advice, page = kmp.advise(run), text_of(text)
    assert len(advice) >= 1
    tables = [
        "Counts",
        "Figures",
        "Gradients by layer",
        "Overflow and underflow by variable",
        "Other loss scales",
    ]
    parts = [
        advice.verdict,
        "Findings",
        *(f"{i}. {finding.title}" for i, finding in enumerate(advice, 1)),
        *tables,
    ]
    positions = [page.index(normalized(part)) for part in [*parts, "Settings"]]
    assert positions == sorted(positions)
    for finding in advice:
        assert normalized(finding.evidence) in page
        assert normalized(finding.change) in page
    head, *folded = text.split("<details>")
    assert advice[0].change in html_module.unescape(head)
    assert [re.search("<summary>(.*?)</summary>", part)[1] for part in folded] == [
        *tables,
        "Settings",
    ]


def test_page_loads_no_resources_runs_no_scripts_and_its_figures_have_text_alternatives(
    page_of_one,
):
    _, page = page_of_one
    loaded = loaded_by(page)
    assert len(loaded) == 5
    assert all(url.startswith("data:image/svg+xml;base64,") for url in loaded)
    assert not {"script", "link", "iframe", "object", "base"} & set(re.findall(r"<(\w+)", page))
    assert not any(part in page for part in ("url(", "@import"))
    scale, exponents, gradients, what_if, variables = values_of(page, "alt")
    assert (
        scale
        == "The loss scale over the training steps, 2^4 at the end; 60 of 300 steps were skipped."
    )
    assert "step 300" in exponents
    assert gradients == "The gradients' binary exponents in 6 samples, from step 50 to 300."
    assert "Recommended: 2^" in what_if
    origin = "m/last/kernel was the overflow origin in 100% of those with a finite loss."
    assert variables == f"Skipped steps by variable; {origin}"


def test_page_is_reproducible_and_leaves_matplotlib_as_it_was(page_of_one):
    before, open_figures = dict(mpl.rcParams), plt.get_fignums()
    assert report.html({"first": page_of_one[0]}) == page_of_one[1]
    assert (dict(mpl.rcParams), plt.get_fignums()) == (before, open_figures)


def test_comparison_with_float32_follows_the_findings_of_a_run_that_has_one(without_figures):
    title = "Difference from float32, layer by layer"
    run = make_compared_run()
    page = report.html({"first": run})
    positions = [
        text_of(page).index(normalized(part))
        for part in (kmp.advise(run)[0].evidence, title, "Counts")
    ]
    assert positions == sorted(positions)
    alts = values_of(page, "alt")
    assert (
        alts[0]
        == "Errors of 3 layers in step 300; the outputs of the model differ from float32 by 1.25; a"
        " harmful error begins at m/last, which adds 1.5."
    )
    assert len(alts) == 5
    of_two = report.html({"first": run, "second": make_run()})
    assert text_of(of_two).count(title) == 1
    assert len([alt for alt in values_of(of_two, "alt") if alt.startswith("Errors of")]) == 1


WORDS_OF_FLOAT16 = ("subnormal", "underflow", "Underflow", "loss scale", "Loss scale", "scaled")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("skipped", [0, 30])
def test_report_of_another_format_does_not_speak_of_float16(dtype, skipped):
    run = make_run_without_scale(dtype, skipped=skipped)
    page = report.html({"first": run})
    for text in (text_of(page), " ".join(values_of(page, "alt")), printed({"first": run})):
        assert not [word for word in WORDS_OF_FLOAT16 if word in text]
        assert not re.search("(?<!b)float16", text)
    assert "NaN and Inf by variable" in text_of(page)
    # The exponents of the newest sample and over the steps; and the variables with NaN or Inf.
    assert len(values_of(page, "alt")) == (3 if skipped else 2)
    assert ("30 30" in text_of(page)) == bool(skipped)
    assert "rule" not in dict(RunSummary("first", run).settings)


def test_float32_run_is_compared_with_nothing():
    runs = {"first": make_compared_run(compute_dtypes=["float32"], initial_scale=1.0)}
    assert "Difference from float32" not in text_of(report.html(runs))
    assert "differ from float32" not in printed(runs)


def test_scale_related_figures_of_several_runs_are_those_of_runs_with_a_loss_scale(without_figures):
    alone = {"a": make_run_without_scale("float32"), "b": make_run_without_scale("bfloat16")}
    text = text_of(report.html(alone))
    assert "Gradients, side by side" in text
    assert "oss scale" not in text
    assert "Loss scale and gradients, side by side" in text_of(report.html(make_three_runs()))


def test_errors_of_layers_are_listed_with_their_gradients():
    table = layer_errors(RunSummary("first", make_compared_run()))
    assert table.columns == (
        "layer",
        "class",
        "outputs",
        "new error",
        "gradients",
        "sampling noise",
    )
    assert table.rows == (
        ("m/last", "LSTM", "1.25", "1.5", "1.5", "0.1"),  # the larger error of its two cells
        ("m/first", "LSTM", "0.002", "0.0005", "-", "-"),
        ("m", "the model", "1.25", "unknown", "-", "-"),
    )
    assert table.marked == 0
    assert table.intro.startswith("In step 300, the difference ")
    assert table.intro.endswith(
        "for 32 examples of a batch, in units of how outputs vary between examples."
    )
    of_many = layer_errors(
        RunSummary("many", make_compared_run([f"m/layer_{index}" for index in range(30)]))
    )
    assert len(of_many.rows) == 12
    assert of_many.rows[0][0] == "m/layer_29"
    assert of_many.note.endswith("19 more are not shown.")


def test_markup_control_characters_and_direction_marks_in_names_are_escaped(without_figures):
    hostile = "m/<script>alert('x')</script>\"><img src=x>\x1b[2J\u202e\u200b\n"
    run = make_compared_run(
        ("m/b", hostile), names=("m/b/kernel", f"{hostile}/kernel"), skipped=200, model=hostile
    )
    runs = {hostile: run, "other": run}
    pages = [report.html(runs), report.html({hostile: run})]
    for text in (*pages, printed(runs), printed({hostile: run}), str(kmp.advise(run))):
        assert r"\x1b[2J\u202e\u200b\n" in text
        assert all(line.isprintable() for line in text.splitlines())
    for page in pages:
        assert "<script" not in page
        assert "<img src=x" not in page
        assert "&lt;script&gt;" in page
    assert "\u2028" not in pages[0]


def test_page_of_several_runs_has_a_comparison_and_then_each_run(without_figures):
    runs = make_three_runs()
    page = report.html(runs)
    text = text_of(page)
    positions = [text.index(part) for part in ("3 runs compared", "computed in", "side by side")]
    assert positions == sorted(positions)
    # Only the run in float16 has figures of the loss scale and of others.
    assert len(loaded_by(page)) == 3 * 2 + 2
    for run in runs.values():
        assert text.count(normalized(kmp.advise(run).verdict)) >= 2


def with_metrics(run, **values):
    """Returns the run with metrics at the ends of three epochs."""
    for epoch in range(3):
        metrics = {name: value * (epoch + 1) for name, value in values.items()} | {
            "learning_rate": 0.1
        }
        run.append(Record(step=100 * (epoch + 1), epoch=epoch, metrics=metrics))
    return run


def test_metrics_come_first_and_the_one_that_differs_is_marked(without_figures):
    runs = {
        "good": with_metrics(
            make_run(shift=20), loss=0.2, steps=0.4, val_loss=0.3, val_accuracy=0.3
        ),
        "bad": with_metrics(
            make_run(shift=20), loss=0.2, steps=0.4, val_loss=0.31, val_accuracy=0.1
        ),
    }
    table, counts = comparison([RunSummary(name, run) for name, run in runs.items()])
    assert table.rows == (
        ("val_loss", "0.9", "0.93"),
        ("val_accuracy", "0.9", "0.3"),
        ("loss", "0.6", "0.6"),
        ("steps", "1.2", "1.2"),
        ("findings", "none", "none"),
    )
    assert ("steps", "300", "300") in counts.rows  # beside a metric of this name
    assert (table.marked, table.note) == (
        1,
        "The first metric that differs by more than 10 %: val_accuracy.",
    )
    page = report.html(runs)
    assert re.search(r'<tr class="marked"><th scope="row">val_accuracy', page)
    alts = values_of(page, "alt")
    assert alts[0] == "val_accuracy over the training steps; at the end 0.9 in good, 0.3 in bad."
    assert alts[1].startswith("val_loss over")
    assert "val_accuracy  " in printed({"good": runs["good"]})
    before, _, folded = page.partition("<summary>Counts compared</summary>")
    assert ("sampled steps" in before, "sampled steps" in folded) == (False, True)


@pytest.mark.parametrize(
    ("run", "status"),
    [
        (make_run(), "error"),
        (make_run(shift=20), "no problem"),
        (Run([Record(step=9)]), "unknown"),
        (
            with_metrics(make_run(shift=20, growth_interval=20, rule="DynamicScale", skipped=30)),
            "warning",
        ),
    ],
)
def test_status_is_that_of_the_worst_finding(without_figures, run, status):
    assert f'<section class="card verdict {status.replace(" ", "-")}">' in report.html({"x": run})


def test_layers_that_differ_are_listed_from_their_first_step():
    first = make_run(
        ("net/dense/kernel", "net/dense_1/kernel"),
        layers={"net/dense": "Dense", "net/dense_1": "Dense"},
    )
    names = ("net/dense_7/kernel", "net/dense_8/kernel")
    second = make_run(names, layers={"net/dense_7": "Dense", "net/dense_8": "Dense"})
    for row in second.rows:
        if row.sample is not UNSET and row.step >= 200:
            counts = row.sample.counts
            counts[1, ZERO_BIN] = 10**6
            row.sample = replace(row.sample, bin_counts=counts, bins=np.arange(BIN_COUNT))
    table = difference(RunSummary("a", first), RunSummary("b", second))
    assert table.columns == (
        "layer",
        "from step",
        "zero in a",
        "zero in b",
        "norm in a",
        "norm in b",
    )
    assert [row[:2] for row in table.rows] == [("net/dense_1", "200")]
    alike = difference(
        RunSummary("a", first), RunSummary("b", make_run(names, layers=second.settings.layers))
    )
    assert alike.note == "The gradients of a and b are alike in all sampled steps."
    assert difference(RunSummary("a", first), RunSummary("b", Run())).note.startswith(
        "No layer was sampled"
    )


def test_gradients_are_of_the_newest_sample_by_layer_and_truncated_with_a_note():
    table = gradients(RunSummary("first", make_run()))
    first, last = (dict(zip(table.columns, row, strict=True)) for row in table.rows)
    merged = sample(300).by_layer()
    assert (first["layer"], last["layer"]) == ("m/first", "m/last")
    assert first["elements"] == f"{merged['m/first'].total:,}"
    assert first["zero"] == share(merged["m/first"].zero_fraction)
    zones = merged["m/last"].zones
    assert last["subnormal"] == share(
        (zones["subnormal"] + zones["below_subnormal"]) / merged["m/last"].total
    )
    assert last["amax"] == number(2.0**5)
    assert first["norm"] == number(math.sqrt(0.5))
    assert first["update / weight"] == "0.001"
    assert first["updates lost"] == "25%"
    assert "Step 300, loss scale 2^4." in table.note
    of_many = sample_from(
        300, 16.0, {f"m/layer_{i}/kernel": {"first": -20, "counts": [5]} for i in range(50)}
    )
    table = gradients(RunSummary("x", Run([record_of(of_many)])))
    assert len(table.rows) == 40
    assert table.note.endswith("10 more are not shown.")


def test_skipped_steps_and_origins_are_counted_since_training_began_also_after_a_fallback():
    run = make_run(skipped=60, shift=20)
    middle = len(run.rows) // 2
    run.rows.insert(
        middle,
        Record(step=run.rows[middle - 1].step, fallback=["m/first"], fallback_reason="why"),
    )
    summary = RunSummary("first", run)
    assert summary.metrics.overflows < 60  # those since the fallback, of which the findings are
    counts, table = dict(summary.counts), overflow_and_underflow(summary)
    assert (counts["skipped steps"], counts["last overflow origin"]) == (
        "60 (20%)",
        "m/last/kernel",
    )
    assert table.columns == (
        "variable",
        "overflow origin",
        "overflowed",
        "underflow origin",
        "underflowed",
    )
    assert table.rows[0][:3] == ("m/last/kernel", "60", "60")
    assert {row[:3] for row in table.rows[1:]} == {
        ("m/first/kernel", "0", "60"),
        ("m/first/bias", "0", "60"),
    }
    scales = other_scales(summary)
    assert (scales.columns[-1], scales.rows[0][0], scales.rows[0][-1]) == (
        "would be skipped",
        "in use: 2^4",
        "100%",
    )
    assert scales.note.count("In the run itself, 60 of 300 steps were skipped.") == 1


def test_no_scale_is_recommended_for_gradients_that_span_more_than_float16_and_it_says_why():
    tiny = {"first": -80, "counts": [500], "amax": 2.0**-79}
    large = {"first": 0, "counts": [500], "amax": 2.0}
    taken = sample_from(10, 16.0, {"m/first/kernel": tiny, "m/last/kernel": large})
    run = Run([Record(step=10, loss_scale=16.0), record_of(taken)], header())
    note = other_scales(RunSummary("first", run)).note
    assert note.startswith(
        "No constant scale is recommended: none has at most 0.1% underflow, one bit"
    )


def test_variables_that_underflow_without_overflow_are_listed():
    table = overflow_and_underflow(RunSummary("first", make_run()))
    assert table.rows == (
        ("m/first/bias", "0", "0", "6", "6"),
        ("m/first/kernel", "0", "0", "0", "6"),
    )
    without_counts = overflow_and_underflow(RunSummary("x", Run([Record(step=5, loss_scale=8.0)])))
    assert without_counts.note.startswith("Overflows were not counted")
    none = overflow_and_underflow(RunSummary("x", UNUSUAL_RUNS["no gradients"]))
    assert none.note.startswith("No variable overflowed")


def test_settings_match_the_header_of_the_log():
    rest = {
        "learning_rate": 0.0020000000949949026,
        "in_fit": True,
        "layers": {"a": "Dense", "b": "X"},
        "promoted": [],
    }
    settings = dict(RunSummary("first", make_run(**rest)).settings)
    expected = {
        **{"learning_rate": "0.002", "in_fit": "True", "layers": "a: Dense, b: X"},
        **{"started": "2026-11-01 10:00:00+00:00", "initial_scale": "2^4", "parameters": "12,345"},
    } | {"compute_dtypes": "float16, float32"}
    assert {key: settings[key] for key in expected} == expected
    assert not {"schema", "promoted", "hysteresis"} & settings.keys()


def test_share_is_not_rounded_to_none_or_all():
    values = None, math.nan, 0.0, 1e-9, 0.125, 0.99999, 1.0
    assert [*map(share, values)] == ["unknown", "unknown", "0%", "<0.1%", "12.5%", ">99.9%", "100%"]


SCALE = Record(step=5, loss_scale=8.0)
NO_LOSS = Record(step=5, overflow_count=5, nonfinite_loss_count=5, last_loss=None)
ALL_ZERO = sample_from(5, 16.0, {"m/a/kernel": {"zero": 9, "amax": 0.0}})
ZEROS = Record(step=5, grad_zeros=0.125, grad_norm=None, sample=ALL_ZERO)
UNUSUAL_RUNS = {
    "empty": Run(),
    "header alone": Run([], header()),
    "no header": Run([SCALE]),
    "no gradients": Run([SCALE, Record(step=5, overflow_count=0, overflow_rate=0.0)], header()),
    "loss never finite": Run([NO_LOSS], header()),
    "sample of no variable": Run([Record(step=5, sample=sample_from(5, 8.0, {}))], header()),
    "sample of zeros": Run([ZEROS], header()),
    "every sample overflowed": Run([record_of(sample(5, inf=3))], header()),
    "scale not a power of two": Run([record_of(sample(5, loss_scale=1000.0))], header()),
}


@pytest.mark.parametrize("name", UNUSUAL_RUNS)
def test_reports_of_unusual_runs_are_accurate(without_figures, name):
    run = UNUSUAL_RUNS[name]
    page, verdict = report.html({name: run}), normalized(kmp.advise(run).verdict)
    assert verdict in text_of(page)
    assert verdict in normalized(printed({name: run}))
    assert 'alt=""' not in page
    if not run.samples:
        assert (
            "No gradients were sampled. Attach kmp.callbacks.defaults() to sample them."
            in text_of(page)
        )


def test_empty_run_is_compared_with_a_healthy_run(without_figures):
    runs = {"good": with_metrics(make_run(), loss=0.2), "empty": Run()}
    text = text_of(report.html(runs))
    assert "The run is empty: nothing was recorded." in text
    assert "skipped steps 0 unknown" in text


@pytest.mark.parametrize(
    ("function", "arguments", "error", "message"),
    [
        (
            report.summary,
            [3],
            TypeError,
            "`runs` must be a dictionary of runs by name, at least one. Received: runs=3",
        ),
        (
            report.html,
            [{1: Run()}],
            TypeError,
            "`runs` must be a dictionary with strings as keys. Received: runs=1",
        ),
        (
            report.html,
            [{"a": "b"}],
            TypeError,
            r"`runs\['a'\]` must be a kmp.records.Run, .*: runs\['a'\]='b'",
        ),
        (
            report.write,
            [{}, "r.html"],
            ValueError,
            "`runs` must be a dictionary of runs by name, at least one",
        ),
        (
            report.write,
            [{"first": Run()}, 3],
            TypeError,
            "`path` must be the path of the HTML file. Received: path=3",
        ),
        (report.load, ["run"], TypeError, "`paths` must be a list of paths. Received: paths='run'"),
        (report.load, [3], TypeError, "`paths` must be a list of paths. Received: paths=3"),
        (report.load, [[3]], TypeError, r"`paths` must be a list of paths. Received: paths=\[3\]"),
    ],
)
def test_wrong_arguments_are_errors(function, arguments, error, message):
    with pytest.raises(error, match=message):
        function(*arguments)


def test_loading_draws_a_progress_bar_on_a_terminal_only(tmp_path, capsys, monkeypatch):
    paths = [write_log(tmp_path / name, make_run()) for name in ("a", "b")]
    report.load(paths)
    assert capsys.readouterr() == ("", "")
    terminal = io.StringIO()
    monkeypatch.setattr(
        "kmp.report.loading.Console", lambda stderr: Console(file=terminal, force_terminal=True)
    )
    report.load(paths)
    assert "Loading" in terminal.getvalue()
    assert "100%" in terminal.getvalue()


class Name(str):
    """A name that counts how often it is compared or looked up."""

    uses = 0

    def __eq__(self, other):
        Name.uses += 1
        return str.__eq__(self, other)

    def __hash__(self):
        Name.uses += 1
        return str.__hash__(self)


def uses_of_names(variables):
    names = tuple(Name(f"m/layer_{index}/kernel") for index in range(variables))
    zero = {"zero": 9, "amax": 0.0, "norm": 1.0}
    entry = {"first": -30, "counts": [9] * 20, "amax": 2.0**-10, "norm": 1.0}
    entries = {name: zero if index < 0.9 * variables else entry for index, name in enumerate(names)}
    rows = [Record(step=step, sample=sample_from(step, 16.0, entries)) for step in (1, 2, 3)]
    counts = dict.fromkeys(names, 1)
    rows.append(Record(step=3, overflows_by_variable=counts, overflow_origins_by_variable=counts))
    Name.uses = 0
    report.html({"first": Run(rows, header(float32_variables=list(names[: variables // 3])))})
    return Name.uses


def test_look_ups_of_names_grow_linearly(without_figures):
    few, many = uses_of_names(100), uses_of_names(1000)
    assert 100 < few < many <= 11 * few


def test_runs_are_named_after_their_folders(tmp_path):
    for folder in ("a/one", "a/two", "b/two", "b/x/two"):
        write_log(tmp_path / folder, make_run(steps=10))
    shutil.copy(tmp_path / "a/one/kmp.jsonl", tmp_path / "a/other.jsonl")
    paths = ["a/one", "a/two", "b/two/kmp.jsonl", "b/x/two", "a/other.jsonl", "a/one"]
    assert list(report.load([tmp_path / path for path in paths])) == [
        *("one", "a/two", "b/two", "x/two", "other", "one#2")
    ]


def test_write_creates_the_folder_and_a_failed_one_is_an_error_and_keeps_the_previous_page(
    without_figures, tmp_path
):
    path = report.write({"first": make_run()}, tmp_path / "new" / "folder" / "r.html")
    before = path.read_text(encoding="utf-8")
    assert before == report.html({"first": make_run()})
    with (
        file_size_limit(1000),
        pytest.raises(OSError, match=r"the report cannot be written \(File too large\)") as raised,
    ):
        report.write({"other": make_run()}, path)
    assert raised.value.filename == str(path)
    assert path.read_text(encoding="utf-8") == before
    assert files_in(path.parent) == ["r.html"]


def test_callback_reports_the_completed_epochs_of_the_run_of_the_defaults(
    enabled, without_figures, tmp_path
):
    class FailInSecondEpoch(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise RuntimeError("killed")

    recorders = without_replays(every_n_steps=5, report=str(tmp_path / "r.html"))
    with pytest.raises(RuntimeError, match="killed"):
        fit(
            compiled_model(run_eagerly=True),
            [*recorders, FailInSecondEpoch()],
            batches=5,
            epochs=2,
        )
    assert len([row for row in recorders[0].run.rows if row.step == 5 and row.loss_scale]) == 1
    assert "steps 5" in text_of((tmp_path / "r.html").read_text(encoding="utf-8"))


def test_reports_take_at_most_five_percent_of_the_time(tmp_path, monkeypatch):
    written, clock = [], SimpleNamespace(now=1000.0)

    def write(runs, path):
        written.append(clock.now)
        clock.now += 2.0

    monkeypatch.setattr("kmp.callbacks.report_writer.time.monotonic", lambda: clock.now)
    monkeypatch.setattr(report, "write", write)
    run = make_run()
    writer = ReportWriter(tmp_path / "r.html", run, "model")
    for _ in range(12):
        clock.now += 10.0
        writer.end_epoch()
    assert written == [1010.0, 1052.0, 1094.0]
    writer.end()
    assert len(written) == 3  # no new record
    run.append(Record(step=301))
    writer.end()
    assert len(written) == 4


def test_report_that_cannot_be_written_warns_once_and_training_continues(tmp_path, monkeypatch):
    run = make_run()
    writer = ReportWriter(tmp_path / "r.html", run, "model")
    # As if matplotlib could not be imported.
    monkeypatch.setitem(sys.modules, "kmp.report.figures", None)
    warning = (
        r"The report .*r\.html' was not written: import of kmp.report.figures halted.*\. Training"
        r" continues"
    )
    with pytest.warns(UserWarning, match=warning):
        writer.end_epoch()
    run.append(Record(step=301))
    writer.end()  # a second warning would be an error here


def test_only_the_chief_writes(enabled, tmp_path, monkeypatch):
    monkeypatch.setattr(type(tf.distribute.get_strategy().extended), "should_checkpoint", False)
    callbacks = without_replays(tmp_path / "log", report=tmp_path / "new" / "r.html")
    fit(compiled_model(run_eagerly=True), callbacks, batches=2)
    assert files_in(tmp_path) == []


@pytest.mark.parametrize(
    ("path", "error"),
    [
        *((path, ValueError) for path in ("", "a.txt", ".html", "https://example.org/r.html")),
        (3, TypeError),
    ],
)
def test_wrong_path_of_a_report_is_an_error(path, error):
    with pytest.raises(error, match=r"`report` must be the path of a local f.*Received: report="):
        Monitor(report=path)


def test_unwritable_path_is_an_error_before_training_starts(enabled, tmp_path):
    (tmp_path / "file").write_text("")
    callbacks = without_replays(report=tmp_path / "file" / "r.html")
    with pytest.raises(OSError, match="the report cannot be written"):
        fit(compiled_model(run_eagerly=True), callbacks, batches=2)


@pytest.fixture(scope="module")
def browser():
    program = shutil.which("chromium")
    if program is None:
        without_browser = pytest.fail if os.environ.get("CI") else pytest.skip
        without_browser(
            "These tests open reports in Chromium, which is not installed. Try: apt-get install"
            " chromium"
        )
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def make_long_run():
    names = (LONG, LONG + "_2")
    return make_compared_run(
        names, names=names, skipped=60, model="<script>alert('x')</script>" + "model" * 30
    )


PAGES = {"long": lambda: {"a_run_of_a_long_name_" * 6: make_long_run()}, "three": make_three_runs}
SCREENS = {"phone": ((360, 740), "dark"), "desk": ((1280, 800), "light")}


# Elements that extend beyond their card, except in a scrollable box.
OVERFLOWING_ELEMENTS = """() => [...document.querySelectorAll('.card')].flatMap(card => {
  const box = card.getBoundingClientRect();
  return [...card.querySelectorAll('*')].filter(element => {
    const inner = element.getBoundingClientRect();
    const overflows = inner.right > box.right + 1 || inner.left < box.left - 1;
    return inner.width && overflows && !element.parentElement.closest('.scroll');
  }).map(element => element.outerHTML.slice(0, 200));
})"""


SHOWN_DETAILS = """[...document.querySelectorAll('details')].every(
  details => details.scrollHeight > details.querySelector('summary').offsetHeight + 20
)"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "screen"), [("long", "phone"), ("three", "phone"), ("three", "desk")]
)
def test_page_is_readable_in_a_browser_without_network(browser, tmp_path, name, screen):
    runs, (size, scheme) = PAGES[name](), SCREENS[screen]
    path = report.write(runs, tmp_path / "report.html")
    requests, errors = [], []
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme=scheme
    )
    context.set_offline(True)
    page = context.new_page()
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("dialog", lambda dialog: errors.append(dialog.message))
    page.goto(path.as_uri())
    text = normalized(page.inner_text("body"))
    if os.environ.get("KMP_SCREENSHOTS"):
        page.screenshot(path=f"{os.environ['KMP_SCREENSHOTS']}/{name}-{screen}.png", full_page=True)
    for run_name, run in runs.items():
        advice = kmp.advise(run)
        assert normalized(run_name) in text
        assert normalized(advice.verdict) in text
        for finding in advice:
            assert all(
                normalized(part) in text
                for part in (finding.title, finding.evidence, finding.change)
            )
    assert page.evaluate(
        "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    )
    assert page.evaluate(OVERFLOWING_ELEMENTS) == []
    if screen == "phone":  # nothing is hidden by a scroll bar
        page.evaluate(
            "document.querySelectorAll('details').forEach(details => details.open = true)"
        )
        assert page.evaluate(
            "[...document.querySelectorAll('.scroll')].every(e => e.scrollWidth <= e.clientWidth)"
        )
    images = page.evaluate(
        "[...document.images].map(i => [i.complete, i.naturalWidth > 0, i.alt.length > 0])"
    )
    expected = 0
    for run in runs.values():
        expected += 5 + bool(run.comparisons) - (not run.last("overflows_by_variable"))
        expected -= 0 if run.has_loss_scale else 2  # its curve, and other scales
    assert len(images) == expected
    assert all(all(image) for image in images)
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, re.findall(r"\d+", background)[:3])) / 3
    assert (brightness < 60) if scheme == "dark" else (brightness > 200)
    page.emulate_media(media="print")  # what is folded is printed
    assert page.evaluate(SHOWN_DETAILS)
    assert errors == []
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
    context.close()
