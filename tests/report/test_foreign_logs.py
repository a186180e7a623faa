"""Logs that kmp did not write, or that were changed.

Each is refused with file and line, or everything accepts it.
"""

import copy
import json
import os
import re
import sys
from dataclasses import replace

import matplotlib.pyplot as plt
import pytest
from built_runs import make_replay, sample_from
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

import kmp
from kmp import plots, report
from kmp.__main__ import main
from kmp.records import Header, Record, Settings
from kmp.records.compact_sample import compact
from kmp.records.jsonl import to_line
from kmp.records.log_schema import SCHEMA
from kmp.records.replay import GradientError, LayerError, NonfiniteOperation

EXAMPLES = int(os.environ.get("KMP_FUZZ_EXAMPLES", "100"))

VARIABLE = {
    **{"zero": 3, "first": -20, "counts": [5, 8, 2], "amax": 2.0**-17, "norm": 1e-5},
    **{"weight_norm": 2.0, "update_norm": 0.01, "updates": 18, "lost_updates": 4},
}
VARIABLES = {
    "a/kernel": VARIABLE,
    "b/kernel": VARIABLE | {"first": -30, "amax": 2.0**-27},
    "c/bias": VARIABLE,
}
SAMPLE = sample_from(1, 1024.0, VARIABLES)
ENCODED, ENCODED_AT_1000 = (
    json.loads(json.dumps(compact(sample)))
    for sample in (SAMPLE, replace(SAMPLE, loss_scale=1000.0))
)
WITHOUT_NAMES = {key: value for key, value in ENCODED.items() if key != "names"}
SETTINGS = {
    **{
        "rule": "DynamicScale",
        "initial_scale": 1024.0,
        "growth_interval": 100,
        "growth_factor": 2.0,
    },
    **{
        "backoff_factor": 0.5,
        "hysteresis": 1,
        "min_scale": 2.0**-14,
        "max_scale": 2.0**127,
        "model": "m",
    },
    **{"layers": {"a": "Dense"}, "compute_dtypes": ["float16"], "float32_variables": ["c/bias"]},
    **{"optimizer": "Adam", "parameters": 36},
}
COUNTERS = {
    **{
        "overflow_count": 1,
        "overflow_rate": 0.1,
        "nonfinite_loss_count": 1,
        "overflows_in_a_row": 0,
        "last_loss": 0.5,
    },
    **{
        "nonfinite_losses_in_a_row": 0,
        "overflows_by_variable": {"a/kernel": 1},
        "highest_loss": 3.0,
    },
    **{"overflow_origins_by_variable": {"a/kernel": 1}, "overflow_origin": "a/kernel"},
}
FAILED = make_replay(
    *(8, 1024.0, None, 1.0, False, True),
    **{
        "usable_scale": 1024.0,
        "flushed": {"a/kernel": 0.5},
        "zero": ["c/bias"],
        "float32_layers": ["a"],
    },
    operations=[
        NonfiniteOperation("a", "Exp", "float16", "inf", 12.0, 1.0, None, is_backward=False)
    ],
    **{"outputs": ["a"], "of_activations": {"a": 2.0}},
)
COMPARED = make_replay(
    *(8, 1024.0, 1.0, 1.0, True, True),
    **{"float32_layers": ["a"], "output_error": 0.5},
    layer_errors=[LayerError("a", 0.5, 0.4), LayerError("m", 0.5)],
    gradient_errors=[GradientError("a", 0.5, 0.5, 2.0, 0.1)],
)
REPLAY, COMPARISON = (
    json.loads(to_line(Record(step=22, replay=replay)))["replay"] for replay in (FAILED, COMPARED)
)
LOG = [
    {
        "schema": SCHEMA,
        "kind": "header",
        "started": "2026-11-01",
        "keras": "3.15.1",
        "settings": SETTINGS,
    },
    {"step": 1, "loss_scale": 1024.0, "clean_steps": 1},
    {"step": 1, **COUNTERS},
    {"step": 1, "grad_zeros": 0.2, "grad_norm": None, "sample": ENCODED},
    {"step": 1, "reference": WITHOUT_NAMES},
    {"step": 20, **COUNTERS, "overflow_count": 18, "overflows_in_a_row": 15},
    {"step": 20, "loss_scale": 1000.0, "later_key": 5},
    {"step": 20, "sample": ENCODED_AT_1000},
    {"step": 21, "reference": ENCODED},
    {"step": 22, "replay": REPLAY},
    {"step": 22, "fallback": ["a"], "fallback_reason": "why"},
    {"step": 23, "replay": COMPARISON},
]

VALUES = st.sampled_from(
    [
        *(
            None,
            True,
            [],
            {},
            "",
            "nan",
            [[[]]],
            {"a": {"a": {}}},
            [1] * 300,
            "a" * 5000,
            {"": 1},
            ["float16"],
        ),
        *(
            0,
            1,
            -1,
            2,
            14,
            15,
            280,
            2**31,
            2**36 - 1,
            2**48 - 1,
            2**53,
            2**63 - 1,
            2**63,
            10**400,
            -(10**30),
        ),
        *(0.0, -0.0, 0.5, 1.5, -1.5, 1e-320, 2.0**-149, 1e-45, 3e38, 1e39, 1e100, 1e308, -1e308),
        *(
            float("nan"),
            float("inf"),
            "\x1b[2J",
            "\u202e",
            "\0",
            "\ud800",
            "$x_{$",
            "a/kernel",
            "float32",
        ),
        *(
            SETTINGS,
            REPLAY,
            ENCODED,
            ENCODED["bins"],
            ENCODED["counts"],
            ENCODED["norm"],
            ENCODED["updates"],
            "AAAA",
        ),
        "FixedScale",
    ]
)
INTEGERS = st.sampled_from([0, 1, 2, 5, 14, 40, 277, 2**31, 2**36 - 1, 2**48 - 1])
FLOATS = st.sampled_from([0.0, 1e-320, 2.0**-149, 2.0**-14, 0.3, 1.0, 7e4, 1e10, 3e38, 1e100])
STRINGS = st.sampled_from(
    [
        "",
        "\x1b[2J",
        "\u202e",
        "$x_{$",
        "a/kernel",
        "the batch's x",
        "the loss function",
        "FixedScale",
    ]
)
SAME_TYPE = {int: INTEGERS, float: FLOATS, str: STRINGS}
KEYS = st.sampled_from(
    ["\x1b]0;", "later", "", "$", "sample", "loss_scale", "\u202e", "x" * 5000, "step"]
)


def containers(value):
    """Yields all dictionaries and lists in a value."""
    if isinstance(value, dict | list) and value:
        yield value
    for item in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        yield from containers(item)


@st.composite
def changed_logs(draw):
    """Draws the bytes of a log with some values, keys or bytes replaced, removed or inserted."""
    log = [
        copy.deepcopy(line)
        for line in (LOG[0], *draw(st.lists(st.sampled_from(LOG[1:]), max_size=8)))
    ]
    for _ in range(draw(st.integers(0, 4))):
        container = draw(st.sampled_from([*containers(log)] or [LOG.copy()]))
        key = draw(
            st.sampled_from(
                sorted(container) if isinstance(container, dict) else range(len(container))
            )
        )
        change = draw(
            st.sampled_from(["vary", "vary", "vary", "vary", "remove", "replace", "insert"])
        )
        if change == "vary":
            container[key] = draw(SAME_TYPE.get(type(container[key]), st.just(container[key])))
        elif change == "remove":
            del container[key]
        elif change == "replace":
            container[key] = copy.deepcopy(draw(VALUES))
        elif isinstance(container, dict):
            container[draw(KEYS)] = copy.deepcopy(draw(VALUES))
        else:
            container.insert(key, copy.deepcopy(draw(VALUES)))
    data = b"".join(json.dumps(line).encode() + b"\n" for line in log)
    for _ in range(draw(st.sampled_from([0] * 9 + [1, 2]))):
        start = draw(st.integers(0, len(data)))
        data = data[:start] + draw(st.binary(max_size=3)) + data[start + draw(st.integers(0, 3)) :]
    return data


def is_shown_safely(text):
    return all(line.isprintable() for line in text.split("\n"))


def attempted(function, argument):
    """Returns the result of a function and no message, or the message of its `ValueError`."""
    try:
        return function(argument), ""
    except ValueError as error:
        return None, str(error)


def assert_refused_with_its_line_or_used(file, data, draws):
    """Loads the log and, if that succeeds, uses it in every way."""
    file.write_bytes(data)
    run, refusal = attempted(kmp.load_run, file)
    if refusal:
        assert re.match(rf"{re.escape(str(file))}:\d+: .", refusal)
        assert is_shown_safely(refusal)
        assert len(refusal) < 600
        return
    run.table()
    assert is_shown_safely(str(kmp.advise(run)))
    assert re.fullmatch(
        "(The run has no sample of finite gradients.*)?", attempted(kmp.what_if, run)[1]
    )
    console = Console(width=80, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(report.summary({"run": run}))
    assert is_shown_safely(capture.get())
    assert is_shown_safely(report.html({"run": run}))
    if draws:
        for name in (
            "exponents_over_steps",
            "layer_errors",
            "loss_scale",
            "overflowing_variables",
            "what_if",
        ):
            assert getattr(plots, name)(run).get_xlabel()
        plt.close("all")


def fuzz(examples):
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(
        max_examples=examples, derandomize=True, deadline=None, suppress_health_check=checks
    )


@fuzz(EXAMPLES // 4)
@given(changed_logs())
def test_changed_log_is_refused_with_its_line_or_reported(tmp_path, without_figures, data):
    assert_refused_with_its_line_or_used(tmp_path / "kmp.jsonl", data, draws=False)


@pytest.mark.exhaustive
@fuzz(EXAMPLES)
@given(changed_logs())
def test_each_of_many_changed_logs_is_refused_or_reported(tmp_path, without_figures, data):
    assert_refused_with_its_line_or_used(tmp_path / "kmp.jsonl", data, draws=False)


@fuzz(max(5, EXAMPLES // 20))
@given(changed_logs())
def test_changed_log_is_refused_with_its_line_or_drawn(tmp_path, data):
    assert_refused_with_its_line_or_used(tmp_path / "kmp.jsonl", data, draws=True)


def test_unchanged_log_loads_and_unknown_keys_are_ignored(tmp_path, without_figures):
    file = tmp_path / "kmp.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in LOG))
    loaded = kmp.load_run(file)
    assert [{*json.loads(to_line(row))} for row in loaded.rows] == [
        {*line} - {"later_key"} for line in LOG[1:]
    ]
    assert [sample.names for sample in (*loaded.samples, *loaded.references)] == [SAMPLE.names] * 4
    assert_refused_with_its_line_or_used(file, file.read_bytes(), draws=True)
    row = {"step": 1, "later": 2.5, "large": 10**400, "deep": [[{}]]}
    header = {
        "schema": SCHEMA,
        "kind": "header",
        "torch": "2.9",
        "settings": {"model": "m", "later": ["a"]},
    }
    file.write_text(json.dumps(header) + "\n" + json.dumps(row) + "\n")
    run = kmp.load_run(tmp_path)
    assert (run.rows, run.header) == ([Record(step=1)], Header(settings=Settings(model="m")))


# On Python 3.14, msgspec reads all of the brackets.
TOO_DEEP = (
    "Input data was truncated"
    if sys.version_info >= (3, 14)
    else "maximum recursion depth exceeded"
)
REFUSED_RECORDS = [
    ('{"loss": 1}', "Object missing required field `step`"),
    ('{"step": 1, "last_loss": NaN}', "JSON is malformed: invalid character (byte 25)"),
    ('{"step": 5, "overflow_count": "many"}', "Expected `int`, got `str` - at `$.overflow_count`"),
    (f'{{"step": 1, "last_loss": 1{"0" * 400}}}', "Number out of range - at `$.last_loss`"),
    (
        '{"step": 5, "loss_scale": 0.0}',
        "Expected `float` >= 1.401298464324817e-45 - at `$.loss_scale`",
    ),
    (
        '{"step": 5, "overflows_by_variable": {"a": -1}}',
        "Expected `int` >= 0 - at `$.overflows_by_var",
    ),
    ('{"step": 5, "x": ' + "[" * 99999, TOO_DEEP),
    ('{"step": 5, "overflow_origin": "\udcff"}', ""),  # versions of msgspec say it in other words
]
HEADER = f'{{"schema": {SCHEMA}, "kind": "header"}}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", None),
        ("\n", ":1: Input data was truncated"),
        ('{"step": 1}', ":1: Object missing required field `schema`"),
        ('{"kind": "header", "schema": 99}', ":1: Expected `int` <= 1 - at `$.schema`"),
        (
            '{"kind": "header", "schema": 1, "settings": {"compute_dtypes": [1]}}',
            ":1: Expected `str`, got `int` - at",
        ),
        ("epoch,loss", ":1: JSON is malformed"),
        *((HEADER + text, f":2: {message}") for text, message in REFUSED_RECORDS),
    ],
)
def test_refused_log_is_one_line_with_file_line_and_key(tmp_path, capsys, text, message):
    file = tmp_path / "kmp.jsonl"
    file.write_bytes(text.encode(errors="surrogateescape") + b"\n" * bool(text))
    assert main(["report", str(tmp_path)]) == bool(message)
    assert (tmp_path / "report.html").exists() == (not message)
    printed = capsys.readouterr()
    if message:
        assert printed.out == ""
        assert re.fullmatch(re.escape(f"kmp: {file}{message}") + ".*\n", printed.err)
