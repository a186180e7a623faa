"""The variables that keep examples of a batch, and the choice of these examples."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras import ops

from kmp.utils.float_formats import FLOAT16

_MOST_CAPTURED = 128  # examples: a single one may make a step fail
_MOST_BYTES = 2**26  # of the captured examples; but at least two examples
# Of a batch, between the first examples in two steps that are skipped in a row.
_GOLDEN_RATIO = 0.618034

Tensors = Sequence[tf.Tensor | tf.TensorSpec]
# The dtype and shape of each tensor.
Specs = list[tuple[tf.DType, tf.TensorShape]]
_DENSE = (tf.Tensor, tf.TensorSpec)
_COMPOSITES = (tf.SparseTensor, tf.SparseTensorSpec, tf.RaggedTensor, tf.RaggedTensorSpec)


class StepInfo(NamedTuple):
    """What is known of the step of a batch, as scalar tensors.

    Attributes:
        step: The number of the step.
        loss_scale: Its loss scale.
        skipped_in_a_row: How many steps were skipped in a row with it; 0 if it was not.
    """

    step: Any
    loss_scale: Any
    skipped_in_a_row: Any


class BatchVariables:
    """Variables for batches of one structure. A trace of the step writes them while it exists.

    Args:
        specs: The dtype and shape of each variable; the rows are known under XLA only.
        about: The variable for the step, batch size, loss scale, `index`, and whether the step was
            skipped; float64 of shape `(5,)`, which has each exactly.
        index: What tells these variables from those of other structures.

    Attributes:
        specs: As given.
        structure: The structure of the data, which a trace sets.
        last_batch: Variables that refer to the memory of a batch, for `NextStepBranch`. XLA has no
            step whose optimizer is compiled apart.
    """

    def __init__(
        self,
        specs: Specs,
        about: keras.Variable,
        index: int,
    ) -> None:
        self.specs = specs
        self.index = index
        self.structure: Any = None
        self._about = about
        self._rows = specs[0][1][0]  # of padded variables
        self._variables = [_variable(dtype, shape) for dtype, shape in specs]
        self.last_batch: list[tf.Variable] = []
        if self._rows is None:
            self.last_batch = [_variable(*spec, is_reference=True) for spec in specs]

    def copy(self, tensors: Sequence[tf.Tensor], info: StepInfo, *, is_whole: bool) -> None:
        """Copies examples of a batch, or all of it if `is_whole` or if it is ragged.

        Copies no batch as a whole that has more than 64 MB, and no ragged one under XLA.
        """
        copy = self._copy_all if is_whole else self._copy_examples
        rows = {tensor.shape[0] for tensor in tensors}
        is_ragged = len(rows - {None}) > 1
        is_known = len(tensors) == 1 or None not in rows
        if is_ragged:
            self._copy_ragged(tensors, info)
        elif is_known:
            copy(tensors, info)
        else:
            sizes = tf.stack([tf.cast(tf.shape(each)[0], tf.float32) for each in tensors])
            tf.cond(
                tf.reduce_max(sizes) > tf.reduce_min(sizes),
                lambda: self._copy_ragged(tensors, info),
                lambda: copy(_of_equal_rows(tensors), info),
            )

    def read(self, rows: int) -> Any:
        """Returns the data that were copied last, of a number of rows if they are padded."""
        tensors = []
        for variable, (dtype, _) in zip(self._variables, self.specs, strict=True):
            tensor = tf.cast(variable.value(), dtype)
            tensors.append(tensor if self._rows is None else tensor[:rows])
        return keras.tree.pack_sequence_as(self.structure, tensors)

    def forget(self) -> None:
        """Frees the memory of variables that may change their shape."""
        for variable in (*self._variables, *self.last_batch):
            if variable.shape[0] is None:
                variable.assign(_empty(variable.dtype, variable.shape))

    def _copy_ragged(self, tensors: Sequence[tf.Tensor], info: StepInfo) -> None:
        if self._rows is None:
            self._copy_all(tensors, info)

    def _copy_all(self, tensors: Sequence[tf.Tensor], info: StepInfo) -> None:
        if self._rows is not None:
            self._assign(tensors, tensors, info)
            return
        sizes = [tf.cast(tf.size(each), tf.float32) * each.dtype.size for each in tensors]
        tf.cond(
            tf.add_n(sizes) <= _MOST_BYTES,
            lambda: self._assign(tensors, tensors, info),
            lambda: None,
        )

    def _copy_examples(self, tensors: Sequence[tf.Tensor], info: StepInfo) -> None:
        chosen = _chosen_examples(tensors, info.skipped_in_a_row)
        self._assign([tf.gather(tensor, chosen) for tensor in tensors], tensors, info)

    def _assign(
        self, values: Sequence[tf.Tensor], tensors: Sequence[tf.Tensor], info: StepInfo
    ) -> None:
        for variable, value in zip(self._variables, values, strict=True):
            stored = tf.cast(value, variable.dtype)
            if self._rows is not None:
                stored = _padded(stored, self._rows)
            variable.assign(tf.ensure_shape(stored, variable.shape))
        size = tf.shape(tensors[0], tf.int64)[0]
        was_skipped = info.skipped_in_a_row > 0
        about = info.step, size, info.loss_scale, float(self.index), was_skipped
        self._about.assign(tf.stack([ops.cast(each, "float64") for each in about]))


def variable_specs(tensors: Tensors, is_xla: bool, whole_rows: int | None = None) -> Specs | None:
    """Returns the specs of variables for the examples of such tensors, or `None` if there are none.

    XLA needs static shapes: there a smaller batch is padded, and tensors must not be known to have
    different numbers of rows.

    Args:
        tensors: The tensors of a batch.
        is_xla: Whether XLA compiles the step.
        whole_rows: The rows of whole batches under XLA, instead of those of the examples.

    Raises:
        TypeError: If a tensor is sparse or ragged, or has another dtype than numbers and booleans.
    """
    for tensor in tensors:
        _check_type(tensor)
    if not tensors or not all(_has_known_shape(tensor, is_xla) for tensor in tensors):
        return None
    if not is_xla:
        return _specs(tensors, None)
    if len({tensor.shape[0] for tensor in tensors}) > 1:
        return None
    if whole_rows is None:
        return _specs(tensors, _most_examples(tensors))
    specs = _specs(tensors, whole_rows)
    return specs if is_small(specs, whole_rows) else None


def _specs(tensors: Tensors, rows: int | None) -> Specs:
    return [(each.dtype, tf.TensorShape([rows, *each.shape[1:]])) for each in tensors]


def is_small(specs: Specs, rows: int) -> bool:
    """Whether a number of rows of such tensors may be captured as a whole."""
    bytes_of_row = [(shape[1:].num_elements() or 0) * dtype.size for dtype, shape in specs]
    return rows * sum(bytes_of_row) <= _MOST_BYTES


def _check_type(tensor: Any) -> None:
    if isinstance(tensor, _COMPOSITES):
        raise TypeError(f"it has a {type(tensor).__name__.removesuffix('Spec')}")
    if isinstance(tensor, _DENSE) and not _is_of_numbers(tensor.dtype):
        raise TypeError(f"it has a tensor of {tensor.dtype.name}")


def _is_of_numbers(dtype: tf.DType) -> bool:
    return bool(dtype.is_floating or dtype.is_integer or dtype.is_bool)


def _has_known_shape(tensor: Any, is_xla: bool) -> bool:
    """Whether variables for examples of such a tensor can be created; not of `None`."""
    if not isinstance(tensor, _DENSE) or not tensor.shape.rank:
        return False
    return not is_xla or None not in tensor.shape[1:]


def _variable(dtype: tf.DType, shape: tf.TensorShape, is_reference: bool = False) -> tf.Variable:
    # TensorFlow keeps int32 off the GPU, where XLA cannot read it.
    stored = tf.int64 if dtype == tf.int32 and not is_reference else dtype
    return tf.Variable(_empty(stored, shape), trainable=False, shape=shape)


def _empty(dtype: tf.DType, shape: tf.TensorShape) -> tf.Tensor:
    return tf.zeros([size or 0 for size in shape], dtype)


def _padded(value: tf.Tensor, rows: int) -> tf.Tensor:
    """Returns a tensor with a number of rows, zeros at the end or without the last ones."""
    value = value[:rows]
    missing = rows - tf.shape(value)[0]
    return tf.pad(value, [[0, missing], *[[0, 0]] * (len(value.shape) - 1)])


def _of_equal_rows(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns tensors without the rows that another one does not have.

    TensorFlow may run operations of a branch that is not taken, and XLA compiles both: they must
    not fail for a ragged batch.
    """
    shortest = tf.reduce_min(tf.stack([tf.shape(tensor)[0] for tensor in tensors]))
    return [tensor[:shortest] for tensor in tensors]


def _most_examples(tensors: Tensors) -> Any:
    """Returns how many examples to capture.

    A scalar tensor if the size of an example is known only in the step.
    """
    sizes: list[Any] = [tensor.shape[1:].num_elements() for tensor in tensors]
    dtype_sizes = [tensor.dtype.size for tensor in tensors]
    if None not in sizes:
        example = sum(a * b for a, b in zip(sizes, dtype_sizes, strict=True))
        return min(_MOST_CAPTURED, max(2, _MOST_BYTES // max(1, example)))
    elements = [tf.reduce_prod(tf.shape(tensor)[1:]) for tensor in tensors]
    example = tf.add_n([a * b for a, b in zip(elements, dtype_sizes, strict=True)])
    return tf.clip_by_value(_MOST_BYTES // tf.maximum(example, 1), 2, _MOST_CAPTURED)


def _chosen_examples(tensors: Sequence[tf.Tensor], skipped_in_a_row: tf.Tensor) -> tf.Tensor:
    """Returns the indices of the examples to capture: suspicious ones first, then others.

    In each skipped step of a row, other ones: those from a later one of the batch on. In floats,
    because on a GPU TensorFlow computes with int32 on the host.
    """
    suspicion = _suspicion(tensors)
    most = _most_examples(tensors)
    position = tf.cumsum(tf.ones_like(suspicion), exclusive=True)
    size = tf.cast(tf.size(suspicion), tf.float32)

    turns = tf.cast(tf.maximum(skipped_in_a_row - 1, 0), tf.float32) * _GOLDEN_RATIO
    start = tf.floor((turns - tf.floor(turns)) * size)
    start = tf.where(size <= tf.cast(most, tf.float32), tf.zeros_like(start), start)
    rank = tf.where(position < start, position + size, position) - start
    # Not a slice of `tf.argsort`, for the same reason.
    count = tf.minimum(tf.size(suspicion), most)
    return tf.math.top_k(suspicion - rank / (size + 1.0), count).indices


def _suspicion(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns for each example how many elements are suspicious.

    NaN, infinite, beyond float16's maximum or negative integers.
    """

    def count(tensor: tf.Tensor) -> tf.Tensor:
        axes = list(range(1, len(tensor.shape)))
        return tf.math.count_nonzero(_is_suspicious(tensor), axes, dtype=tf.float32)

    return tf.add_n([count(tensor) for tensor in tensors])


def _is_suspicious(tensor: tf.Tensor) -> tf.Tensor:
    if tensor.dtype.is_floating:
        # TensorFlow optimizes the negation of a comparison as if no number were NaN.
        is_large = tf.abs(tensor) > tf.cast(FLOAT16.max, tensor.dtype)
        return tf.logical_or(is_large, tf.math.is_nan(tensor))
    if tensor.dtype.is_bool:
        return tf.zeros_like(tensor)
    return tensor < 0
