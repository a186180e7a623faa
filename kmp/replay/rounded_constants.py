"""Constants that a program makes in 16 bits outside of its training step.

A pass in float32 gets them as rounded to 16 bits. Their values before that are not known, but how
far from the rounded ones they may have been is: if a pass that is not finite is finite with other
values that round to the same, their rounding is the reason.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
import tensorflow as tf

from kmp.backend.keras_internals import sublayers
from kmp.backend.step_graph import StepGraph
from kmp.gradients.step_facts import line_of
from kmp.records.replay import NonfiniteOperation, RoundedConstant, RoundedConstants
from kmp.replay.arrays import array_of
from kmp.replay.batch_checks import attributes_of
from kmp.replay.passes import Passes, PassResult
from kmp.replay.step_program import StepPrograms, outermost
from kmp.utils.float_formats import DTYPES_16_BIT, FLOAT32, FORMATS_16_BIT

_MOST = 100  # constants


class _Constant(NamedTuple):
    """A constant of a step in 16 bits.

    Attributes:
        tensor: It, in the graph.
        value: The eager tensor of the program, or one with the same values.
    """

    tensor: tf.Tensor
    value: tf.Tensor

    @property
    def array(self) -> np.ndarray:
        """Its values, in their dtype."""
        return array_of(self.value)


def rounded_constants(
    passes: Passes, found: Sequence[NonfiniteOperation]
) -> RoundedConstants | None:
    """Returns the constants whose rounding makes a pass in float32 NaN or Inf; `None` if none does.

    Args:
        passes: The passes, of which that in float32 is not finite.
        found: The operations that return NaN or Inf in it.

    Raises:
        TimeoutError: If it takes too long to find them.
    """
    given = {each.tensor.op.name: each for each in _constants_of(passes.graph)}
    constants = {name: each for name, each in given.items() if _may_be_rounded(each)}
    if len(constants) > _MOST:
        return None
    directions = (-np.inf, np.inf) if constants else ()
    tried = (
        {name: _before_rounding(each.array, direction) for name, each in constants.items()}
        for direction in directions
    )
    changed = next((each for each in tried if _in_float32(passes, each).is_finite), None)
    if changed is None:
        return None

    # Those that are not needed keep their values.
    for name in constants:
        others = {other: each for other, each in changed.items() if other != name}
        if others and _in_float32(passes, others).is_finite:
            changed = others

    cured = None
    with contextlib.suppress(TimeoutError):
        left = [_key(each) for each in _in_float32(passes, changed, watch=True).nonfinite.found]
        cured = next((each for each in found if _key(each) not in left), None)
    layers = [each for layer in (passes.model, *passes.beside) for each in sublayers(layer)]
    names = {id(value): name for name, value in attributes_of(layers)}
    return RoundedConstants([_described(constants[name], names) for name in changed], cured)


def _constants_of(step: StepGraph) -> Iterator[_Constant]:
    """Yields the constants that had 16 bits before the step got them."""
    known = set(step.constants)
    for outer, inner in step.graph.captures:
        known.add(inner.op.name)
        if inner.dtype.name in DTYPES_16_BIT and inner.consumers():
            yield _Constant(inner, outermost(outer))
    for operation in step.graph.get_operations()[: step.end]:
        if operation.type == "Const" and operation.name not in known:
            tensor = operation.outputs[0]
            if tensor.dtype.name in DTYPES_16_BIT and tensor.consumers():
                yield _Constant(tensor, tf.constant(tf.get_static_value(tensor)))


def _may_be_rounded(constant: _Constant) -> bool:
    """Whether a constant may have been another number: small integers, such as a mask, are exact.

    Zeros alone may have been smaller than the format has.
    """
    array, number_format = constant.array, FORMATS_16_BIT[constant.tensor.dtype.name]
    values = array.astype(np.float32)
    is_integer = values == np.rint(values)
    is_small = np.abs(values) < number_format.max_exact_integer / 2
    are_exact = bool((is_integer & is_small).all() and values.any())
    return values.size > 0 and not are_exact


def _before_rounding(array: np.ndarray, direction: float) -> np.ndarray:
    """Returns float32 numbers that round to these: a quarter of the way to the next ones.

    They are beyond the maximum of the format in place of Inf, and 1 in place of NaN.
    """
    largest = FORMATS_16_BIT[array.dtype.name].max
    bounded = np.clip(np.nan_to_num(array.astype(np.float64), nan=1.0), -largest, largest)
    own = bounded.astype(array.dtype)
    with np.errstate(over="ignore"):  # beyond the maximum
        following = np.nextafter(own, array.dtype.type(direction)).astype(np.float64)
    step = np.where(np.isfinite(following), following - bounded, 0.0)
    changed = np.where(np.isinf(array), 2.0 * bounded, bounded + 0.25 * step)
    return np.clip(changed, -FLOAT32.max, FLOAT32.max).astype(np.float32)


def _in_float32(
    passes: Passes, constants: Mapping[str, np.ndarray], *, watch: bool = False
) -> PassResult:
    programs = StepPrograms(examples=passes.programs.examples)
    return replace(passes, constants=constants, programs=programs).in_float32(watch=watch)


def _key(operation: NonfiniteOperation) -> tuple[Any, ...]:
    return operation.layer, operation.operation, operation.value, operation.code


def _described(constant: _Constant, names: Mapping[int, str]) -> RoundedConstant:
    values = constant.array.astype(np.float64)
    finite = values[np.isfinite(values)]
    nonfinite: Literal["", "Inf", "NaN"] = ""
    if finite.size < values.size:
        nonfinite = "NaN" if np.isnan(values).any() else "Inf"
    return RoundedConstant(
        dtype=constant.tensor.dtype.name,
        shape=list(values.shape),
        smallest=float(finite.min()) if finite.size else None,
        largest=float(finite.max()) if finite.size else None,
        nonfinite=nonfinite,
        name=names.get(id(constant.value), ""),
        use=line_of(constant.tensor.consumers()[0]),
    )
