"""What float16 and bfloat16 change in the same batches, in words."""

from collections.abc import Sequence
from dataclasses import dataclass

from kmp.diagnosis.wording import percent
from kmp.utils.float_formats import FLOAT16, as_power


@dataclass(frozen=True)
class FormatErrors:
    """How far passes in one 16-bit format are from float32.

    Args:
        format: `"float16"` or `"bfloat16"`.
        outputs: The relative error of the model's outputs, the largest of all batches whose pass
            was finite; `None` if none was.
        gradients: The largest relative error of a layer's gradients in these; `None` if there is
            none.
        failures: Where NaN or Inf begins in the batches whose pass was not finite.
        loss_scales: The loss scales of the passes, each once; none without a backward pass.

    Example:
    >>> import keras, kmp, numpy as np
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    >>> audit = kmp.audit(model, np.ones((8, 4)))
    >>> [(errors.format, errors.outputs < 0.01) for errors in audit.formats]
    [('float16', True), ('bfloat16', True)]
    """

    format: str
    outputs: float | None
    gradients: float | None = None
    failures: tuple[str, ...] = ()
    loss_scales: tuple[float, ...] = ()


def formats_compared(batches: str, formats: Sequence[FormatErrors]) -> str:
    """Returns how far each format is from float32, and whether the range of float16 suffices.

    It says nothing beyond these batches.

    Args:
        batches: Where that was measured, such as `"In the batch of step 1"`.
        formats: What the passes in each format showed.

    Example:
    >>> from kmp.diagnosis.format_errors import FormatErrors, formats_compared
    >>> formats = [FormatErrors("float16", 0.001), FormatErrors("bfloat16", 0.009)]
    >>> formats_compared("In the batch", formats)  # doctest: +NORMALIZE_WHITESPACE
    'In the batch, the outputs differ from float32 by at most 0.10 % in float16 and 0.90 % in
    bfloat16. float16 does not overflow there.'
    """
    sentences = []
    finite = [each for each in formats if each.outputs is not None]
    if finite:
        sentences.append(f"{batches}, {_differences(finite)}.")
    for each in formats:
        if each.failures:
            sentences.append(f"{each.format} fails: {'; '.join(each.failures)}.")
        elif each.format == FLOAT16.name:
            sentences.append(f"float16 does not overflow there{_at(each.loss_scales)}.")
    return " ".join(sentences)


def _differences(finite: Sequence[FormatErrors]) -> str:
    outputs = []
    for each in finite:
        where = f"{each.format} where it is finite" if each.failures else each.format
        outputs.append(f"{_percent(each.outputs or 0.0)} in {where}")
    text = f"the outputs differ from float32 by {_bounded(outputs)}"
    gradients = [_percent(each.gradients) for each in finite if each.gradients is not None]
    if len(gradients) == len(finite):
        text += f", and the gradients of a layer by {_bounded(gradients)}"
    return text


def _bounded(errors: Sequence[str]) -> str:
    """Returns errors in percent as upper bounds; very large ones are lower bounds already."""
    if not any(each.startswith("more than") for each in errors):
        return f"at most {' and '.join(errors)}"
    bounds = [each if each.startswith("more than") else f"at most {each}" for each in errors]
    return " and ".join(bounds)


def _at(loss_scales: Sequence[float]) -> str:
    if not loss_scales:
        return ""
    plural = "s" if len(loss_scales) > 1 else ""
    return f", at the loss scale{plural} {' and '.join(map(as_power, loss_scales))}"


def _percent(error: float) -> str:
    return "0.01 %" if 0 < error < 5e-5 else percent(error)  # the text says "at most"
