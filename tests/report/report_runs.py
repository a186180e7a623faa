"""Runs for the tests of reports, and what a report of them shows."""

import math
import re
from contextlib import contextmanager
from html import unescape

import msgspec
import pytest
from built_runs import sample_from
from rich.console import Console

from kmp import report
from kmp.advice import Advice, ComputeInFloat32, Finding
from kmp.records import Header, Record, Replay, Run, Settings
from kmp.records.jsonl import to_line
from kmp.records.replay import Comparison, GradientError, LayerError
from kmp.report.figures import figures
from kmp.report.run_summary import RunSummary

NAMES = ("m/first/kernel", "m/first/bias", "m/last/kernel")
SETTINGS = Settings(
    rule="FixedScale",
    initial_scale=16.0,
    model="m",
    optimizer="Adam",
    compute_dtypes=["float16", "float32"],
    parameters=12345,
)
FINDING = Finding(
    "precision_loss",
    "error",
    "The title of a finding.",
    "measured in m/first/kernel",
    [ComputeInFloat32("norm", "RMSNormalization"), ComputeInFloat32("pool", "MaxPooling2D")],
    note="An alternative.",
    tried="the gradients are finite with it",
)


def bells(step, names=NAMES, lowest=-30, loss_scale=16.0, inf=0):
    """Returns a sample with bell-shaped counts, six exponents higher in each next variable."""
    variables = {}
    for index, name in enumerate(names):
        first = lowest + 6 * index
        variables[name] = {
            "norm": 0.5,
            "weight_norm": 2.0,
            "update_norm": 0.002,
            "updates": 200,
            "lost_updates": 50,
            "first": first,
            "counts": [int(1 + 1000 * math.exp(-(((bin - 11) / 4) ** 2))) for bin in range(23)],
            "zero": 500 * index,
            "inf": inf,
            "amax": math.inf if inf else 2.0 ** (first + 23),
        }
    return sample_from(step, loss_scale, variables)


def record_of(sample):
    return Record(step=sample.step, grad_zeros=0.125, grad_norm=0.75, sample=sample)


def header_of(**settings):
    settings = msgspec.structs.replace(SETTINGS, **settings)
    return Header(started="2026-11-01T10:00:00+00:00", keras="3.15.1", settings=settings)


def healthy_run(names=NAMES, skipped=0, lowest=-10, steps=300, **settings):
    """Returns a run with a sample in each 50th step, at a fixed loss scale: 16 by default.

    The last variable is the overflow origin of the skipped steps.
    """
    run = Run([], header_of(**settings))
    scale = run.settings.initial_scale
    for step in range(10, steps + 1, 10):
        run.append(Record(step=step, loss_scale=scale))
        count = skipped * step // steps
        counters = Record(
            step=step,
            overflow_count=count,
            nonfinite_loss_count=0,
            overflows_by_variable=dict.fromkeys(names, count) if count else {},
            overflow_origins_by_variable={names[-1]: count} if count else {},
            overflow_origin=names[-1] if count else None,
            last_loss=3 / step,
        )
        run.append(counters)
        if step % 50 == 0:
            run.append(record_of(bells(step, names, lowest, scale)))
    return run


def underflowing_run(**arguments):
    """Returns a run whose first variables underflow in float16."""
    return healthy_run(lowest=-30, **arguments)


def run_in(*dtypes, **arguments):
    """Returns a run whose layers compute in these dtypes, without a loss scale."""
    return healthy_run(compute_dtypes=list(dtypes), initial_scale=1.0, **arguments)


def compared_run(layers=("m/first", "m/last"), **arguments):
    """Returns a run with a comparison in which the error begins in the last layer, an LSTM."""
    errors = [LayerError(layer, 0.002, 0.0005) for layer in layers[:-1]]
    errors += [LayerError(layers[-1], 1.25, 1.5), LayerError("m", 1.25)]
    cells = [
        GradientError(f"{layers[-1]}/cell_1", 1.5, 0.5, 1.0, 0.1),
        GradientError(f"{layers[-1]}/cell_0", 0.5, 0.5, 1.0, 0.1),
    ]
    compared = Comparison(1.25, errors, cells)
    run = healthy_run(layers=dict.fromkeys(layers, "LSTM"), **arguments)
    run.append(Record(step=300, replay=Replay(32, 16.0, 1.0, 1.0, True, True, comparison=compared)))
    return run


NOT_COUNTED = Run([Record(step=5, loss_scale=8.0)])
COUNTED = Run([Record(step=5, overflow_count=0)], header_of())
OVERFLOWED = Run([record_of(bells(50, inf=3))], header_of())


def three_runs():
    return {
        "float32": run_in("float32"),
        "float16": healthy_run(lowest=-40),  # most elements are subnormal
        "bfloat16": run_in("bfloat16", "float32"),
    }


def with_metrics(run, **values):
    """Returns the run with metrics at the ends of three epochs, these values in the last."""
    for epoch in (1, 2, 3):
        metrics = {name: value * epoch / 3 for name, value in values.items()}
        metrics["learning_rate"] = 0.1
        run.append(Record(step=100 * epoch, epoch=epoch - 1, metrics=metrics))
    return run


def write_log(folder, run):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kmp.jsonl").write_text("".join(map(to_line, [run.header, *run.rows])))
    return folder


def advised(name, run, *findings):
    """Returns the summary of a run with these findings, whatever the diagnosis finds."""
    summary = RunSummary(name, run)
    summary.advice = Advice(findings, f"The verdict of {name}: its evidence.")
    return summary


def normalized(text):
    return " ".join(text.split())


def assert_in_order(text, *parts):
    position = 0
    for part in map(normalized, parts):
        assert part in text[position:]
        position = text.index(part, position) + len(part)


def printed(summary):
    """Returns what a terminal of 80 columns shows."""
    console = Console(width=80, no_color=True, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(summary)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


@contextmanager
def undrawn():
    """Draws nothing in a report, which takes most of the time that it takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kmp.report.figures._svg", lambda *_: "data:,")
        yield


class Page:
    """What a page shows: its text without tags, its folded parts, and texts of figures."""

    def __init__(self, html):
        self.html = html
        self.text = normalized(unescape(re.sub("<[^>]*>", " ", html.replace("<wbr>", ""))))
        self.folded = re.findall("<summary>(.*?)</summary>", html)
        self.alts = [unescape(alt) for alt in re.findall('alt="(.*?)"', html)]


def page_of(**runs):
    """Returns the page of these runs, with figures that are not drawn."""
    with undrawn():
        return Page(report.html(runs))


def figures_of(run):
    """Returns the figures of a run, which are not drawn."""
    with undrawn():
        return figures(RunSummary("first", run))
