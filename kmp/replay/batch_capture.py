"""Keeps examples of a training batch, or a whole one, to replay them."""

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras import ops

from kmp.backend import xla
from kmp.backend.keras_internals import instance_attribute
from kmp.backend.state_rollback import ResourceVariable, state_of_trace
from kmp.optimizer import LossScaleOptimizer
from kmp.records.replay import LoopStep
from kmp.replay.batch_variables import BatchVariables, Tensors, is_small, variable_specs
from kmp.replay.capture_branches import NextStepBranch, SameStepBranch, StateBefore
from kmp.replay.failure_reasons import reason_of
from kmp.replay.output_gradients import LoopData, OutputGradients, are_of_this_graph

MOST_EXAMPLES = 32  # of a replay


class CapturedBatch(NamedTuple):
    """Examples of a training batch.

    Attributes:
        data: What `train_step` got: `x`, or a tuple of `x`, `y` and `sample_weight`; of a training
            loop `LoopData`. Tensors with up to 128 examples, fewer if these are large. All of a
            ragged batch, such as the nodes and edges of graphs.
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

    @property
    def is_of_loop(self) -> bool:
        """Whether it is the batch of a training loop."""
        return isinstance(self.data, LoopData)

    @property
    def examples(self) -> int:
        """The number of examples that were captured."""
        return len(keras.tree.flatten(self.data)[0])

    def without_gradients(self) -> "CapturedBatch":
        """Returns the batch of a loop with the inputs of the model alone."""
        return self._replace(data=(self.data.x,))

    def parts(self, examples: int) -> list[Any]:
        """Returns the data in parts of at most this many examples; a ragged batch has one part."""
        if is_ragged(self.data):
            return [self.data]
        starts = range(0, self.examples, examples)
        return [_rows_of(self.data, start, examples) for start in starts]


class BatchCapture:
    """Copies examples of a batch into variables, in a branch of the compiled step.

    Those with NaN, Inf, values that overflow float16 or negative integers come first; then others,
    in each skipped step of a row later ones of the batch, because a single example may make a step
    fail. A ragged batch has no parts that stand alone: it is copied as a whole, and not under XLA
    or if it has more than 64 MB.

    The branch is taken in the steps that are skipped, and in the first one after `request`: at the
    end of the step, see `SameStepBranch`, or of one whose optimizer is compiled in the next step,
    see `NextStepBranch`.

    What fails here never ends a training: the step is traced without the branch then, and
    `failure` is the reason.

    Args:
        model: The model in training.
        optimizer: The optimizer whose skipped steps to capture.
        is_custom: Whether the training step is one of the user's own: it may assign Keras'
            variables in other ways than Keras does.

    Attributes:
        variables: TensorFlow's own variables that the traced step uses, which a replay has to
            restore.
        unrestorable: What a replay would change that nobody can restore, or `None`.
        loop: What is known of the step of a custom training loop; `None` of a `train_step`.
        failure: Why no batch can be captured, or `None`.
    """

    def __init__(
        self, model: keras.Model, optimizer: LossScaleOptimizer, is_custom: bool = False
    ) -> None:
        self.optimizer = optimizer
        self.variables: list[ResourceVariable] = []
        self.unrestorable: str | None = None
        self.loop: LoopStep | None = None
        self.failure: str | None = None
        self._model = model
        self._is_custom = is_custom
        self._is_requested = keras.Variable(
            "zeros", (), "int64", trainable=False, autocast=False, name="capture_requested"
        )
        self._about = keras.Variable(
            "zeros", (5,), "float64", trainable=False, autocast=False, name="captured_batch"
        )
        self._same_step = SameStepBranch(optimizer, self._is_requested)
        self._next_step = NextStepBranch(optimizer, self._is_requested)
        self._structures: list[BatchVariables] = []
        self._whole_rows: int | None = None  # of a batch to capture as a whole

    @property
    def takes_whole(self) -> bool:
        """Whether batches are captured as a whole."""
        return self._whole_rows is not None

    def request(self) -> None:
        """Captures the batch of the next step."""
        self._is_requested.assign(1)
        self._next_step.forget()

    def prepare(self, batch_spec: Any, is_xla: bool) -> None:
        """Creates the variables for batches of this structure.

        Args:
            batch_spec: The structure, of `tf.TensorSpec`s or tensors.
            is_xla: Whether XLA compiles the step.
        """
        with self._without_harm():
            self._variables_for(keras.tree.flatten(batch_spec), is_xla, may_create=True)

    @contextlib.contextmanager
    def watch(self, data: Any) -> Iterator[None]:
        """Adds the branch after the training step that runs in this context.

        Args:
            data: The batch, as passed to `train_step`.
        """
        before = self._state()
        yield
        self.loop = None
        self._add_branch(data, before)

    @contextlib.contextmanager
    def watch_calls(self) -> Iterator[None]:
        """Adds the branch after a part of a custom training loop.

        The batch is the inputs of the model's first call in it, with the gradients of its outputs.
        """
        inputs: list[Any] = []
        watched = OutputGradients()
        call, thread = self._model.call, threading.get_ident()

        @functools.wraps(call)
        def recording_call(*args: Any, **kwargs: Any) -> Any:
            is_of_step = threading.get_ident() == thread and kwargs.get("training", True)
            outputs = call(*args, **kwargs)
            if not is_of_step:
                return outputs
            watched.count_call()
            if inputs or not args:
                return outputs
            inputs.append(args[0])
            with self._without_harm():
                return watched.watch(outputs)
            return outputs

        before, monitor = self._state(), self.optimizer.step_monitor
        with instance_attribute(self._model, "call", recording_call):
            yield
        if inputs and are_of_this_graph(keras.tree.flatten(inputs[0])):
            self.loop = LoopStep(
                reads_16_bits=watched.are_read_in_16_bits,
                applies_unscaled=monitor.has_applied_unscaled,
            )
            gradients: list[Any] = []
            with self._without_harm():
                rows = keras.tree.flatten(inputs[0])[0].shape[0]
                gradients = watched.found(rows)
            self._add_branch(LoopData(inputs[0], gradients), before)

    def take_whole(self, rows: int) -> bool:
        """Captures whole batches in the traces of the step that follow.

        Args:
            rows: The number of examples in a batch.

        Returns:
            Whether such a batch is small enough.
        """
        specs = [variables.specs for variables in self._structures]
        if self.loop or not any(is_small(each, rows) for each in specs):
            return False
        self._whole_rows = rows
        self.forget()
        with self._without_harm():
            for each in specs:
                self._variables_of(_with_rows(each, rows), may_create=is_small(each, rows))
        return self.failure is None

    def read(self) -> CapturedBatch | None:
        """Returns the batch that was captured last, or `None` without one since `forget`."""
        with self._without_harm():
            return self._read()
        return None

    def forget(self) -> None:
        """Forgets the batch, and frees its memory where variables may change their shape."""
        self._about.assign(tf.zeros([5], tf.float64))
        self._is_requested.assign(0)
        self._next_step.forget()
        for variables in self._structures:
            variables.forget()

    @contextlib.contextmanager
    def _without_harm(self) -> Iterator[None]:
        """Ends what fails in the context, and keeps the reason."""
        try:
            yield
        except Exception as error:  # whatever it is, the training goes on
            self.failure = f"a batch cannot be captured ({reason_of(error)})"

    def _state(self) -> StateBefore | None:
        """Returns copies of what tells whether to capture the last batch, before a step."""
        if self.failure:
            return None
        with self._without_harm():
            return StateBefore(
                loss_scale=ops.copy(self.optimizer.dynamic_scale),
                is_requested=ops.copy(self._is_requested),
                overflows_in_a_row=self.optimizer.counters.value("overflows_in_a_row"),
                kept=ops.copy(self._next_step.kept),
            )
        return None

    def _add_branch(self, data: Any, before: StateBefore | None) -> None:
        """Adds the branch to the step that is traced now, or leaves the step as it is."""
        if before is None:
            return
        with self._without_harm():
            tensors = keras.tree.flatten(data)
            variables = self._variables_in_trace(tensors)
            # Not in the first trace of a loop, or a step with other optimizers only.
            if variables is None or not self.optimizer.built:
                return
            # No tensors, which cannot be copied.
            variables.structure = keras.tree.map_structure(lambda _: 0, data)
            known = [*self._model.variables, *self.optimizer.variables]
            self.variables, self.unrestorable = state_of_trace(
                known, unless_assigned=self._is_custom
            )
            branch = self._next_step if self.optimizer.compiles_step else self._same_step
            branch.add(variables, tensors, before, is_whole=self.takes_whole)

    def _variables_in_trace(self, tensors: Tensors) -> BatchVariables | None:
        """Returns the variables for tensors of the function that is traced now.

        Only its first trace may create variables, not that of another structure.
        """
        may_create = not self._structures
        try:
            with tf.init_scope():
                return self._variables_for(tensors, xla.is_tracing(), may_create)
        except ValueError:  # a `tf.function` of the user's that was traced before
            return None

    def _variables_for(
        self, tensors: Tensors, is_xla: bool, may_create: bool
    ) -> BatchVariables | None:
        specs = variable_specs(tensors, is_xla, self._whole_rows)
        return None if specs is None else self._variables_of(specs, may_create)

    def _variables_of(
        self, specs: list[tuple[tf.DType, tf.TensorShape]], may_create: bool
    ) -> BatchVariables | None:
        """Returns the variables for these specs, or `None` if there are none.

        A step may be traced for the known shape of a batch where that of the data set is unknown.
        """
        same = (each for each in self._structures if each.specs == specs)
        more_general = (each for each in self._structures if _cover(each.specs, specs))
        found = next(same, None) or next(more_general, None)
        if found is not None:
            return found
        if not may_create:
            return None
        variables = BatchVariables(specs, self._about, len(self._structures))
        self._structures.append(variables)
        return variables

    def _read(self) -> CapturedBatch | None:
        before = self._state()
        if before is None:
            return None
        for variables in self._structures:
            self._next_step.copy_kept(variables, before, is_whole=self.takes_whole)
        self._next_step.forget()
        step, batch_size, loss_scale, index, was_skipped = self._about.numpy().tolist()
        if not step:
            if not int(self._is_requested.numpy()):
                self.request()  # a loop that updates outside of the guard was before its first step
            return None
        data = self._structures[int(index)].read(int(batch_size))
        return CapturedBatch(data, int(batch_size), int(step), loss_scale, bool(was_skipped))


def is_ragged(data: Any) -> bool:
    """Whether the tensors of a batch have different numbers of rows."""
    return len({len(tensor) for tensor in keras.tree.flatten(data)}) > 1


def _rows_of(data: Any, start: int, count: int) -> Any:
    return keras.tree.map_structure(lambda tensor: tensor[start : start + count], data)


def _cover(
    general: list[tuple[tf.DType, tf.TensorShape]], specs: list[tuple[tf.DType, tf.TensorShape]]
) -> bool:
    """Whether variables of general specs can have the values of tensors of other specs."""
    if len(general) != len(specs):
        return False
    pairs = zip(general, specs, strict=True)
    return all(mine[0] == its[0] and _covers(mine[1], its[1]) for mine, its in pairs)


def _covers(general: tf.TensorShape, shape: tf.TensorShape) -> bool:
    if general.rank != shape.rank:
        return False
    return all(mine in (None, its) for mine, its in zip(general, shape, strict=True))


def _with_rows(
    specs: list[tuple[tf.DType, tf.TensorShape]], rows: int
) -> list[tuple[tf.DType, tf.TensorShape]]:
    """Returns specs with another number of rows, if they have one."""
    if specs[0][1][0] is None:
        return specs
    return [(dtype, tf.TensorShape([rows, *shape[1:]])) for dtype, shape in specs]
