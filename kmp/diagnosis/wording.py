"""Phrases that several sentences share."""

from collections.abc import Sequence

from kmp.diagnosis.observations import Observations
from kmp.records import Replay
from kmp.records.replay import NonfiniteOperation
from kmp.records.step_facts import CodeLine
from kmp.utils.float_formats import DTYPES_16_BIT


def counted(count: int, noun: str, plural: str = "s") -> str:
    """Returns a number with a noun in its number.

    Example:
    >>> from kmp.diagnosis.wording import counted
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


def skipped(run: Observations) -> str:
    """Returns the number of skipped steps in words, since training began."""
    count = run.skipped_steps
    if count is None:
        return "skipped steps were not counted"
    return f"{count} of {run.last_step} steps {'was' if count == 1 else 'were'} skipped"


def of_steps(run: Observations, count: int) -> str:
    """Returns a number of steps with its share of all steps."""
    steps = run.skipped.steps
    return f"{count} of {steps} steps ({count / max(1, steps):.1%})"


def skipped_with_finite_loss(run: Observations) -> str:
    """Returns the number of steps that were skipped because of their gradients."""
    return f"{of_steps(run, run.skipped.gradient_overflows)} were skipped with a finite loss"


def failed_steps(run: Observations) -> str:
    """Returns the number of steps with a non-finite loss, or of skipped ones if there is none."""
    if run.skipped.nonfinite_losses:
        scaling = " before scaling" if run.records.has_loss_scale else ""
        return f"in {of_steps(run, run.skipped.nonfinite_losses)} the loss was NaN or Inf{scaling}"
    return skipped_with_finite_loss(run)


def largest_value(run: Observations) -> str:
    """Returns the maximum of the format of a run in words."""
    return f"{run.format.name}'s maximum of {run.format.max:.5g}"


def of_a_batch(replay: Replay) -> str:
    """Returns how many examples were replayed."""
    return f"on {counted(replay.examples, 'example')} of a batch"


def finite_results(replay: Replay) -> str:
    """Returns what is finite of a batch that was replayed with a cure."""
    if replay.is_forward_only:
        return "the outputs for the batch are finite"
    if replay.float32_loss is None:
        return "the outputs and gradients for the batch are finite"
    return "the same batch has a finite loss and gradients"


def line_of(code: CodeLine | None) -> str:
    """Returns the line of an operation in parentheses; empty if it is not known."""
    return f" ({code.file}, line {code.line})" if code and code.file else ""


def cast_by_hand(found: NonfiniteOperation | None) -> str:
    """Returns the 16-bit format in which an operation of a pass in float32 computes; or nothing.

    The program itself casts to it, whatever the policy of the layers is.
    """
    return found.dtype if found and found.dtype in DTYPES_16_BIT else ""


def note_of_cast(dtype: str, run: Observations) -> str:
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


def is_zero_because(constant: float | None, number_format: str) -> str:
    """Returns why a divisor is 0 in a 16-bit format.

    Args:
        constant: The scalar operand that the format rounds to 0; `None` if it is not known.
        number_format: The name of the format.
    """
    if constant is None:
        return f"in {number_format} the divisor is 0"
    return f"{number_format} rounds the constant {constant:g} to 0"
