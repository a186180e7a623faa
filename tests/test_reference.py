"""The reference in docs/api: all public names, with their sentences and examples."""

import inspect
import runpy
from pathlib import Path

import pytest

import kmp
import kmp_bench

DOCS = Path(__file__).parent.parent / "docs"
# The parts of a replay and the facts of a step, which only kmp makes.
RESULTS = ("kmp.records.replay.", "kmp.records.step_facts.StepFacts")
WITHOUT_EXAMPLE = {
    "kmp.records.BIN_COUNT": "It is a number.",
    "kmp.scaling.Rule": "It is a type, and both of its classes have an example.",
}


@pytest.fixture(scope="module")
def reference():
    pytest.importorskip("griffe", reason="needs the extra `docs`")
    return runpy.run_path(str(DOCS / "generate_reference.py"))


def test_lists_of_names_are_those_of_the_entries_and_docstrings(reference):
    for page, text in reference["generated"]().items():
        assert page.read_text(encoding="utf-8") == text, "run: python docs/generate_reference.py"


def test_overview_has_every_public_name(reference):
    overview = (DOCS / "api" / "index.md").read_text(encoding="utf-8")
    modules = [value for name in kmp.__all__ if inspect.ismodule(value := getattr(kmp, name))]
    for module in (kmp, kmp_bench, *modules):
        for name in module.__all__:
            value = getattr(module, name)
            # `kmp.records.load_run` is listed as `kmp.load_run`.
            owner = kmp if getattr(kmp, name, None) is value else module
            assert inspect.ismodule(value) or f"[`{owner.__name__}.{name}`](" in overview


def test_every_name_has_an_example_or_a_reason_for_none(reference):
    lacking = [name for name, text in reference["docstrings"]().items() if ">>> " not in text]
    assert [
        name for name in lacking if name not in WITHOUT_EXAMPLE and not name.startswith(RESULTS)
    ] == []
