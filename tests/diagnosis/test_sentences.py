"""Compares `sentences.md` with the sentences of the diagnosis; people read it."""

import inspect
from pathlib import Path

import pytest
import sentences

import kmp
from kmp.advice.diagnose import finding_of
from kmp.diagnosis import Cause

DIAGNOSIS = Path(kmp.__file__).parent / "diagnosis"
# Modules with phrases of several causes, and of verdicts.
SHARED = (
    *("bad_batches", "branch_wording", "changes", "lossy", "missing_replays", "wording"),
    *("unknowns", "verdict"),
)


def printed(kind):
    """Returns the findings of the examples of a class, as they are printed."""
    return "\n".join(str(finding_of(cause)) for cause in sentences.findings(kind).values())


def test_page_has_the_sentences_of_the_diagnosis():
    assert sentences.PAGE.read_text(encoding="utf-8") == sentences.page(), (
        f"write the page again, and read what has changed: {sentences.COMMAND}"
    )


def test_every_class_of_causes_has_examples_in_alphabetical_order():
    classes = sorted(Cause.__subclasses__(), key=lambda kind: kind.__name__)
    assert [*sentences.EXAMPLES] == classes


@pytest.mark.parametrize("kind", sentences.EXAMPLES)
def test_every_phrase_of_a_cause_is_in_one_of_its_examples(kind):
    text = printed(kind)
    module = Path(inspect.getfile(kind))
    assert [each for each in sentences.phrases(module) if each not in text] == []


def test_every_phrase_that_causes_and_verdicts_share_is_in_an_example():
    texts = [printed(kind) for kind in sentences.EXAMPLES]
    runs = sentences.verdicts() | sentences.not_known()
    texts += [kmp.advise(run).verdict for run in runs.values()]
    text = "\n".join(texts)
    missing = {
        name: [each for each in sentences.phrases(DIAGNOSIS / f"{name}.py") if each not in text]
        for name in SHARED
    }
    assert {name: texts for name, texts in missing.items() if texts} == {}
