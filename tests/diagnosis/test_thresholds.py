"""Compares docs/thresholds.md with the recorded runs, and the thresholds' comments with it."""

import inspect

import pytest
from threshold_table import PAGE, all_thresholds, causes, introduction, page

from kmp.diagnosis import thresholds

# Of a threshold on which no verdict on a recorded run depends.
REASONS = ("Derived: ", "Measured: ", "definition")


def comments():
    """Returns the comment beside and directly above each threshold."""
    found, above = {}, ""
    for line in inspect.getsource(thresholds).splitlines():
        if line.startswith("#"):
            above += line.removeprefix("#")
            continue
        name, is_assignment, rest = line.partition(" = ")
        if is_assignment and name.isupper():
            found[name] = above + rest.partition("#")[2]
        above = ""
    return found


def seen_by_threshold():
    """Returns the last column of the table of thresholds."""
    table, _, _ = PAGE.read_text(encoding="utf-8").partition("\n## ")
    rows = [line for line in table.splitlines() if line[:3] == "| `"]
    cells = [row.strip("| ").split(" | ") for row in rows]
    return {each[0].strip("`"): each[-1] for each in cells}


COMMAND = "python tests/diagnosis/threshold_table.py"


@pytest.mark.exhaustive  # it diagnoses each run up to 700 times
def test_page_is_that_of_the_recorded_runs():
    assert PAGE.read_text(encoding="utf-8") == page(), f"write the page again with {COMMAND}"


def test_page_begins_with_the_number_of_runs_and_ends_with_the_causes_in_them():
    text = PAGE.read_text(encoding="utf-8")
    assert text.startswith(introduction()), f"write the page again with {COMMAND}"
    assert text.endswith(causes()), f"write the page again with {COMMAND}"


def test_a_threshold_that_limits_no_verdict_on_a_recorded_run_is_derived_or_measured():
    found = comments()
    for name, limited_by in seen_by_threshold().items():
        is_name_of_run = limited_by.startswith("`")
        if not is_name_of_run:
            assert any(reason in found[name] for reason in REASONS), name


def test_every_threshold_has_a_row_in_the_order_of_the_module():
    assert [*seen_by_threshold()] == [*all_thresholds()] == [*comments()]
