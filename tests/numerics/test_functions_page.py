import re
import runpy
from pathlib import Path

from kmp.numerics import FUNCTIONS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "functions.md").read_text(encoding="utf-8")


def test_page_has_the_table_of_functions():
    script = runpy.run_path(str(DOCS / "generate_functions.py"))
    assert script["generated"]() == PAGE, "run: python docs/generate_functions.py"


def test_page_has_a_row_for_each_function():
    rows = [line for line in PAGE.splitlines() if re.match(r"\| (?!function|---)", line)]
    assert len(rows) == len(FUNCTIONS)


def test_page_has_all_names():
    found = set(re.findall(r"`(\w+)`", PAGE))
    for function in FUNCTIONS:
        assert found.issuperset(function.keras.split() + function.tensorflow.split())


def test_links_to_long_lists_have_one_heading():
    headings = re.findall(r"(?m)^### (.*)$", PAGE)
    anchors = [heading.lower().replace(" ", "-") for heading in headings]
    assert set(re.findall(r"\]\(#([\w-]+)\)", PAGE)) == set(anchors)
    assert len(set(anchors)) == len(anchors)
