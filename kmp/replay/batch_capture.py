"""Keeps examples of a training batch, or a whole ragged one, to replay them."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras import ops

from kmp.backend import ResourceVariable, instance_attribute, outlined, state_of_trace, xla
from kmp.optimizer import LossScaleOptimizer
from kmp.utils import FLOAT16

MOST_EXAMPLES = 32  # of a replay
_MOST_CAPTURED = 128  # examples: a single one may make a step fail
_GOLDEN_RATIO = (
    0.618034  # of a batch, between the first examples in two steps that are skipped in a row
)
_MOST_BYTES = 2**26  # of the captured examples; but at least two examples


class CapturedBatch(NamedTuple):
    """Examples of a training batch.

    Attributes:
        data: What `train_step` got: `x`, or a tuple of `x`, `y` and `sample_weight`; tensors with
            up to 128 examples, fewer if these are large. All of a ragged batch, such as the nodes
            and edges of graphs.
        batch_size: The number of examples in the training batch.
        step: The number of the optimizer step that the batch was trained in.
        loss_scale: The loss scale of that step.
        was_skipped: Whether that step was skipped.
    """

    data: Any
    batch_size: int
    step: int
    loss_scale: float
    was_skipped: bool = False

    def parts(self, examples: int) -> list[Any]:
        """Returns the data in parts of at most this many examples; a ragged batch has one part."""
        if is_ragged(self.data):
            return [self.data]
        starts = range(0, len(keras.tree.flatten(self.data)[0]), examples)
        return [
            keras.tree.map_structure(lambda tensor, i=i: tensor[i : i + examples], self.data)
            for i in starts
        ]


@dataclass
class _Slots:
    """The variables for batches of one structure. A trace of the step writes them, as long as it exists."""

    specs: list[Any]
    variables: list[tf.Variable]
    structure: Any = None
    last_batch: list[tf.Variable] = field(default_factory=list)


class _State(NamedTuple):
    """Copies of the state before a step.

    Attributes:
        loss_scale: Scalar float32.
        is_requested: Scalar int64, 1 if the batch of a step is requested.
        overflows_in_a_row: Scalar int64.
        kept: float64 of shape `(3,)`: what `BatchCapture` knows of the batch that it kept.
    """

    loss_scale: Any
    is_requested: Any
    overflows_in_a_row: Any
    kept: Any


class BatchCapture:
    """Copies examples of a batch into variables, in a branch of the compiled step.

    Those with NaN, Inf, values that overflow float16 or negative integers come first; then others,
    in each skipped step of a row later ones of the batch, because a single example may make a step
    fail. A ragged batch has no parts that stand alone: it is copied as a whole, and not under XLA
    or if it has more than 64 MB.

    The branch is taken in the steps that are skipped, and in the first one after `request`. On a
    GPU, a branch that needs the result of its step makes the host wait for it. So a step whose
    optimizer is compiled only keeps its batch, without a copy, and the next one has the branch: its
    condition is known when it begins.

    Args:
        model: The model in training.
        optimizer: The optimizer whose skipped steps to capture.
        is_custom: Whether the training step is one of the user's own: it may assign Keras'
            variables in other ways than Keras does.

    Attributes:
        variables: TensorFlow's own variables that the traced step uses, which a replay has to
            restore.
        unrestorable: What a replay would change that nobody can restore, or `None`.
        is_of_loop: Whether the batch is only what a custom training loop calls the model with.
    """

    def __init__(
        self, model: keras.Model, optimizer: LossScaleOptimizer, is_custom: bool = False
    ) -> None:
        self._model, self.optimizer, self._is_custom = model, optimizer, is_custom
        options = {"trainable": False, "autocast": False}
        self._is_requested = keras.Variable(
            "zeros", (), "int64", name="capture_requested", **options
        )
        # Step, batch size, loss scale, index of the slots, and whether it was skipped; float64 has
        # each exactly.
        self._captured = keras.Variable("zeros", (5,), "float64", name="captured_batch", **options)
        # Step, loss scale and index of the slots of the batch that is kept for the next step;
        # without one, step 0.
        self._kept = keras.Variable("zeros", (3,), "float64", name="kept_batch", **options)
        self._slots: list[_Slots] = []
        self.variables: list[ResourceVariable] = []
        self.unrestorable: str | None = None
        self.is_of_loop = False

    def request(self) -> None:
        """Captures the batch of the next step."""
        self._is_requested.assign(1)
        self._kept.assign(tf.zeros([3], tf.float64))

    def prepare(self, batch_spec: Any, is_xla: bool) -> None:
        """Creates the variables for batches of this structure, which may be `tf.TensorSpec`s or tensors."""
        self._index_of(keras.tree.flatten(batch_spec), is_xla, may_create=True)

    @contextlib.contextmanager
    def watch(self, data: Any) -> Iterator[None]:
        """Adds the branch after the training step that runs in this context.

        Args:
            data: The batch, as passed to `train_step`.
        """
        before = self._state()
        yield
        self.is_of_loop = False
        self._add_branch(data, before)

    @contextlib.contextmanager
    def watch_calls(self) -> Iterator[None]:
        """Adds the branch after a part of a custom training loop, for the inputs of the model's first call in it."""
        inputs: list[Any] = []
        call = self._model.call

        @functools.wraps(call)
        def recording_call(*args: Any, **kwargs: Any) -> Any:
            if args and not inputs and kwargs.get("training", True):
                inputs.append(args[0])
            return call(*args, **kwargs)

        before = self._state()
        with instance_attribute(self._model, "call", recording_call):
            yield
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        if inputs and all(
            getattr(each, "graph", None) is graph for each in keras.tree.flatten(inputs) if graph
        ):
            self.is_of_loop = True
            self._add_branch((inputs[0],), before)

    def _state(self) -> _State:
        """Returns copies of what tells whether to capture the last batch, before a step."""
        in_a_row = self.optimizer.counters.values().overflows_in_a_row
        variables = self.optimizer.dynamic_scale, self._is_requested, self._kept
        scale, is_requested, kept = map(ops.copy, variables)
        return _State(scale, is_requested, in_a_row, kept)

    def _add_branch(self, data: Any, before: _State) -> None:
        tensors, is_xla = keras.tree.flatten(data), xla.is_tracing()
        try:
            with (
                tf.init_scope()
            ):  # only the first trace may create variables, not that of another structure
                index = self._index_of(tensors, is_xla, may_create=not self._slots)
        except ValueError:  # a `tf.function` of the user's that was traced before
            return
        if (
            index is None or not self.optimizer.built
        ):  # the first trace of a loop, or a step with other optimizers only
            return
        slots = self._slots[index]
        slots.structure = keras.tree.map_structure(
            lambda _: 0, data
        )  # no tensors, which cannot be copied
        known = [*self._model.variables, *self.optimizer.variables]
        self.variables, self.unrestorable = state_of_trace(known, unless_assigned=self._is_custom)
        if self.optimizer.compiles_step:
            self._capture_kept(index, before)
            self._keep(index, tensors, before.loss_scale)
            return
        counters = self.optimizer.counters.values()
        ops.cond(
            self._is_requested.value + counters.overflows_in_a_row > 0,
            outlined(
                lambda: self._capture(
                    index, tensors, before.loss_scale, counters.step, counters.overflows_in_a_row
                )
            ),
            lambda: None,
        )

    def _keep(self, index: int, tensors: list[tf.Tensor], loss_scale: tf.Tensor) -> None:
        """Keeps the batch of this step for the next one: the variables refer to its memory."""
        for variable, tensor in zip(self._slots[index].last_batch, tensors, strict=True):
            variable.assign(tensor)
        about = self.optimizer.counters.values().step, loss_scale, float(index)
        self._kept.assign(tf.stack([ops.cast(each, "float64") for each in about]))

    def _capture_kept(self, index: int, state: _State) -> None:
        """Captures the batch of the step before, if that was skipped or is requested."""
        step, loss_scale, kept_index = tf.unstack(state.kept)
        is_wanted = state.is_requested + state.overflows_in_a_row > 0
        is_here = ops.logical_and(step > 0, ops.equal(kept_index, float(index)))
        kept = self._slots[index].last_batch

        def capture() -> None:
            tensors = [variable.value() for variable in kept]
            self._capture(index, tensors, loss_scale, step, state.overflows_in_a_row)

        if kept:
            ops.cond(ops.logical_and(is_wanted, is_here), outlined(capture), lambda: None)

    def read(self) -> CapturedBatch | None:
        """Returns the batch that was captured last, or `None` without one since `forget`."""
        for index in range(len(self._slots)):
            self._capture_kept(index, self._state())
        self._kept.assign(tf.zeros([3], tf.float64))
        step, batch_size, loss_scale, index, was_skipped = self._captured.numpy().tolist()
        if not step:
            return None
        slots = self._slots[int(index)]
        tensors = [
            tf.cast(each.value(), dtype)
            for each, (dtype, _) in zip(slots.variables, slots.specs, strict=True)
        ]
        if slots.variables[0].shape[0] is not None:  # padded, for XLA
            tensors = [tensor[: int(batch_size)] for tensor in tensors]
        data = keras.tree.pack_sequence_as(slots.structure, tensors)
        return CapturedBatch(data, int(batch_size), int(step), loss_scale, bool(was_skipped))

    def forget(self) -> None:
        """Forgets the batch, and frees its memory where variables may change their shape."""
        self._captured.assign(tf.zeros([5], tf.float64))
        self._is_requested.assign(0)
        self._kept.assign(tf.zeros([3], tf.float64))
        for variable in (
            each for slots in self._slots for each in (*slots.variables, *slots.last_batch)
        ):
            if variable.shape[0] is None:
                variable.assign(
                    tf.zeros([0, *(size or 0 for size in variable.shape[1:])], variable.dtype)
                )

    def _index_of(
        self, tensors: Sequence[tf.Tensor | tf.TensorSpec], is_xla: bool, may_create: bool
    ) -> int | None:
        """Returns the index of the slots for such tensors, or `None` if there are none and none may or can be."""
        if not _are_capturable(tensors, is_xla):
            return None
        size = (
            _most_examples(tensors) if is_xla else None
        )  # XLA needs static shapes: there a smaller batch is padded
        specs = [(tensor.dtype, tf.TensorShape([size, *tensor.shape[1:]])) for tensor in tensors]
        found = next(
            (index for index, slots in enumerate(self._slots) if slots.specs == specs), None
        )
        if found is not None or not may_create:
            return found
        variables = []
        for dtype, shape in specs:
            # TensorFlow keeps int32 off the GPU, where XLA cannot read it.
            stored = tf.int64 if dtype == tf.int32 else dtype
            variables.append(
                tf.Variable(
                    tf.zeros([size or 0 for size in shape], stored), trainable=False, shape=shape
                )
            )
        # XLA has no step whose optimizer is compiled apart.
        last_batch = [] if is_xla else [_variable_for_any_rows(tensor) for tensor in tensors]
        self._slots.append(_Slots(specs, variables, last_batch=last_batch))
        return len(self._slots) - 1

    def _capture(
        self,
        index: int,
        tensors: list[tf.Tensor],
        loss_scale: tf.Tensor,
        step: tf.Tensor,
        skipped_in_a_row: tf.Tensor,
    ) -> None:
        variables = self._slots[index].variables
        is_padded = variables[0].shape[0] is not None

        def copy(rows: Sequence[tf.Tensor]) -> None:
            for variable, tensor in zip(variables, rows, strict=True):
                value = tf.cast(tensor, variable.dtype)
                if is_padded:
                    missing = variable.shape[0] - tf.shape(value)[0]
                    value = tf.pad(value, [[0, missing], *[[0, 0]] * (len(value.shape) - 1)])
                variable.assign(tf.ensure_shape(value, variable.shape))
            size = tf.shape(tensors[0], tf.int64)[0]
            captured = step, size, loss_scale, float(index), skipped_in_a_row > 0
            self._captured.assign(tf.stack([ops.cast(each, "float64") for each in captured]))

        rows = {tensor.shape[0] for tensor in tensors}
        may_be_ragged = len(tensors) > 1 and None in rows

        def copy_examples() -> None:
            own = tensors
            if is_padded and may_be_ragged:  # XLA compiles this for a ragged batch too
                shortest = tf.reduce_min(tf.stack([tf.shape(tensor)[0] for tensor in tensors]))
                own = [tensor[:shortest] for tensor in tensors]
            suspicion, most = _suspicion(own), _most_examples(own)
            # The others from a later one on: in floats, because on a GPU TensorFlow computes with
            # int32 on the host.
            position, size = (
                tf.cumsum(tf.ones_like(suspicion), exclusive=True),
                tf.cast(tf.size(suspicion), tf.float32),
            )
            turns = tf.cast(tf.maximum(skipped_in_a_row - 1, 0), tf.float32) * _GOLDEN_RATIO
            start = tf.floor((turns - tf.floor(turns)) * size)
            start = tf.where(size <= tf.cast(most, tf.float32), tf.zeros_like(start), start)
            rank = tf.where(position < start, position + size, position) - start
            # Not a slice of `tf.argsort`, for the same reason.
            chosen = tf.math.top_k(
                suspicion - rank / (size + 1.0), tf.minimum(tf.size(suspicion), most)
            ).indices
            copy([tf.gather(tensor, chosen) for tensor in own])

        def copy_all() -> None:
            if not is_padded:
                size = tf.add_n(
                    [tf.cast(tf.size(tensor), tf.float32) * tensor.dtype.size for tensor in tensors]
                )
                tf.cond(size <= _MOST_BYTES, lambda: copy(tensors), lambda: None)

        self._is_requested.assign(0)
        if len(rows - {None}) > 1:
            copy_all()
        elif may_be_ragged:
            sizes = tf.stack([tf.cast(tf.shape(tensor)[0], tf.float32) for tensor in tensors])
            tf.cond(tf.reduce_max(sizes) > tf.reduce_min(sizes), copy_all, copy_examples)
        else:
            copy_examples()


def _variable_for_any_rows(tensor: tf.Tensor | tf.TensorSpec) -> tf.Variable:
    empty = tf.zeros([0, *(size or 0 for size in tensor.shape[1:])], tensor.dtype)
    return tf.Variable(empty, trainable=False, shape=tf.TensorShape([None, *tensor.shape[1:]]))


def is_ragged(data: Any) -> bool:
    """Whether the tensors of a batch have different numbers of rows."""
    return len({len(tensor) for tensor in keras.tree.flatten(data)}) > 1


def _most_examples(tensors: Sequence[tf.Tensor | tf.TensorSpec]) -> Any:
    """Returns how many examples to capture: a scalar tensor if the size of an example is known only in the step."""
    sizes: list[Any] = [tensor.shape[1:].num_elements() for tensor in tensors]
    if None not in sizes:
        example = sum(size * tensor.dtype.size for size, tensor in zip(sizes, tensors, strict=True))
        return min(_MOST_CAPTURED, max(2, _MOST_BYTES // max(1, example)))
    parts = [tf.reduce_prod(tf.shape(tensor)[1:]) * tensor.dtype.size for tensor in tensors]
    return tf.clip_by_value(_MOST_BYTES // tf.maximum(tf.add_n(parts), 1), 2, _MOST_CAPTURED)


def _suspicion(tensors: list[tf.Tensor]) -> tf.Tensor:
    """Returns for each example how many elements are NaN, infinite, beyond float16's maximum or negative integers."""

    def count(tensor: tf.Tensor) -> tf.Tensor:
        if tensor.dtype.is_floating:
            # TensorFlow optimizes the negation of a comparison as if no number were NaN.
            is_large = tf.abs(tensor) > tf.cast(FLOAT16.max, tensor.dtype)
            is_suspicious = tf.logical_or(is_large, tf.math.is_nan(tensor))
        elif tensor.dtype.is_bool:
            is_suspicious = tf.zeros_like(tensor)
        else:
            is_suspicious = tensor < 0
        return tf.math.count_nonzero(
            is_suspicious, list(range(1, len(tensor.shape))), dtype=tf.float32
        )

    return tf.add_n([count(tensor) for tensor in tensors])


def _are_capturable(tensors: Sequence[Any], is_xla: bool) -> bool:
    """Whether tensors can be captured: under XLA only if they are not known to have different numbers of rows."""

    def is_capturable(tensor: Any) -> bool:
        if not isinstance(tensor, tf.Tensor | tf.TensorSpec) or not tensor.shape.rank:
            return False
        dtype = tensor.dtype
        return (dtype.is_floating or dtype.is_integer or dtype.is_bool) and not (
            is_xla and None in tensor.shape[1:]
        )

    if not tensors or not all(map(is_capturable, tensors)):
        return False
    return not is_xla or len({tensor.shape[0] for tensor in tensors}) == 1
