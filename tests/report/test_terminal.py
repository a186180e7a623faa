"""The summary in the terminal."""

import os
import re
from pathlib import Path

import pytest
from report_runs import FINDING, advised, healthy_run, printed, three_runs, underflowing_run

from kmp import report
from kmp.records import Run
from kmp.report.terminal import summary_of

GOLDEN = Path(__file__).parent / "golden"
LONG = "encoder/" + "block_with_a_very_long_layer_name_in_it_" * 3 + "/kernel"


@pytest.mark.parametrize(
    ("name", "summaries"),
    [
        ("one", [advised("first", underflowing_run(), FINDING)]),
        (
            "three",
            [
                advised(name, run, *[FINDING] * (name == "float16"))
                for name, run in three_runs().items()
            ],
        ),
        ("empty", [advised("empty", Run())]),
    ],
)
def test_summary_matches_the_golden_file(name, summaries):
    text, golden = printed(summary_of(summaries)), GOLDEN / f"report_{name}.txt"
    if os.environ.get("KMP_WRITE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()
    assert max(map(len, text.splitlines())) <= 80


def test_summary_shows_long_names_and_markup_literally():
    run = healthy_run(names=(LONG, "m/last/[blue]"), skipped=60)
    run.rows[-2].overflow_origin = LONG
    name = "[red]a-run-with-a-name-that-is-longer-than-one-line[/red]" * 2
    text = printed(report.summary({name: run}))
    assert max(map(len, text.splitlines())) <= 80
    assert LONG in re.sub(r"\s", "", text)
    assert "…" not in text
    assert "[red]a-run" in text
    assert "m/last/[blue]" in text
