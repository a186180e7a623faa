"""Phrases that several sentences share."""

from collections.abc import Sequence

from kmp.diagnosis import RunMetrics
from kmp.diagnosis.edits import is_sound_in_bfloat16, needs_only_a_larger_scale
from kmp.records import Replay
from kmp.records.replay import NonfiniteOperation
from kmp.utils.float_formats import DTYPES_16_BIT


def counted(count: int, noun: str, plural: str = "s") -> str:
    """Returns a number with a noun in its number.

    Example:
    >>> counted(1, "step"), counted(2, "batch", "es")
    ('1 step', '2 batches')
    """
    return f"{count} {noun}{plural if count != 1 else ''}"


def capitalized(text: str) -> str:
    """Returns a text with its first letter in upper case, and the rest as it is."""
    return text[:1].upper() + text[1:]


def percent(share: float) -> str:
    """Returns a share in percent: of small ones, two digits behind the point."""
    if share > 10:
        return "more than 1000 %"
    digits = 0 if share > 0.095 else 2
    return f"{100 * share:.{digits}f} %"


def first_few(names: Sequence[str], most: int = 3) -> str:
    """Returns the first names of a list, and how many more there are."""
    omitted = len(names) - most
    return ", ".join(names[:most]) + (f" and {omitted} more" if omitted > 0 else "")


def skipped(run: RunMetrics) -> str:
    """Returns the number of skipped steps in words, since training began."""
    count = run.skipped_steps
    if count is None:
        return "skipped steps were not counted"
    return f"{count} of {run.last_step} steps {'was' if count == 1 else 'were'} skipped"


def of_steps(run: RunMetrics, count: int) -> str:
    """Returns a number of steps with its share of all steps."""
    return f"{count} of {run.steps} steps ({count / max(1, run.steps):.1%})"


def skipped_with_finite_loss(run: RunMetrics) -> str:
    """Returns the number of steps that were skipped because of their gradients."""
    return f"{of_steps(run, run.gradient_overflows)} were skipped with a finite loss"


def failed_steps(run: RunMetrics) -> str:
    """Returns the number of steps with a non-finite loss, or of skipped ones if there is none."""
    if run.nonfinite_losses:
        scaling = " before scaling" if run.has_loss_scale else ""
        return f"in {of_steps(run, run.nonfinite_losses)} the loss was NaN or Inf{scaling}"
    if run.run.last("overflow_count") == 0:
        return "no step was skipped"
    return skipped_with_finite_loss(run)


def largest_value(run: RunMetrics) -> str:
    """Returns the maximum of the format of a run in words."""
    return f"{run.format.name}'s maximum of {run.format.max:.5g}"


def of_a_batch(replay: Replay) -> str:
    """Returns how many examples were replayed."""
    return f"on {counted(replay.examples, 'example')} of a batch"


def replayed_with_change(run: RunMetrics, replay: Replay, result: str) -> str:
    """Returns a note: the replayed batch had this result with the change that is advised."""
    if replay.float32_layers:
        return f"with these layers in float32 {result}"
    if is_sound_in_bfloat16(replay):
        return (
            f"in bfloat16, which has float32's range, {result}; GPUs before the A100 are slow in it"
        )
    if needs_only_a_larger_scale(run, replay):
        return f"at this loss scale {result}"
    return f"no few layers were found with which {result}"


def cast_by_hand(found: NonfiniteOperation | None) -> str:
    """Returns the 16-bit format in which an operation of a pass in float32 computes; or nothing.

    The program itself casts to it, whatever the policy of the layers is.
    """
    return found.dtype if found and found.dtype in DTYPES_16_BIT else ""


def note_of_cast(dtype: str, run: RunMetrics) -> str:
    """Returns what to do about numbers that the program itself makes 16 bits."""
    if run.settings.floatx == dtype:
        return (
            f"keras.config.set_floatx({dtype!r}) makes numbers {dtype} there, whatever the policies"
            " are: leave it out, and use kmp.enable(); not tried"
        )
    return (
        f"the program computes in {dtype} there, as after a cast or with a constant of its own, so"
        " that float32 layers do not help: cast to float32; not tried"
    )


def repaired_layers(layers: Sequence[str], run: RunMetrics) -> str:
    """Returns what a finding calls the layers that were set to float32, given their paths."""
    model = run.settings.model
    names = [f"model {path!r}" if path == model else run.describe(path) for path in layers]
    return ", ".join(names)
