"""Logs that kmp did not write, or that were changed: each is refused with file and line, or everything accepts it."""

import copy
import json
import os
import re

import matplotlib.pyplot as plt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

import kmp
from kmp import plots, report
from kmp.__main__ import main
from kmp.records import SCHEMA, GradientSample, compact
from kmp.records.jsonl import to_line

EXAMPLES = int(os.environ.get("KMP_FUZZ_EXAMPLES", "200"))

VARIABLE = {
    **{"zero": 3, "inf": 0, "nan": 0, "first": -20, "counts": [5, 8, 2], "amax": 2.0**-17, "norm": 1e-5},
    **{"weight_norm": 2.0, "update_norm": 0.01, "updates": 18, "lost_updates": 4},
}
BINS = {key: VARIABLE[key] for key in ("zero", "inf", "nan", "first", "counts")}
SETTINGS = {
    **{"rule": "DynamicScale", "initial_scale": 1024.0, "growth_interval": 100, "growth_factor": 2.0},
    **{"backoff_factor": 0.5, "hysteresis": 1, "min_scale": 2.0**-14, "max_scale": 2.0**127, "model": "m"},
    **{"compute_dtypes": ["float16"], "float32_variables": ["c/bias"], "optimizer": "Adam", "parameters": 36},
}
COUNTERS = {
    **{"overflow_count": 1, "overflow_rate": 0.1, "nonfinite_loss_count": 1, "overflows_in_a_row": 0, "last_loss": 0.5},
    **{"nonfinite_losses_in_a_row": 0, "overflows_by_variable": {"a/kernel": 1}, "highest_loss": 3.0},
    **{"overflow_origins_by_variable": {"a/kernel": 1}, "overflow_origin": "a/kernel"},
}
VARIABLES = {"a/kernel": VARIABLE, "b/kernel": VARIABLE | {"first": -30, "amax": 2.0**-27}, "c/bias": VARIABLE}
WITH_UNSCALED = {name: VARIABLE | {"unscaled": BINS | {"first": -30}} for name in ("a/kernel", "c/bias")}
COMPACT, COMPACT_WITH_UNSCALED = (
    compact(GradientSample.from_dict(1, scale, variables))
    for scale, variables in ((1024.0, VARIABLES), (1000.0, WITH_UNSCALED))
)
LOG = [
    {"schema": SCHEMA, "kind": "header", "started": "2026-11-01", "keras": "3.15.1", "settings": SETTINGS},
    {"step": 1, "loss_scale": 1024.0, "clean_steps": 1},
    {"step": 1, **COUNTERS},
    {"step": 1, "grad_zeros": 0.2, "grad_norm": None, "sample": {"loss_scale": 1024.0, "variables": VARIABLES}},
    {"step": 1, "reference": {"loss_scale": 1.0, "variables": VARIABLES}},
    {"step": 20, **COUNTERS, "overflow_count": 18, "overflows_in_a_row": 15},
    {"step": 20, "loss_scale": 1000.0, "later_key": 5},
    {"step": 20, "sample": {"loss_scale": 1000.0, "variables": WITH_UNSCALED}},
    {"step": 21, "sample": COMPACT},
    {"step": 21, "reference": {key: value for key, value in COMPACT.items() if key != "names"}},
    {"step": 22, "sample": COMPACT_WITH_UNSCALED},
]

VALUES = st.sampled_from(
    [
        *(None, True, [], {}, "", "nan", [[[]]], {"a": {"a": {}}}, [1] * 300, "a" * 5000, {"": 1}, ["float16"]),
        *(0, 1, -1, 2, 14, 15, 280, 2**31, 2**36 - 1, 2**48 - 1, 2**53, 2**63 - 1, 2**63, 10**400, -(10**30)),
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
            "FixedScale",
        ),
        *(BINS, VARIABLE, VARIABLES, SETTINGS, VARIABLE | {"inf": 3}, VARIABLE | {"counts": []}),
        *(COMPACT, COMPACT["total"], COMPACT["counts"], COMPACT["norm"], COMPACT["elements"], "AAAA"),
    ]
)
INTEGERS = st.sampled_from([0, 1, 2, 5, 14, 40, 277, 2**31, 2**36 - 1, 2**48 - 1])
FLOATS = st.sampled_from([0.0, 1e-320, 2.0**-149, 2.0**-14, 0.3, 1.0, 7e4, 1e10, 3e38, 1e100])
STRINGS = st.sampled_from(
    ["", "\x1b[2J", "\u202e", "$x_{$", "a/kernel", "the batch's x", "the loss function", "FixedScale"]
)
SAME_TYPE = {int: INTEGERS, float: FLOATS, str: STRINGS}
KEYS = st.sampled_from(["\x1b]0;", "later", "", "$", "sample", "loss_scale", "unscaled", "\u202e", "x" * 5000, "step"])


def containers(value):
    """Yields all dictionaries and lists in a value."""
    if isinstance(value, dict | list) and value:
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from containers(item)


@st.composite
def changed_logs(draw):
    """Draws the bytes of a log with some values, keys or bytes replaced, removed or inserted."""
    log = [copy.deepcopy(line) for line in (LOG[0], *draw(st.lists(st.sampled_from(LOG[1:]), max_size=8)))]
    for _ in range(draw(st.integers(0, 4))):
        container = draw(st.sampled_from([*containers(log)] or [LOG.copy()]))
        key = draw(st.sampled_from(sorted(container) if isinstance(container, dict) else range(len(container))))
        change = draw(st.sampled_from(["vary", "vary", "vary", "vary", "remove", "replace", "insert"]))
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


def check(file, data, draws):
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
    assert re.fullmatch("(The run has no sample of finite gradients.*)?", attempted(kmp.what_if, run)[1])
    console = Console(width=80, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(report.summary({"run": run}))
    assert is_shown_safely(capture.get())
    assert is_shown_safely(report.html({"run": run}))
    if draws:
        for draw in (plots.loss_scale, plots.exponents_over_steps, plots.what_if, plots.overflowing_variables):
            draw(run)
        plt.close("all")


def fuzz(examples):
    return settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


@fuzz(EXAMPLES)
@given(changed_logs())
def test_changed_log_is_refused_with_its_line_or_reported(tmp_path, monkeypatch, data):
    monkeypatch.setattr("kmp.report.figures._svg", lambda draw: "data:,")
    check(tmp_path / "kmp.jsonl", data, draws=False)


@fuzz(max(5, EXAMPLES // 40))
@given(changed_logs())
def test_changed_log_is_refused_with_its_line_or_drawn(tmp_path, data):
    check(tmp_path / "kmp.jsonl", data, draws=True)


def test_unchanged_log_loads(tmp_path):
    file = tmp_path / "kmp.jsonl"
    file.write_text("".join(map(to_line, LOG)))
    loaded = [json.loads(to_line(row)) for row in kmp.load_run(file).rows]
    assert loaded == [*LOG[1:-2], {"step": 21, "reference": COMPACT}, LOG[-1]]
    check(file, file.read_bytes(), draws=True)


HEADER = f'{{"schema": {SCHEMA}, "kind": "header"}}\n'
NO_BINS = BINS | {"zero": 0, "counts": []}


def sample_line(**variables):
    return HEADER + json.dumps({"step": 5, "sample": {"loss_scale": 2.5, "variables": variables}})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", r":1: a record must be `object`. Received: `array`"),
        ("", None),
        ("\n", r":1: not a line of JSON"),
        ('{"step": 1}', r":1: a log of kmp begins with a header. Received keys: \['step'\]"),
        ('{"kind": "header", "schema": 99}', ":1: schema 99; this version of kmp reads schemas 2, 3 and 4"),
        (HEADER + '{"loss": 1}', ":2: Object missing required field `step`"),
        (HEADER + '{"st', ":2: not a line of JSON"),
        (HEADER + '{"step": 1, "last_loss": NaN}', r":2: not a line of JSON .*, after the key `last_loss`"),
        (HEADER + '{"step": 5, "overflow_count": "many"}', ":2: `overflow_count` must be `int`. Received: 'many'"),
        (HEADER + '{"step": 9223372036854775808}', ":2: `step` must be `int` <= .* Received: 9223372036854775808"),
        (
            HEADER + f'{{"step": 1, "last_loss": 1{"0" * 400}}}',
            ":2: `last_loss`: Number out of range. Received: 1000",
        ),
        (HEADER + '{"step": 5, "loss_scale": 0.0}', ":2: `loss_scale` must be `float` >= 1.4.*e-45. Received: 0.0"),
        (HEADER + '{"step": 5, "overflows_by_variable": [1]}', ":2: `overflows_by_variable` must be `object`"),
        (HEADER + '{"step": 5, "overflows_by_variable": {"a": -1}}', r":2: `overflows_by_variable\[...\]` must be"),
        (HEADER + '{"step": 5, "x": ' + "[" * 99999, ":2: nested too deeply, after the key `x`"),
        (HEADER + '{"step": 5, "overflow_origin": "\udcff"}', ":2: not a line of JSON"),
        (
            HEADER + '{"step": 5, "sample": {"loss_scale": 1}}',
            ":2: `sample` has no `names`, and no sample before it has any",
        ),
        (sample_line(a=BINS | {"first": 126}), r":2: `sample.variables\['a'\].counts` must end at exponent 127"),
        (sample_line(a=BINS, b=BINS | {"unscaled": BINS}), ":2: `sample.variables` must all have `unscaled`"),
        (
            sample_line(a=BINS | {"unscaled": NO_BINS}),
            r":2: `sample.variables\['a'\].unscaled` must count as many elements",
        ),
        (
            '{"kind": "header", "schema": 3, "settings": {"compute_dtypes": [1]}}',
            r":1: `settings.compute_dtypes\[0\]` must be `str`. Received: 1",
        ),
        (
            HEADER + "".join(f'{{"step": 1, "k{number:03}": 1}}\n' for number in range(101)),
            ":102: `k100`: a log may have 100 keys that this version of kmp does not know",
        ),
    ],
)
def test_refused_log_is_one_line_with_file_line_and_key(tmp_path, capsys, text, message):
    file = tmp_path / "kmp.jsonl"
    file.write_bytes(text.encode(errors="surrogateescape") + b"\n" * bool(text))
    assert main(["report", str(tmp_path)]) == bool(message)
    error = capsys.readouterr().err
    if message:
        assert re.fullmatch(f"kmp: {re.escape(str(file))}{message}.*\n", error)


def test_unknown_keys_with_numbers_are_kept_and_the_others_dropped(tmp_path):
    settings = {"model": "m", "later": ["a"], "nested": {"a": 1}}
    row = {"step": 1, "later": 2.5, "newer": None, "text": "x", "flag": True, "large": 10**400, "a b": 1, "deep": [[]]}
    header = {"schema": 3, "kind": "header", "torch": "2.9", "extra": {"a": 1}, "settings": settings}
    (tmp_path / "kmp.jsonl").write_text(json.dumps(header) + "\n" + json.dumps(row) + "\n")
    run = kmp.load_run(tmp_path)
    assert run.rows == [{"step": 1, "later": 2.5, "newer": None}]
    assert run.header["torch"] == "2.9"
    assert "extra" not in run.header
    assert run.settings == {"model": "m", "later": ["a"]}
    assert run.table().dtype.names == ("step", "later")
