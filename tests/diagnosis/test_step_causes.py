"""Facts from the graph of a training step, as a log has them, and what the diagnosis makes of them.

`tests/gradients/test_step_facts.py` reads them from graphs.
"""

import pytest

import kmp
from kmp.records import Header, Record, Settings
from kmp.records.jsonl import to_line
from kmp.records.step_facts import CodeLine, StepFacts

MINIMUM = CodeLine("Minimum", "float32", "train.py", 12)
RIGHT = StepFacts("right", operations_in_16_bits=[])
IN_FLOAT16 = [CodeLine("Sub", "float16", "train.py", 7), CodeLine("Exp", "float16", "train.py", 8)]


def run_of(tmp_path, facts, *rows, **settings):
    """Returns the run of a log with these facts, written and read."""
    settings = {"rule": "DynamicScale", "compute_dtypes": ["float16"], **settings}
    header = Header(settings=Settings(step_facts=facts, **settings))
    first = Record(step=1, loss_scale=2.0**15, overflow_count=0)
    rows = rows or (Record(step=2, loss_scale=2.0**15),)
    log = tmp_path / "kmp.jsonl"
    log.write_text("".join(map(to_line, (header, first, *rows))), encoding="utf-8")
    return kmp.load_run(log)


@pytest.mark.parametrize(
    ("scaling", "title", "evidence", "edit"),
    [
        (
            "nonlinear",
            "The training step clips or normalizes gradients while they are multiplied by the loss"
            " scale",
            "Minimum in train.py, line 12 gets scaled gradients, and is not linear",
            "gradients = optimizer.unscale(gradients)",
        ),
        (
            "added",
            "The training step adds to gradients while they are multiplied by the loss scale",
            "Minimum in train.py, line 12 adds to scaled gradients",
            "gradients = optimizer.unscale(gradients)",
        ),
        (
            "divided",
            "The training step divides the gradients by the loss scale, and `apply` divides them"
            " again.",
            "line 12 divides; the gradients that the optimizer gets are 32,768 times too small",
            "optimizer.apply(unscaled=True)",
        ),
        (
            "multiplied",
            "The gradients are multiplied by the loss scale more often than `apply` divides by it.",
            "line 12 multiplies by the loss scale",
            "",
        ),
        (
            "unscaled",
            "A part of the loss is not multiplied by the loss scale: the gradients of layer 'a' do"
            " not grow with it, and the optimizer divides them by it.",
            "line 12 adds it to the scaled one",
            "",
        ),
    ],
)
def test_each_fault_is_an_error_with_its_line(tmp_path, scaling, title, evidence, edit):
    facts = StepFacts(scaling, MINIMUM, ["net/a/kernel"])
    (finding,) = kmp.advise(run_of(tmp_path, facts, layers={"net/a": "Dense"})).problems
    assert (finding.cause, finding.severity) == ("unscaled_loss", "error")
    assert finding.title.startswith(title)
    assert evidence in finding.evidence
    assert finding.change == edit


def test_a_train_step_calls_its_own_optimizer(tmp_path):
    facts = StepFacts("divided", MINIMUM, ["net/a/kernel"])
    run = run_of(tmp_path, facts, in_fit=True, train_step="custom")
    assert kmp.advise(run)[0].change == "self.optimizer.apply(unscaled=True)"


def test_a_gradient_function_that_clips_under_the_step_of_keras_is_a_warning(tmp_path):
    facts = StepFacts("nonlinear", MINIMUM, ["net/a/kernel"])
    settings = {"in_fit": True, "train_step": "keras", "layers": {"net/a": "Dense"}}
    (finding,) = kmp.advise(run_of(tmp_path, facts, **settings)).problems
    assert (finding.cause, finding.severity) == ("unscaled_loss", "warning")
    assert finding.title.startswith("A gradient function clips or normalizes gradients")
    assert "before those of layer 'a'" in finding.title
    assert "Minimum in train.py, line 12" in finding.evidence


@pytest.mark.parametrize(
    ("scaling", "settings"),
    [
        ("right", {}),
        ("unknown", {}),
        # No code of the user's gets these gradients.
        ("added", {"in_fit": True, "train_step": "keras"}),
        ("unscaled", {"compute_dtypes": ["bfloat16"]}),
    ],
)
def test_what_is_sound_or_not_known_is_no_fault(tmp_path, scaling, settings):
    run = run_of(tmp_path, StepFacts(scaling, MINIMUM), **settings)
    assert kmp.advise(run).problems == ()


def test_the_steepest_operation_of_a_loss_in_float16_is_named_first(tmp_path):
    failed = Record(
        step=4,
        loss_scale=2.0**15,
        overflow_count=3,
        nonfinite_loss_count=3,
        loss_dtype="float32",
    )
    facts = StepFacts("right", operations_in_16_bits=IN_FLOAT16)
    layers = {"layers": {"net/out": "Dense"}, "output_layers": ["net/out"]}
    finding = kmp.advise(run_of(tmp_path, facts, failed, **layers))[0]
    assert (finding.cause, finding.location) == ("loss_overflow", "the loss function")
    assert "Exp in train.py, line 8 computes in float16; so do Sub" in finding.evidence
    assert finding.change == "kmp.layers.Float32(Dense(..., name='out'))"
