"""Logs of earlier schemas are read."""

import json
from pathlib import Path

import numpy as np
import pytest

import kmp

FILES = Path(__file__).parent / "saved_files"
RENAMED = {"culprit": "overflow_origin", "culprits_by_variable": "overflow_origins_by_variable"}
ORIGINS = {"hidden/kernel": 2, "norm/beta": 2}


@pytest.fixture(params=["log", "log_of_schema_3"])
def log(request):
    """A log of an older schema."""
    return FILES / request.param


def test_log_is_read(log):
    run = kmp.load_run(log)
    assert run.last("overflow_origins_by_variable") == ORIGINS
    assert run.last("overflow_origin") == "hidden/kernel"
    assert not {key for row in run.rows for key in row} & set(RENAMED)
    assert len(run.samples) > 1
    norms = [sample.total_norm for sample in run.samples]
    np.testing.assert_allclose(norms, run.series("grad_norm")[1], rtol=1e-9)
    assert {histogram.total for histogram in run.histograms} == {43}
    assert kmp.advise(run).verdict


@pytest.mark.parametrize("schema", [1, 5, None])
def test_log_of_another_schema_is_refused(tmp_path, schema):
    (tmp_path / "kmp.jsonl").write_text(json.dumps({"schema": schema, "kind": "header"}) + "\n")
    with pytest.raises(ValueError, match=rf"kmp.jsonl:1: schema {schema}; .* reads schemas 2, 3 and 4"):
        kmp.load_run(tmp_path)
