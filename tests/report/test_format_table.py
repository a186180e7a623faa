import dataclasses

import rich

from kmp import report
from kmp.records import Header, Record, Replay, Run, Settings
from kmp.records.replay import (
    Comparison,
    GradientError,
    LayerError,
    NonfiniteOperation,
    OtherFormat,
    Overflow,
)
from kmp.report.format_table import both_formats
from kmp.report.run_summary import RunSummary
from kmp.utils.float_formats import FLOAT32

LAYERS = ("m/first", "m/last", "m")
LAYER_CLASSES = {"m/first": "Dense", "m/last": "Dense"}
HEADER = Header(settings=Settings(model="m", layers=LAYER_CLASSES))


def compared(error, of_gradients):
    outputs = [LayerError(layer, error / 2**index) for index, layer in enumerate(reversed(LAYERS))]
    return Comparison(error, outputs, [GradientError("m/last", of_gradients, 1.0, 1.0)])


def overflow(layer="m/last", value="inf", *, is_backward=False):
    first = NonfiniteOperation(
        layer, "MatMul", "float16", value, 1.0, FLOAT32.max, None, is_backward
    )
    mask = dataclasses.replace(first, layer="m/first", operation="Mul", is_backward=False)
    return Overflow([mask, first], outputs=[] if is_backward else [layer, "m"])


def replay(own, other, form="bfloat16", scales=(2.0**15, 1.0)):
    """Returns a replay; of a pass that was not finite, there is an `Overflow`."""
    in_own, in_other = ({type(each).__name__.lower(): each} for each in (own, other))
    is_finite = [isinstance(each, Comparison) for each in (own, other)]
    of_other = OtherFormat(form, scales[1], is_finite[1], **in_other)
    return Replay(32, scales[0], 1.0, 1.0, is_finite[0], True, other_format=of_other, **in_own)


def run_of(**replays):
    """Returns a run with replays, by `step_1` and so on."""
    rows = [
        Record(step=int(name.removeprefix("step_")), replay=each) for name, each in replays.items()
    ]
    return Run(rows, HEADER)


def table_of(**replays):
    return both_formats(RunSummary("first", run_of(**replays)))


def test_table_has_the_errors_of_the_newest_batch_and_the_line_the_largest_of_all():
    table = table_of(
        step_1=replay(compared(0.001, 0.002), compared(0.009, 0.03)),
        step_96=replay(compared(0.0008, 0.003), compared(0.004, 0.01), scales=(2.0**14, 1.0)),
    )
    assert table.columns == (
        "layer",
        "outputs, float16",
        "outputs, bfloat16",
        "gradients, float16",
        "gradients, bfloat16",
    )
    assert table.rows == (
        ("m", "0.08 %", "0.40 %", "-", "-"),
        ("m/last", "0.04 %", "0.20 %", "0.30 %", "1.00 %"),
        ("m/first", "0.02 %", "0.10 %", "-", "-"),
    )
    assert table.intro == (
        "In the batches of steps 1 and 96, replayed in both formats,"
        " the outputs differ from float32 by at most 0.10 % in"
        " float16 and 0.90 % in bfloat16, and the gradients of a layer by at most 0.30 % and"
        " 3.00 %. float16 does not overflow there, at the loss scales 2^15 and 2^14."
    )
    assert table.note.startswith(
        "Step 96, 32 examples of a batch, float16 with the loss scale 2^14 and bfloat16 with the"
        " loss scale 1: "
    )


def test_line_names_where_a_bfloat16_model_leaves_the_range_of_float16():
    table = table_of(
        step_1=replay(compared(0.004, 0.01), overflow(), "float16", scales=(1.0, 2.0**15)),
        step_9=replay(compared(0.005, 0.02), overflow(), "float16", scales=(1.0, 2.0**15)),
    )
    assert table.intro == (
        "In the batches of steps 1 and 9, replayed in both formats,"
        " the outputs differ from float32 by at most 0.50 % in"
        " bfloat16, and the gradients of a layer by at most 2.00 %. float16 fails: in steps 1 and"
        " 9, MatMul in layer 'last' returns Inf, beyond float16's maximum."
    )
    assert table.rows[:2] == (
        ("m/last", "NaN or Inf", "0.25 %", "-", "2.00 %"),
        ("m", "NaN or Inf", "0.50 %", "-", "-"),
    )


def test_line_has_the_loss_scale_of_an_overflow_in_the_backward_pass():
    table = table_of(step_3=replay(overflow(is_backward=True), compared(0.004, 0.01)))
    assert table.intro == (
        "In the batch of step 3, replayed in both formats,"
        " the outputs differ from float32 by at most 0.40 % in bfloat16, and"
        " the gradients of a layer by at most 1.00 %. float16 fails: in step 3, MatMul in the"
        " backward pass of layer 'last', at the loss scale 2^15, returns Inf, beyond float16's"
        " maximum."
    )


def test_nan_of_one_batch_is_told_from_the_errors_of_the_other():
    table = table_of(
        step_1=replay(overflow(value="nan"), compared(0.004, 0.01)),
        step_5=replay(compared(0.00001, 0.001), compared(0.004, 0.01)),
    )
    assert table.intro == (
        "In the batches of steps 1 and 5, replayed in both formats,"
        " the outputs differ from float32 by at most 0.01 %"
        " in float16 where it is finite and 0.40 % in bfloat16, and the gradients of a layer by at"
        " most 0.10 % and 1.00 %. float16 fails: in step 1, MatMul in layer 'last' returns"
        " NaN."
    )


def test_batches_before_a_repair_are_not_compared_if_there_are_later_ones():
    run = run_of(
        step_1=replay(overflow(value="nan"), compared(0.004, 0.01)),
        step_5=replay(compared(0.00001, 0.001), compared(0.004, 0.01)),
    )
    run.rows.insert(1, Record(step=1, fallback=["m/last"]))
    intro = both_formats(RunSummary("repaired", run)).intro
    assert intro.startswith("In the batch of step 5, replayed in both formats, ")
    assert "fails" not in intro
    before = both_formats(RunSummary("repaired", Run(run.rows[:2], HEADER))).intro
    assert before.startswith("In the batch of step 1 before the repair, replayed in both formats")
    assert "float16 fails: in step 1" in before


def test_forward_passes_alone_have_no_loss_scale_and_no_gradients():
    forward = Comparison(0.001, [LayerError("m", 0.001)])
    table = table_of(step_1=replay(forward, dataclasses.replace(forward, output_error=0.009)))
    assert table.intro == (
        "In the batch of step 1, replayed in both formats,"
        " the outputs differ from float32 by at most 0.10 % in float16 and"
        " 0.90 % in bfloat16. float16 does not overflow there."
    )


def test_replay_that_is_not_finite_is_no_difference_from_float32():
    # Its comparison is that of a compiled forward pass.
    failed = replay(overflow(), compared(0.004, 0.01))
    failed = dataclasses.replace(failed, comparison=compared(1e6, 0.0))
    table = table_of(step_1=failed)
    assert table.intro.startswith(
        "In the batch of step 1, replayed in both formats,"
        " the outputs differ from float32 by at most 0.40 % in bfloat16, "
    )
    assert table.intro.endswith(
        " float16 fails: in step 1, MatMul in layer 'last' returns Inf, beyond float16's maximum."
    )


def test_run_without_a_pass_in_another_format_has_no_table():
    without = dataclasses.replace(replay(compared(0.1, 0.1), compared(0.1, 0.1)), other_format=None)
    assert table_of(step_1=without).rows == ()


def test_page_and_terminal_have_the_table(without_figures, capsys):
    run = run_of(step_1=replay(compared(0.001, 0.002), compared(0.009, 0.03)))
    page = report.html({"first": run})
    assert "Both 16-bit formats, layer by layer" in page
    line = "the outputs differ from float32 by at most 0.10 % in float16 and 0.90 % in bfloat16"
    assert line in page
    rich.print(report.summary({"first": run}))
    assert line in " ".join(capsys.readouterr().out.split())
    other = Run([Record(step=1)], HEADER)
    assert "Both 16-bit formats" not in report.html({"first": other})
