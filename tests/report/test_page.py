"""The page of one run, and the summary in the terminal."""

import os
import re
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest
from built_runs import sample_from
from report_runs import (
    COUNTED,
    FINDING,
    NOT_COUNTED,
    OVERFLOWED,
    Page,
    advised,
    assert_in_order,
    bells,
    compared_run,
    header_of,
    healthy_run,
    normalized,
    page_of,
    printed,
    record_of,
    run_in,
    three_runs,
    underflowing_run,
    with_metrics,
)

import kmp
from kmp import report
from kmp.records import Record, Run
from kmp.report.page import write_summaries
from kmp.report.run_summary import RunSummary
from kmp.report.run_tables import NOT_SAMPLED
from kmp.report.terminal import summary_of

TABLES = ["Counts", "Figures", "Gradients by layer", "Overflow and underflow by variable"]
FOLDED = ["Difference from float32, layer by layer", *TABLES, "Other loss scales", "Settings"]


@pytest.fixture(scope="module")
def complete_page(tmp_path_factory):
    """The page of a run in float16 with everything that a report shows, with drawn figures."""
    summary = advised("first", with_metrics(compared_run(skipped=60), loss=0.6), FINDING)
    path = write_summaries([summary], tmp_path_factory.mktemp("report") / "report.html")
    return Page(path.read_text(encoding="utf-8"))


def test_page_has_verdict_findings_figures_tables_and_settings_in_this_order(complete_page):
    assert_in_order(
        complete_page.text,
        "first error The verdict of first: its evidence. m, Adam,",
        f"Change: {FINDING.change}",
        f"Findings 1. {FINDING.title} error Evidence: {FINDING.evidence}",
        f"Change: {FINDING.change} Tried: {FINDING.tried} Note: {FINDING.note}",
        *FOLDED,
    )
    assert complete_page.folded == FOLDED
    figures = ["loss", "Errors", "The loss scale", "Histogram", "The gradients'", "The share"]
    starts = [*figures, "Skipped steps"]
    for alt, start in zip(complete_page.alts, starts, strict=True):
        assert alt.startswith(start)


def test_page_loads_no_resources_and_runs_no_scripts(complete_page):
    html = complete_page.html
    loaded = re.findall(r'(?<= )(?:src|srcset|data|poster|href)="([^"]*)"', html)
    assert len(loaded) == 7
    assert all(url.startswith("data:image/svg+xml;base64,") for url in loaded)
    assert not re.search(r"<(script|link|iframe|object|base)\b|url\(|@import", html)


def test_page_is_reproducible_and_leaves_matplotlib_as_it_was():
    runs = {"first": healthy_run(steps=10)}  # has one figure, that of the loss scale
    before = dict(mpl.rcParams), plt.get_fignums()
    page = report.html(runs)
    assert page.count("<img") == 1
    assert page == report.html(runs)
    assert (dict(mpl.rcParams), plt.get_fignums()) == before


def test_tables_of_a_run_are_in_its_page_and_not_in_those_of_other_runs():
    title = "Difference from float32, layer by layer"
    page = page_of(first=compared_run(), second=healthy_run())
    assert page.folded.count(title) == 1
    assert len([alt for alt in page.alts if alt.startswith("Errors of")]) == 1


def test_float32_run_is_compared_with_nothing():
    run = compared_run(compute_dtypes=["float32"], initial_scale=1.0)
    assert "Difference from float32, layer by layer" not in page_of(first=run).folded
    assert "differ from float32" not in printed(report.summary({"first": run}))


WORDS_OF_FLOAT16 = "subnormal|[Uu]nderflow|[Ll]oss scale|scaled|(?<!b)float16"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("skipped", [0, 30])
def test_report_of_another_format_does_not_speak_of_float16(dtype, skipped):
    run = run_in(dtype, skipped=skipped)
    page = page_of(first=run)
    for text in (page.text, *page.alts, printed(report.summary({"first": run}))):
        assert re.findall(WORDS_OF_FLOAT16, text) == []
    assert "NaN and Inf by variable" in page.folded
    assert "rule" not in dict(RunSummary("first", run).settings)


def test_markup_control_characters_and_direction_marks_in_names_are_escaped():
    hostile = "m/<script>alert('x')</script>\"><img src=x>\x1b[2J\u202e\u200b\n"
    names = ("m/b/kernel", f"{hostile}/kernel")
    run = compared_run(("m/b", hostile), names=names, skipped=200, model=hostile)
    one, two = {hostile: run}, {hostile: run, "other": run}
    pages = [page_of(**one).html, page_of(**two).html]
    summaries = [printed(report.summary(runs)) for runs in (one, two)]
    for text in (*pages, *summaries, str(kmp.advise(run))):
        assert r"\x1b[2J\u202e\u200b\n" in text
        assert all(line.isprintable() for line in text.splitlines())
    for page in pages:
        assert "<script" not in page
        assert "<img src=x" not in page
        assert "&lt;script&gt;" in page


ZEROS = sample_from(5, 16.0, {"m/a/kernel": {"zero": 9, "amax": 0.0}})
NO_LOSS = Record(step=5, overflow_count=5, nonfinite_loss_count=5, last_loss=None)
UNUSUAL_RUNS = {
    "empty": Run(),
    "header alone": Run([], header_of()),
    "no header": NOT_COUNTED,
    "no gradients": COUNTED,
    "loss never finite": Run([NO_LOSS], header_of()),
    "sample of no variable": Run([Record(step=5, sample=sample_from(5, 8.0, {}))], header_of()),
    "sample of zeros": Run([Record(step=5, sample=ZEROS)], header_of()),
    "every sample overflowed": OVERFLOWED,
    "scale not a power of two": Run([record_of(bells(5, loss_scale=1000.0))], header_of()),
}


@pytest.mark.parametrize("name", UNUSUAL_RUNS)
def test_reports_of_unusual_runs_have_their_verdict_and_findings(name):
    run = UNUSUAL_RUNS[name]
    page, advice = page_of(run=run), kmp.advise(run)
    summary = normalized(printed(report.summary({"run": run})))
    for sentence in (advice.verdict, *(finding.evidence for finding in advice)):
        assert normalized(sentence) in page.text
        assert normalized(sentence) in summary
    assert "" not in page.alts
    if not run.samples:
        assert NOT_SAMPLED in page.text


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
    page_of(first=Run(rows, header_of(float32_variables=list(names[: variables // 3]))))
    return Name.uses


def test_look_ups_of_names_grow_linearly():
    few, many = uses_of_names(100), uses_of_names(1000)
    assert 100 < few < many <= 11 * few


RUNS = "`runs` must be a dictionary"
PATHS = "`paths` must be a list of paths. Received: paths="


@pytest.mark.parametrize(
    ("function", "arguments", "error", "message"),
    [
        (report.summary, [3], TypeError, f"{RUNS} of runs by name, at least one. Received: runs=3"),
        (report.html, [{1: Run()}], TypeError, f"{RUNS} with strings as keys. Received: runs=1"),
        (report.html, [{"a": "b"}], TypeError, r"`runs\['a'\]` must be a kmp.records.Run, .*='b'"),
        (report.write, [{}, "r.html"], ValueError, f"{RUNS} of runs by name, at least one"),
        (
            report.write,
            [{"first": Run()}, 3],
            TypeError,
            "`path` must be the path of the HTML file. Received: path=3",
        ),
        (report.load, ["run"], TypeError, f"{PATHS}'run'"),
        (report.load, [3], TypeError, f"{PATHS}3"),
        (report.load, [[3]], TypeError, rf"{PATHS}\[3\]"),
    ],
)
def test_wrong_arguments_are_errors(function, arguments, error, message):
    with pytest.raises(error, match=message):
        function(*arguments)


GOLDEN = Path(__file__).parent / "golden"
LONG = "encoder/" + "block_with_a_very_long_layer_name_in_it_" * 3 + "/kernel"


SUMMARIES = {
    "one": [advised("first", underflowing_run(), FINDING)],
    "three": [
        advised(name, run, *([FINDING] if name == "float16" else []))
        for name, run in three_runs().items()
    ],
    "empty": [advised("empty", Run())],
}


@pytest.mark.parametrize(("name", "summaries"), SUMMARIES.items())
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
