"""Has a batch that the training saw at hand, to replay it."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from kmp.backend.state_rollback import ResourceVariable, state_of_trace
from kmp.optimizer import LossScaleOptimizer
from kmp.replay.failure_reasons import reason_of
from kmp.replay.kept_batches import MOST_BYTES, KeptBatches, bytes_of
from kmp.replay.step_variables import StepVariables
from kmp.utils.float_formats import DTYPES_16_BIT, FLOAT16

MOST_EXAMPLES = 32  # of a replay
_MOST_READ = 128  # examples: a single one may make a step fail
# The share of a batch between the first examples that two consecutive skipped steps read.
_GOLDEN_RATIO = 0.618034


class CapturedBatch(NamedTuple):
    """Examples of a training batch.

    Attributes:
        data: What `train_step` got: `x`, or a tuple of `x`, `y` and `sample_weight`; of a training
            loop a list. Its tensors have up to 128 examples, fewer if these are large; those of a
            ragged batch, such as the nodes and edges of graphs, have all.
        batch_size: The number of examples in the training batch.
        step: The number of the optimizer step that the batch was trained in.
        loss_scale: The loss scale of that step if it was skipped; else of the next one in `fit`.
        was_skipped: Whether that step was skipped.
        whole: The whole batch; in a loop, what is known of it.
    """

    data: Any
    batch_size: int
    step: int
    loss_scale: float
    was_skipped: bool = False
    whole: Any = None

    @property
    def examples(self) -> int:
        """The number of examples that were captured."""
        return len(keras.tree.flatten(self.data)[0])

    def parts(self, examples: int) -> list[Any]:
        """Returns the data in parts of at most this many examples; a ragged batch has one part."""
        if is_ragged(self.data):
            return [self.data]
        found = []
        for start in range(0, self.examples, examples):
            rows = slice(start, start + examples)
            found.append(keras.tree.map_structure(lambda each, rows=rows: each[rows], self.data))
        return found


class _Request(NamedTuple):
    """How many steps and batches there were when a batch was requested."""

    step: int
    batch: int


class BatchCapture:
    """Finds the batch of a skipped step, or of a step after `request`, when the host asks for it.

    In `fit` it is one of the batches that are kept beside the training step: which one was skipped
    follows from the numbers of steps. In a loop it is in the variables that the step writes.

    A batch of more than 128 examples is read in part, because a single example may make a step
    fail: first the examples with NaN, Inf, values that overflow float16 or negative integers, then
    others, which each consecutive skipped step takes from a later part of the batch. A ragged batch
    has no parts that stand alone: it is read as a whole, if it has at most 64 MB, and not under
    XLA.

    An error here never ends a training: `failure` is its reason.

    Args:
        model: The model in training.
        optimizer: The optimizer whose skipped steps to capture.
        kept: The last batches of `fit`.
        is_custom: Whether the training step is one of the user's own: it may assign Keras'
            variables in other ways than Keras does.

    Attributes:
        variables: The variables that the traced step uses and that are TensorFlow's own, and those
            of Keras that a step of the user's own assigns.
        unrestorable: What a replay would change that nobody can restore, or `None`.
        is_of_loop: Whether the step is that of a training loop.
        takes_whole: Whether batches are read as a whole.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: LossScaleOptimizer,
        kept: KeptBatches,
        is_custom: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self.variables: list[ResourceVariable] = []
        self.unrestorable: str | None = None
        self.is_of_loop = False
        self.takes_whole = False
        self._failure: str | None = None
        self._model = model
        self._is_custom = is_custom
        self._kept = kept
        self._in_step = StepVariables(optimizer)
        self._requested = _Request(0, 0)
        self._skipped: CapturedBatch | None = None  # the last one that was found

    @property
    def failure(self) -> str | None:
        """Why no batch can be captured, or `None`."""
        reason = self._failure or self._kept.failure
        return reason and f"a batch cannot be captured ({reason})"

    @property
    def most_steps(self) -> int:
        """In how many steps a batch has to be looked for, before others take its place."""
        return self._kept.most_steps

    def request(self) -> None:
        """Captures a batch of the steps that follow."""
        self._kept.use(self)
        self._requested = _Request(self.optimizer.counters.read_counts().step, self._kept.count)
        self._in_step.request()

    def forget(self) -> None:
        """Forgets the batch, and frees its memory."""
        self.request()
        self._skipped = None
        self._kept.forget(self)
        self._in_step.forget()

    def take_whole(self, captured: CapturedBatch) -> bool:
        """Reads whole batches from now on; returns whether such a batch is small enough."""
        self.takes_whole = not self.is_of_loop and bytes_of(captured.whole) <= MOST_BYTES
        return self.takes_whole

    @contextlib.contextmanager
    def watch(self, data: Any, *, is_loop: bool = False) -> Iterator[None]:
        """Notes what the training step that runs in this context uses.

        A step that the user's own code calls has no batch kept beside it: it is kept here.

        Args:
            data: The batch, as passed to `train_step`; of a training loop the tensors that its
                function gets.
            is_loop: Whether it is the step of a training loop.
        """
        loss_scale = None
        if not (self._kept.is_keeping or self.failure):
            with self._without_harm():
                loss_scale = ops.copy(self.optimizer.dynamic_scale)
        yield
        self.is_of_loop = is_loop
        # The optimizer is not built in the first trace of a loop, or where a step has only others.
        if not self.optimizer.built:
            return
        with self._without_harm():
            known = [*self._model.variables, *self.optimizer.variables]
            self.variables, self.unrestorable = state_of_trace(
                known, unless_assigned=self._is_custom
            )
            if loss_scale is not None:
                self._in_step.keep(data, loss_scale)

    def read(self) -> CapturedBatch | None:
        """Returns the batch of the last skipped step since `request`, or else of an applied one.

        If there was no step since then, returns the batch that was read of an earlier skipped step.
        Returns `None` if there is none, or if it is not kept.
        """
        with self._without_harm():
            return self._of_fit() or self._of_loop()
        return None

    def batch_of(self, step: int) -> tuple[Any, ...] | None:
        """Returns the whole batch of a skipped step: `x`, `y` and `sample_weight`, as far as known.

        Returns `None` if it is not kept.
        """
        with self._without_harm():
            number = self._number_of(step, self.optimizer.counters.read_counts().step)
            batch = None if number is None else self._kept.get(number)
            if batch is None:
                captured = self.read()
                if captured is None or captured.step != step:
                    return None
                batch = captured.whole
            return batch if isinstance(batch, tuple) else (batch,)
        return None

    def _of_fit(self) -> CapturedBatch | None:
        """Returns the batch to replay, of those that `fit` has taken."""
        counters = self.optimizer.counters
        counts, last = counters.read_counts(), self._kept.count
        if counts.step <= self._requested.step or last <= self._requested.batch:
            return self._skipped
        skipped, loss_scale = counters.read_last_skipped()
        if skipped > self._requested.step:
            if self._skipped and self._skipped.step == skipped:
                return self._skipped
            number = self._number_of(skipped, counts.step)
            batch = None if number is None else self._kept.get(number)
            if batch is not None:
                in_a_row = counts.overflows_in_a_row if skipped == counts.step else 1
                self._skipped = self._captured(batch, skipped, loss_scale, in_a_row)
            if self._skipped and self._skipped.step > self._requested.step:
                return self._skipped
        return self._of_applied_step(counts.step, skipped)

    def _of_applied_step(self, last_step: int, skipped: int) -> CapturedBatch | None:
        """Returns the batch of the first step after the request, or one of the last two.

        The last batch of an epoch may be smaller than others.
        """
        last, first = self._kept.count, self._requested.batch + 1
        found: list[CapturedBatch] = []
        for number in (first, last - 1, last):
            step = self._step_of(number, last_step)
            batch = self._kept.get(number) if number >= first else None
            if batch is None or step is None or step <= max(skipped, self._requested.step):
                continue
            captured = self._captured(batch, step, float(self.optimizer.loss_scale), 0)
            if captured and number == first:
                return captured
            found += [captured] if captured else []
        return max(found, key=lambda each: each.batch_size, default=None)

    def _number_of(self, step: int, last_step: int) -> int | None:
        """Returns the number of the batch of a step since the request; `None` if not certain."""
        number = self._kept.count
        if step != last_step:
            of_batch = self._steps_of_batch(last_step)
            if of_batch is None:
                return None
            number -= (last_step - step) // of_batch
        return number if number > self._requested.batch else None

    def _step_of(self, number: int, last_step: int) -> int | None:
        """Returns the number of the last step of a batch, or `None` if it is not certain."""
        if number == self._kept.count:
            return last_step
        of_batch = self._steps_of_batch(last_step)
        return of_batch and last_step - (self._kept.count - number) * of_batch

    def _steps_of_batch(self, last_step: int) -> int | None:
        """Returns how many steps were taken with each batch since the request.

        Returns `None` if that differs: a `train_step` of the user's may take several, or none.
        """
        steps = last_step - self._requested.step
        batches = self._kept.count - self._requested.batch
        if batches <= 0 or steps <= 0 or steps % batches:
            return None
        return steps // batches

    def _captured(
        self, batch: Any, step: int, loss_scale: float, in_a_row: int
    ) -> CapturedBatch | None:
        """Returns the examples to replay of a batch that is kept."""
        tensors = keras.tree.flatten(batch)
        if not tensors or not all(each.shape.rank and each.shape[0] for each in tensors):
            return None
        data, rows = batch, len(tensors[0])
        if self.takes_whole or is_ragged(batch):
            # What XLA has compiled takes ragged batches of one size only.
            is_unusable = is_ragged(batch) and self._model.jit_compile
            if is_unusable or bytes_of(batch) > MOST_BYTES:
                return None
        else:
            chosen = _chosen_examples(tensors, in_a_row)
            data = keras.tree.map_structure(lambda each: tf.gather(each, chosen), batch)
        return CapturedBatch(data, rows, step, loss_scale, in_a_row > 0, batch)

    def _of_loop(self) -> CapturedBatch | None:
        """Returns the batch in the variables that a step writes."""
        found = self._in_step.read()
        if found is None:
            return None
        batch, size, step, loss_scale, in_a_row = found
        captured = self._captured(batch, step, loss_scale, in_a_row)
        return captured and captured._replace(batch_size=size)

    @contextlib.contextmanager
    def _without_harm(self) -> Iterator[None]:
        """Ends what fails in the context, and keeps the reason."""
        try:
            yield
        except Exception as error:  # whatever it is, the training goes on
            self._failure = reason_of(error)


def is_ragged(data: Any) -> bool:
    """Whether the tensors of a batch have different numbers of rows."""
    return len({len(tensor) for tensor in keras.tree.flatten(data)}) > 1


def _chosen_examples(tensors: Sequence[tf.Tensor], skipped_in_a_row: int) -> np.ndarray:
    """Returns the indices of the examples to replay: suspicious ones first, then others.

    Each of several consecutive skipped steps begins at another example of the batch.
    """
    size = len(tensors[0])
    example = bytes_of(tensors) // size
    most = min(size, _MOST_READ, max(2, MOST_BYTES // max(1, example)))
    start = 0
    if size > most:
        start = int(max(0, skipped_in_a_row - 1) * _GOLDEN_RATIO % 1 * size)
    order = np.roll(np.arange(size), -start)

    # NaN, Inf, floats beyond float16's maximum and negative integers are suspicious.
    suspicious = np.zeros(size, np.int64)
    for tensor in tensors:
        values = np.asarray(tensor).reshape(size, -1)
        if values.dtype.kind == "f" or values.dtype.name in DTYPES_16_BIT:
            is_suspicious = ~(np.abs(values) <= FLOAT16.max)
        else:
            is_suspicious = values < 0
        suspicious += is_suspicious.sum(axis=1)
    return order[np.argsort(-suspicious[order], kind="stable")][:most]
