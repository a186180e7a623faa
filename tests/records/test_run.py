import json
import lzma
import math
from pathlib import Path

import numpy as np
import pytest
from built_runs import run_of, sample_from
from msgspec import ValidationError

from kmp import advise, load_run
from kmp.records import Header, Record, Replay, Run, Settings
from kmp.records.jsonl import check_record, to_line
from kmp.records.replay import Comparison

HEADER = Header(settings=Settings(rule="FixedScale"))
# Version 0.2.0 wrote it in `fit` of a small model with targets in the thousands.
LOG_OF_0_2_0 = Path(__file__).parent / "log_of_0.2.0.jsonl.xz"


@pytest.mark.parametrize(
    ("dtypes", "name"),
    [
        (["bfloat16", "float16", "float32"], "float16"),  # which can lose most
        (["bfloat16", "float32"], "bfloat16"),
        (["float32"], "float32"),
        (["float64"], "float32"),
        (None, "float16"),
    ],
)
def test_format_of_a_run_is_the_one_that_limits_it(dtypes, name):
    run = run_of(rule="FixedScale", initial_scale=1.0, compute_dtypes=dtypes or [])
    assert run.format.name == name
    assert run.has_loss_scale == (name == "float16")
    for rule, scale in (("FixedScale", 2.0), ("DynamicScale", None)):
        other = run_of(rule=rule, initial_scale=scale, compute_dtypes=dtypes or [])
        assert other.has_loss_scale


def test_run_round_trips_through_a_log(tmp_path):
    sample = sample_from(2, 8.0, {"v0": {"zero": 1}, "v1": {"zero": 3}})
    rows = [
        Record(step=1, loss_scale=4.0),
        Record(step=2, sample=sample),
        Record(step=3, last_loss=0.5),
    ]
    lines = [*map(to_line, [HEADER, *rows])]
    # The truncated last line is ignored.
    (tmp_path / "kmp.jsonl").write_text("".join([*lines, '{"st']))
    run = load_run(tmp_path)
    for loaded in (run, load_run(tmp_path)):
        assert [to_line(row) for row in loaded.rows] == lines[1:]
        assert (loaded.header, loaded.settings) == (HEADER, HEADER.settings)
    assert [histogram.zeros for histogram in run.histograms] == [4]
    assert run.samples == [run.rows[1].sample]
    assert run.samples[0]["v1"].zeros == 3
    steps, scales = run.series("loss_scale")
    assert (steps.tolist(), scales.tolist()) == ([1], [4.0])
    assert (run.last("step"), run.last("loss_scale")) == (3, 4.0)
    assert (run.last("epoch"), run.last("epoch", 7)) == (None, 7)


def test_log_of_version_0_2_0_has_the_same_verdict(tmp_path):
    log = tmp_path / "kmp.jsonl"
    log.write_bytes(lzma.decompress(LOG_OF_0_2_0.read_bytes()))
    run = load_run(log)
    assert [step for step, _ in run.replays] == [7, 15, 16, 64, 128]
    assert [step for step, _ in run.comparisons] == [16, 64, 128]
    assert len(run.samples) == 23
    assert str(advise(run)).splitlines() == [
        "The initial loss scale of 2^15 is too large.",
        "1. The initial loss scale of 2^15 is too large.",
        "  Evidence: 15 of the first 16 steps were skipped before the scale had dropped to 1",
        "  Change: kmp.enable(initial_scale=2.0**0)",
        "  Tried: not in a replay",
    ]


def test_numbers_of_numpy_are_written_as_numbers_and_nonfinite_ones_as_null(tmp_path):
    line = to_line(
        Record(step=np.int64(1), metrics={"loss": np.float32(0.5), "other": np.float64(math.nan)})
    )
    assert json.loads(line) == {"step": 1, "metrics": {"loss": 0.5, "other": None}}
    line = to_line(Record(step=1, last_loss=math.inf))
    assert json.loads(line) == {"step": 1, "last_loss": None}
    (tmp_path / "kmp.jsonl").write_text(to_line(HEADER) + line)
    assert math.isnan(load_run(tmp_path / "kmp.jsonl").series("last_loss")[1][0])


@pytest.mark.parametrize("error", [math.nan, 1e39, "large"])
def test_replay_that_a_log_cannot_hold_is_an_error(error):
    def replay_with(error):
        return Replay(8, 2.0, 1.0, 1.0, True, True, comparison=Comparison(error))

    check_record(Record(step=1, replay=replay_with(0.5)))
    with pytest.raises(ValidationError, match=r"at `\$.replay.comparison.output_error`"):
        check_record(Record(step=1, replay=replay_with(error)))


def test_table_has_a_row_per_step_and_a_field_per_number():
    rows = [
        Record(step=2, overflow_count=1),
        Record(step=1, loss_scale=4.0, overflow_origin="a", last_loss=None),
        Record(step=2, loss_scale=2.0, sample=sample_from(2, 2.0, {})),
    ]
    table = Run(rows).table()
    assert table.dtype.names == ("step", "overflow_count", "loss_scale")
    assert table["step"].tolist() == [1, 2]
    assert table["loss_scale"].tolist() == [4.0, 2.0]
    np.testing.assert_array_equal(table["overflow_count"], [math.nan, 1.0])


def test_empty_run_has_empty_tables_and_a_short_repr():
    assert Run().table().dtype.names == ("step",)
    assert Run().table().size == 0
    assert Run().settings == Settings()
    assert [each.size for each in Run([Record(step=1)]).series("loss_scale")] == [0, 0]
    assert repr(Run([Record(step=1), Record(step=2)])) == "<Run: 2 records>"


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ("runs/first", TypeError, "`rows` must be a list of records. Received: rows='runs/first'"),
        (
            [{"step": 1}],
            TypeError,
            r"such as kmp.records.Record\(step=1, loss_scale=8.0\). Received: rows={'step': 1}",
        ),
        (
            [Record(step="1")],
            ValueError,
            r"must hold records with an integer `step`. Received: Record\(step='1'\)",
        ),
        ([Record(step=1, sample={})], TypeError, "must be a kmp.records.GradientSample. Received"),
    ],
)
def test_rows_that_are_not_records_are_an_error(rows, error, message):
    with pytest.raises(error, match=message):
        Run(rows)


def test_dictionaries_unknown_keys_and_a_log_that_is_no_path_are_errors():
    with pytest.raises(TypeError, match=r"`row` must be records, such as kmp.records.Record\("):
        Run().append({"step": 1})
    with pytest.raises(TypeError, match=r"`header` must be a kmp.records.Header"):
        Run([], {"settings": {}})
    for read in (Run().last, Run().series):
        with pytest.raises(ValueError, match="`key` must be one of 'step', 'loss_scale', .*'loss'"):
            read("loss")
    with pytest.raises(
        TypeError, match=r"`path` must be the path of a log, or of its `log_dir`. Received: path=3"
    ):
        load_run(3)


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("empty", FileNotFoundError, "kmp.jsonl"),
        ("missing/kmp.jsonl", FileNotFoundError, "kmp.jsonl"),
        ("wrong", ValueError, "kmp.jsonl: not a log of kmp .not a regular file"),
    ],
)
def test_path_without_a_log_is_an_error(tmp_path, path, error, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "wrong" / "kmp.jsonl").mkdir(parents=True)
    with pytest.raises(error, match=message):
        load_run(tmp_path / path)
