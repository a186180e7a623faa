"""Variables that keep a batch inside of a step, where the host sees none: in a loop of the user."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from kmp.backend import xla
from kmp.optimizer import LossScaleOptimizer
from kmp.replay.kept_batches import MOST_BYTES, check_tensors

# The dtype and shape of each tensor.
Specs = list[tuple[tf.DType, tf.TensorShape]]


class StepVariables:
    """Keeps the batch of a step that is skipped or requested, or its first examples: 64 MB.

    There is no branch, for which a GPU would make the host wait: each step writes the batch or the
    old values. A batch whose shapes are known in part, so that it may be ragged, cannot be selected
    that way: outside of XLA the variables refer to the last one, which is no copy.

    Args:
        optimizer: The optimizer whose skipped steps to keep.
    """

    def __init__(self, optimizer: LossScaleOptimizer) -> None:
        self._optimizer = optimizer
        new = partial(keras.Variable, "zeros", trainable=False, autocast=False)
        self._is_requested = new((), "int64", name="capture_requested")
        # Step, batch size, index of the structure, and the skipped steps in a row up to it.
        self._about = new((4,), "int64", name="captured_batch")
        self._loss_scale = new((), "float32", name="captured_loss_scale")
        self._made: list[tuple[Specs, list[tf.Variable]]] = []
        self._structures: list[Any] = []

    def request(self) -> None:
        """Keeps the batch of the next step."""
        self._is_requested.assign(1)

    def forget(self) -> None:
        """Forgets the batch, and frees its memory where variables may change their shape."""
        self._about.assign(tf.zeros([4], tf.int64))
        self._is_requested.assign(0)
        for specs, variables in self._made:
            if specs[0][1][0] is None:
                for variable in variables:
                    variable.assign(_empty(variable.dtype, variable.shape))

    def keep(self, data: Any, loss_scale: Any) -> None:
        """Adds to the step that is traced now, at its end, what keeps its batch.

        Args:
            data: The batch.
            loss_scale: Scalar float32, the loss scale of the step, from before it.
        """
        tensors = keras.tree.flatten(data)
        index = self._index_for(tensors)
        if index is None:
            return
        # No tensors, which cannot be copied.
        self._structures[index] = keras.tree.map_structure(lambda _: 0, data)
        specs, variables = self._made[index]
        rows = specs[0][1][0]

        step = self._optimizer.counters.value("step")
        in_a_row = self._optimizer.counters.value("overflows_in_a_row")
        is_wanted: Any = in_a_row + self._is_requested.value > 0
        if rows is None:
            is_wanted = tf.constant(True)
        for variable, tensor in zip(variables, tensors, strict=True):
            value = tf.cast(tensor, variable.dtype)
            if rows is not None:
                value = tf.where(is_wanted, _with_rows(value, rows), variable)
            variable.assign(tf.ensure_shape(value, variable.shape))
        size: Any = tensors[0].shape[0]
        if size is None:
            size = tf.shape(tensors[0], tf.int64)[0]
        about = tf.stack([step, tf.cast(size, tf.int64), tf.constant(index, tf.int64), in_a_row])
        self._about.assign(tf.where(is_wanted, about, self._about.value))
        self._loss_scale.assign(tf.where(is_wanted, loss_scale, self._loss_scale.value))
        self._is_requested.assign(0)  # a step after a request is wanted

    def read(self) -> tuple[Any, int, int, float, int] | None:
        """Returns a batch, its size, step and loss scale, and how many were skipped in a row then.

        Returns `None` if no batch was kept.
        """
        step, size, index, in_a_row = self._about.numpy().tolist()
        if not step:
            if not int(self._is_requested.numpy()):
                self.request()  # a loop that updates outside of the guard was before its first step
            return None
        specs, variables = self._made[index]
        tensors = []
        for variable, (dtype, shape) in zip(variables, specs, strict=True):
            tensor = tf.cast(variable.value(), dtype)
            tensors.append(tensor if shape[0] is None else tensor[:size])
        data = keras.tree.pack_sequence_as(self._structures[index], tensors)
        return data, size, step, float(self._loss_scale.numpy()), in_a_row

    def _index_for(self, tensors: Sequence[tf.Tensor]) -> int | None:
        """Returns the index of the variables for such tensors; `None` if there can be none.

        A `tf.function` of the user's creates variables in its first trace only. A later one may
        have a batch of a known shape where that of the first was not.
        """
        check_tensors(tensors)
        specs = _specs_of(tensors)
        if specs is None:
            return None
        fitting = [index for index, each in enumerate(self._made) if _fit(each[0], specs)]
        if fitting:
            return fitting[0]
        variables = []
        try:
            with tf.init_scope():
                for dtype, shape in specs:
                    # TensorFlow keeps int32 off the GPU, where XLA cannot read it.
                    is_selected = shape[0] is not None
                    stored = tf.int64 if dtype == tf.int32 and is_selected else dtype
                    empty = _empty(stored, shape)
                    variables.append(tf.Variable(empty, trainable=False, shape=shape))
        except ValueError:
            return None
        self._made.append((specs, variables))
        self._structures.append(None)
        return len(self._made) - 1


def _specs_of(tensors: Sequence[tf.Tensor]) -> Specs | None:
    """Returns the specs of the variables for tensors, or `None` if they cannot be kept.

    They have a number of rows where examples are selected, which needs tensors of one known number
    of rows; a smaller batch is padded.
    """
    if not tensors or not all(each.shape.rank for each in tensors):
        return None
    rows = {each.shape[0] for each in tensors}
    is_known = len(rows) == 1 and all(each.shape.is_fully_defined() for each in tensors)
    if is_known:
        example = sum(math.prod(each.shape[1:]) * each.dtype.size for each in tensors)
        most = min(*rows, max(2, MOST_BYTES // max(1, example)))
        return [(each.dtype, tf.TensorShape([most, *each.shape[1:]])) for each in tensors]
    if xla.is_tracing():
        return None
    return [(each.dtype, tf.TensorShape([None, *each.shape[1:]])) for each in tensors]


def _fit(made: Specs, specs: Specs) -> bool:
    """Whether variables of some specs can have the values of tensors of others."""
    is_selected, selects = made[0][1][0] is not None, specs[0][1][0] is not None
    if len(made) != len(specs) or is_selected > selects:
        return False
    if not is_selected and xla.is_tracing():
        return False
    pairs = zip(made, specs, strict=True)
    return all(
        mine == its and shape[1:].is_compatible_with(other[1:])
        for (mine, shape), (its, other) in pairs
    )


def _empty(dtype: tf.DType, shape: tf.TensorShape) -> tf.Tensor:
    return tf.zeros([size or 0 for size in shape], dtype)


def _with_rows(value: tf.Tensor, rows: int) -> tf.Tensor:
    """Returns a tensor with a number of rows, zeros at the end or without the last ones."""
    missing = rows - value.shape[0]
    if missing <= 0:
        return value[:rows] if missing else value
    return tf.pad(value, [[0, missing], *[[0, 0]] * (len(value.shape) - 1)])
