import base64
import json
import re
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kmp import load_run, records
from kmp.records import BIN_COUNT, GradientSample, Header, Record
from kmp.records.compact_sample import compact, expanded
from kmp.records.exponent_histogram import FIRST_EXPONENT, INF_BIN, NAN_BIN
from kmp.records.jsonl import LogEncoder
from kmp.records.log_schema import SCHEMA

HEADER = {"schema": SCHEMA, "kind": "header"}


def sample_of(counts, loss_scale=1024.0, **overrides):
    """Returns a sample with a largest magnitude in the middle of its bin, without updates."""
    counts = np.asarray(counts, np.int64)
    highest = [np.flatnonzero(row[1:INF_BIN])[-1:] + FIRST_EXPONENT for row in counts]
    amax = np.array(
        [1.5 * 2.0 ** int(exponent[0]) if exponent.size else 0.0 for exponent in highest]
    )
    amax[counts[:, INF_BIN] > 0], amax[counts[:, NAN_BIN] > 0] = np.inf, np.nan
    size = len(counts)
    arrays = {"amax": amax, "norm": np.arange(size) / 7}
    names = tuple(f"layer_{index}/kernel" for index in range(size))
    return GradientSample(7, loss_scale, names, counts, **(arrays | overrides))


def normal_counts(variables=20, elements=4096):
    """Counts of normally distributed gradients, whose scales differ from variable to variable."""
    random = np.random.default_rng(0)
    values = random.normal(size=(variables, elements)) * 10.0 ** random.uniform(
        -6, 0, (variables, 1)
    )
    bins = np.frexp(values)[1] - FIRST_EXPONENT
    return np.stack([np.bincount(row, minlength=BIN_COUNT) for row in bins])


def encoded(sample):
    return json.loads(json.dumps(compact(sample)))


def round_trip(sample):
    return expanded(sample.step, encoded(sample))


@settings(derandomize=True, deadline=None, max_examples=50)
@given(
    st.lists(
        st.dictionaries(st.integers(0, BIN_COUNT - 1), st.integers(0, 2**36 - 1), max_size=20),
        max_size=5,
    )
)
def test_counts_of_any_sample_round_trip_exactly(variables):
    counts = np.zeros((len(variables), BIN_COUNT), np.int64)
    for row, nonempty in zip(counts, variables, strict=True):
        row[list(nonempty)] = list(nonempty.values())
    before = sample_of(counts, 1000.0)
    after = round_trip(before)
    assert (after.step, after.loss_scale, after.names) == (
        before.step,
        before.loss_scale,
        before.names,
    )
    np.testing.assert_array_equal(after.counts, counts)
    np.testing.assert_array_equal(after.amax, before.amax)


def test_updates_round_trip_and_columns_without_values_are_omitted():
    before = sample_of(
        normal_counts(2),
        **{"weight_norm": np.array([2.0, 3e-9]), "update_norm": np.array([0.125, np.nan])},
        **{"updates": np.array([4096, 0]), "lost_updates": np.array([77, 0])},
    )
    after = round_trip(before)
    np.testing.assert_allclose(after.weight_norm, before.weight_norm, rtol=2**-7)
    np.testing.assert_array_equal(after.update_norm, before.update_norm)
    np.testing.assert_array_equal(after.updates, before.updates)
    np.testing.assert_array_equal(after.lost_updates, before.lost_updates)
    assert after.has_update
    without = sample_of(normal_counts(2))
    assert not without.has_update
    assert list(compact(without)) == ["loss_scale", "bins", "counts", "amax", "norm", "names"]


@pytest.mark.parametrize("amax", [1.0, 1.999, 1.5 + 2**-8, 65504.0, 2.0**-149, 3.4e38])
def test_largest_magnitude_stays_in_its_power_of_two(amax):
    counts = np.zeros((1, BIN_COUNT), np.int64)
    counts[0, np.frexp(amax)[1] - FIRST_EXPONENT] = 1
    after = round_trip(sample_of(counts, amax=np.array([amax])))
    assert np.frexp(after.amax[0])[1] == np.frexp(amax)[1]
    np.testing.assert_allclose(after.amax, [amax], rtol=2**-7)


def test_documented_lines_read_a_sample():
    text = records.__doc__.split("    def numbers")[1].split("\n\nA log is validated")[0]
    code = "".join(
        line[4:] for line in ("    def numbers" + text).splitlines(keepends=True) if line.strip()
    )
    before = sample_of(normal_counts())
    names = {"np": np, "zlib": zlib, "base64": base64, "sample": encoded(before)}
    exec(code, names)
    np.testing.assert_allclose(names["norms"], before.norm, rtol=2**-7)
    np.testing.assert_array_equal(names["counts"].T, before.counts[:, names["sample"]["bins"]])


def test_sample_of_600_variables_takes_less_than_20_kb():
    counts = np.concatenate([normal_counts(300), normal_counts(300, elements=64)])
    line = json.dumps(
        compact(sample_of(counts, norm=np.random.default_rng(0).lognormal(size=600)))
        | {"names": []}
    )
    assert 10_000 < len(line) < 20_000


def test_counts_are_stored_in_the_memory_that_they_need():
    counts = np.zeros((5000, BIN_COUNT), np.int64)
    counts[:, 100:140] = 60_000
    stored = sample_of(counts)
    assert stored.bin_counts.nbytes == 5000 * 40 * 2
    np.testing.assert_array_equal(stored.counts, counts)
    assert (stored.elements == 40 * 60_000).all()
    assert stored.histogram.counts.max() == 5000 * 60_000


def test_names_are_written_when_they_change_and_shared_when_loaded(tmp_path):
    few, many, again = (sample_of(normal_counts(size)) for size in (2, 3, 3))
    rows = [
        Record(step=1, sample=many),
        Record(step=2, reference=again),
        Record(step=3, sample=few),
        Record(step=4, loss_scale=2.0),
        Record(step=5, sample=few),
        Record(step=6, sample=many),
    ]
    lines = [*map(LogEncoder().line, (Header(), *rows))]
    assert [("names" in line, "layer_2" in line) for line in lines[1:]] == [
        *[(True, True), (False, False), (True, False), (False, False), (False, False), (True, True)]
    ]
    (tmp_path / "kmp.jsonl").write_text("".join(lines))
    run = load_run(tmp_path)
    assert [*map(LogEncoder().line, (run.header, *run.rows))][1:3] == lines[1:3]
    assert [sample.names for sample in run.samples] == [
        many.names,
        few.names,
        few.names,
        many.names,
    ]
    assert run.samples[0].names is run.references[0].names


OUTSIDE = "`norm` must hold NaN, or numbers between 0 and 1e+100"
VALID = encoded(sample_of(normal_counts(3)))
SHORT, LONG = (base64.b64encode(zlib.compress(bytes(size))).decode() for size in (23, 10**8))
TRUNCATED = base64.b64encode(zlib.compress(bytes(24))[:-2]).decode()
FOLLOWED = base64.b64encode(zlib.compress(bytes(24)) + b"more").decode()


def numbers(values, dtype="<i8"):
    planes = np.asarray(values, dtype).view(np.uint8).reshape(len(values), -1).T.tobytes()
    return base64.b64encode(zlib.compress(planes)).decode()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"names": None}, "No sample before this one has `names` - at `$.sample`"),
        ({"names": ["a", "a", "b"]}, "`names` must not repeat a name - at `$.sample`"),
        ({"names": ["a"]}, "`amax` must expand to 8 bytes"),
        ({"bins": None}, "Object missing required field `bins` - at `$.sample`"),
        ({"counts": None}, "Object missing required field `counts`"),
        ({"bins": [*VALID["bins"][:-1], 280]}, "Expected `int` <= 279 - at `$.sample.bins["),
        ({"bins": VALID["bins"][::-1]}, "`bins` must ascend - at `$.sample`"),
        ({"bins": VALID["bins"][:1]}, "`counts` must expand to 24 bytes"),
        *(({"norm": text}, "`norm` is not zlib data in base64 (") for text in ("???", "é", "AAAA")),
        ({"counts": "AAAA"}, "`counts` is not zlib data in base64 ("),
        *(
            ({"norm": text}, "`norm` must expand to 24 bytes")
            for text in (SHORT, LONG, TRUNCATED, FOLLOWED)
        ),
        ({"counts": LONG}, "`counts` must expand to "),
        *(({"norm": numbers([value, 0.0, 0.0], "<f8")}, OUTSIDE) for value in (-1.0, np.inf)),
        (
            {"updates": numbers([0, 0, -1])},
            "`updates` must hold integers at least 0 and below 68719476736",
        ),
        (
            {"bins": [0], "counts": numbers([2**36, 0, 0])},
            "`counts` must hold integers at least 0 and below 68719476",
        ),
    ],
)
def test_invalid_sample_of_a_log_is_refused_with_line_and_key(tmp_path, change, message):
    sample = {key: value for key, value in (VALID | change).items() if value is not None}
    lines = [HEADER, {"step": 1}, {"step": 2, "sample": sample}]
    (tmp_path / "kmp.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match=rf"kmp.jsonl:3: {re.escape(message)}"):
        load_run(tmp_path)
