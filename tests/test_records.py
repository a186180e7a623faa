import json
import math

import numpy as np
import pytest

from kmp.records import BIN_COUNT, ExponentHistogram, Run, scalars, to_line


def histogram(**counts):
    array = np.zeros(BIN_COUNT, np.int64)
    for exponent, count in counts.pop("exponents", {}).items():
        array[exponent + 150] = count
    array[[0, -2, -1]] = counts.get("zero", 0), counts.get("inf", 0), counts.get("nan", 0)
    return ExponentHistogram(array, step=3, loss_scale=8.0)


def test_histogram_names_its_bins():
    made = histogram(zero=4, inf=2, nan=1, exponents={-24: 5, 15: 8})
    assert (made.zeros, made.infs, made.nans, made.total) == (4, 2, 1, 20)
    assert dict(zip(made.exponents[made.by_exponent > 0], made.by_exponent[made.by_exponent > 0], strict=True)) == {
        -24: 5,
        15: 8,
    }
    assert made.zero_fraction == 0.2


def test_histogram_survives_json():
    made = histogram(zero=4, nan=1, exponents={-149: 5, 127: 8})
    back = ExponentHistogram.from_dict(json.loads(json.dumps(made.to_dict())))
    np.testing.assert_array_equal(back.counts, made.counts)
    assert (back.step, back.loss_scale) == (3, 8.0)


def test_histograms_are_equal_when_their_contents_are():
    assert histogram(zero=4) == histogram(zero=4)
    assert histogram(zero=4) != histogram(zero=5)
    assert len({histogram(zero=4), histogram(zero=4)}) == 1


def test_histogram_shows_itself_in_one_line():
    shown = repr(histogram(zero=4, nan=1))
    assert shown == "<ExponentHistogram step=3 loss_scale=8: 5 elements, 4 zero, 0 inf, 1 nan>"


def test_histogram_of_another_shape_is_an_error():
    with pytest.raises(ValueError, match=r"\(280,\)"):
        ExponentHistogram(np.zeros(4), 1, 1.0)


def test_empty_histogram_has_no_share_of_zeros():
    assert math.isnan(histogram().zero_fraction)


def test_run_reads_back_what_was_written(tmp_path):
    rows = [
        {"step": 1, "loss_scale": 4.0},
        {"step": 2, "histogram": histogram(zero=1).to_dict()},
        {"step": 3, "loss": 0.5},
    ]
    lines = [to_line({"schema": 1, "kind": "header"}), *map(to_line, rows)]
    (tmp_path / "kmp.jsonl").write_text("".join(lines))
    run = Run.load(tmp_path)
    assert run.rows == rows
    assert [h.zeros for h in run.histograms] == [1]
    steps, scales = run.series("loss_scale")
    assert (steps.tolist(), scales.tolist()) == ([1], [4.0])


def test_numbers_that_are_not_finite_become_null_and_come_back_as_nan(tmp_path):
    line = to_line({"step": 1, "loss": math.inf})
    assert json.loads(line) == {"step": 1, "loss": None}
    file = tmp_path / "log.jsonl"
    file.write_text(to_line({"schema": 1, "kind": "header"}) + line)
    assert math.isnan(Run.load(file).series("loss")[1][0])


def test_series_of_an_unknown_key_is_empty():
    steps, found = Run([{"step": 1}]).series("loss_scale")
    assert steps.size == found.size == 0


def test_scalars_leaves_out_the_step_and_what_is_no_number():
    assert dict(scalars({"step": 1, "a": 2, "b": 0.5, "c": {}, "d": None})) == {"a": 2.0, "b": 0.5}


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('{"step": 1}\n{"st', r"log.jsonl:2: not a line of JSON"),
        ("[1]", "log.jsonl:1: a reading is a JSON object"),
        ('{"loss": 1}', "integer `step`"),
        ('{"kind": "header", "schema": 99}', "schema 99"),
    ],
)
def test_foreign_or_torn_log_is_an_error_that_names_file_and_line(tmp_path, text, match):
    file = tmp_path / "log.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=match):
        Run.load(file)


def test_missing_log_is_a_file_not_found_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        Run.load(tmp_path)
