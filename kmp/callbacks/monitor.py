"""The callback that records a training."""

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from filelock import FileLock

from kmp.callbacks.batch_replayer import BatchReplayer
from kmp.callbacks.log_writer import LogWriter
from kmp.callbacks.optimizer_reader import Logs, OptimizerReader, PathLike
from kmp.callbacks.training_records import (
    GRADIENTS,
    LOSS_SCALE,
    OVERFLOWS,
    PARTS,
    Record,
    header,
    metrics_record,
    record_of,
    record_size,
)
from kmp.gradients import NEVER, copies_of, paths_of, with_updates
from kmp.optimizer import LossScaleOptimizer
from kmp.records import GradientSample, Replay, Run, Snapshot
from kmp.utils import matching_indices, user_messages, validation

AUTO = "auto"
_RETRIES = 16  # as many halvings lead from the default loss scale to 1
_MOST_DOUBLINGS = 40


class Monitor(OptimizerReader):
    """Records the loss scale, the overflows and the gradients of a training.

    The compiled step counts on the device, and this callback copies the counts to the host after
    the first step, about every `every_n_steps` steps, and at the end of each epoch. In `logs`:

    - `loss_scale`: the loss scale of the next step; 1 if the training loop does not scale its loss.
    - `overflow_count`: steps skipped since training began because the loss or a gradient was
      non-finite.
    - `grad_norm`: the L2 norm of all gradients, without the loss scale, of the last sample in which
      it is finite; NaN before the first.

    `run` and the log have more, see `kmp.records`: the variables in which overflows originated, and
    samples of the gradients with a histogram of binary exponents, the norm and the amax of each
    gradient. The first five samples and every tenth after them also measure the weight update of
    the step, or of the execution with `steps_per_execution`; a step that updates no weights has
    none, and the next sample measures it. TensorBoard has the histogram of all gradients of each
    sample, and the histograms by layer of those with the weight update.

    Each time the records have grown by 4 MB in the log and in TensorBoard's files, those of a log
    that is continued included, the interval doubles. So the log of a million steps stays below 50
    MB, also for a model with thousands of variables.

    Does nothing for a model that needs no loss scale and is compiled without
    `kmp.LossScaleOptimizer`.

    Args:
        log_dir: Folder for `kmp.jsonl` and TensorBoard's files, or `None` to write no file.
        every_n_steps: Integer, at least 1: how often to read the optimizer. Steps are those of the
            optimizer; between two reads, each batch counts as one. Gradients are sampled in each
            step divisible by this number; in the first step of `fit`, and in further ones until one
            does not overflow, at most 16; and in the first step of an epoch without such a step. An
            execution of several steps keeps its last sample.
        optimizer: The `kmp.LossScaleOptimizer` to read, for a model with several. Defaults to the
            model's.
        variables: The variables to sample: a path as in `variable.path`, a pattern with `*` and `?`
            as in a shell, such as `"*/kernel"`, or a list of these. Defaults to all.
        reference: `"auto"` replays at most 32 examples of a batch of the training, eagerly, in the
            precision of the model and in float32: at the first step, each time the steps are four
            times as many, in the middle and at the end, and when steps are skipped or many
            gradients are zero. This measures what the precision changes in the outputs and
            gradients of each layer, and finds the operation that first returned NaN or Inf, and the
            layers that have to compute in float32; `kmp.advise` reports it. A replay takes at most
            8 seconds; the search in a batch that float16 ruins takes at most 4 more. Model and
            seeds stay unchanged; only a step with `run_eagerly=True` that draws from NumPy's or
            TensorFlow's generators draws other numbers after it. Not with several replicas. Or
            `None` for no replay.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is outside its range; in `on_train_begin`, if a float16 model has
            no `kmp.LossScaleOptimizer`, or if a pattern matches no variable; in the first step that
            is read, if the model was not built before.
        OSError: In `on_train_begin`, if `log_dir` cannot be written.

    Example:
    >>> import keras, kmp, numpy as np
    >>> with kmp.enable():
    ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    >>> y = np.full((8, 1), 1e4)  # at the loss scale 2^15, gradients exceed 65504
    >>> history = model.fit(np.ones((8, 4)), y, verbose=0, callbacks=[kmp.callbacks.Monitor()]).history
    >>> history["loss_scale"], history["overflow_count"]
    ([16384.0], [1])
    """

    parts: Collection[str] = PARTS
    first_updates = 5  # samples that measure the update of the weights
    updates_every = (
        10  # in samples after these; measuring an update takes several times as long as sampling
    )
    budget = 4_000_000  # bytes of records, in memory or on disk, after which the interval doubles

    def __init__(
        self,
        log_dir: PathLike | None = None,
        every_n_steps: int = 250,
        optimizer: LossScaleOptimizer | None = None,
        *,
        variables: str | list[str] | None = None,
        reference: str | None = AUTO,
    ) -> None:
        super().__init__(optimizer)
        self.log_dir = None if log_dir is None else validation.local_path("log_dir", log_dir)
        self.every_n_steps = min(validation.positive_integer("every_n_steps", every_n_steps), NEVER)
        self.variables = validation.patterns("variables", variables)
        self.reference = (
            None if reference is None else validation.one_of("reference", reference, (AUTO,))
        )
        self.run = Run()
        self.last_replay: Replay | None = None
        self._replayer: BatchReplayer | None = None
        self._weights_before: dict[str, Any] = {}  # before the call whose update is measured
        self._writer: LogWriter | None = None
        self._lock: FileLock | None = None
        self._previous: Snapshot
        self._sampling_interval: int
        self._first_epoch = 0

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copy has: the settings and the records, without the model, which `fit` sets."""
        return super().__getstate__() | {"_writer": None, "_lock": None, "_replayer": None}

    def on_train_begin(self, logs: Logs = None) -> None:
        self._close()  # an interrupted training leaves the log open and its folder locked
        super().on_train_begin(logs)
        if not self.is_active:
            self.run.rows.clear()
            self.run.header = {}

    def _prepare(self) -> bool:
        self._lock = LogWriter.check(self.log_dir) if self.log_dir and self._is_chief else None
        is_new = False
        if GRADIENTS in self.parts:
            self._selected_variables()  # raises for a bad pattern before anything is prepared
            is_new = self.optimizer.sampler.start(self, NEVER)
        is_new = super()._prepare() or is_new
        can_replay = (
            self.optimizer is self.model.optimizer
            and self.model.distribute_strategy.num_replicas_in_sync == 1
        )
        if self.reference and can_replay:
            self._replayer = BatchReplayer(self.model, self.optimizer)
            is_new = self._replayer.is_new or is_new
        self.run.header = header(self.model, self.optimizer)
        return is_new

    def _start(self) -> None:
        snapshot = self.optimizer.snapshot()
        # The first record has all counts by variable.
        counts: dict[str, Any] = {"overflows_by_variable": {}, "overflow_origins_by_variable": {}}
        self._previous = replace(snapshot, loss_dtype=None, **counts)
        self._start_step = snapshot.step
        self._is_open = False
        # The bytes of records and TensorBoard's histograms, in memory or on disk.
        self._size = sum(record_size(row) for row in self.run.rows if row["step"] <= snapshot.step)
        # `History` and `CSVLogger` take the keys of the first epoch, so all keys exist from the
        # start.
        initial = {
            LOSS_SCALE: snapshot.loss_scale,
            OVERFLOWS: snapshot.overflow_count,
            GRADIENTS: math.nan,
        }
        self._logged = {part: initial[part] for part in self.parts}
        self._last_sampled_step = snapshot.sample.step if snapshot.sample else 0
        self._retries_left = _RETRIES
        self._samples_until_update = self._measured_updates = 0
        self._sample_next_step()
        self.last_replay = None
        if self._replayer:
            params = self.params or {}  # without `steps` if Keras does not know them
            epochs = (params.get("epochs") or 0) - self._first_epoch
            self._replayer.begin(snapshot, epochs * (params.get("steps") or 0))

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        if not self.has_trained:
            self._first_epoch = epoch
        super().on_epoch_begin(epoch, logs)
        if not self.is_active:
            return
        self._open_log()
        if GRADIENTS in self.parts and epoch % (self._interval // self.every_n_steps) == 0:
            # Sample the first step of an epoch without a step that is divisible by the interval.
            step, batches = (
                self._previous.step,
                (self.params or {}).get("steps") or 0,
            )  # 0 while Keras does not know
            if (step + batches) // self._interval == step // self._interval:
                self._sample_next_step()

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        is_sampled = (
            self.is_active
            and GRADIENTS in self.parts
            and self._batches_left <= self.model.steps_per_execution
        )
        if is_sampled and self._samples_until_update <= 0:
            self._steps_before = self.optimizer.counters.read_counts().step
            # The updates of the weights so far; a step that is skipped or accumulates gradients
            # adds none.
            self._updates_before = int(self.optimizer.iterations.numpy())
            self._weights_before = copies_of(self._selected_variables())

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        super().on_train_batch_end(batch, logs)
        self._weights_before = {}
        if self.is_active and logs is not None:
            logs.update(self._logged)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.is_active and logs is not None:
            learning_rate = getattr(self.optimizer.inner_optimizer, "learning_rate", None)
            record = metrics_record(
                self._previous.step, epoch, {"learning_rate": learning_rate} | logs
            )
            if record["metrics"] and record["step"]:  # without a step the run has not begun
                self.add_record(record)
            logs.update(self._logged)

    def on_train_end(self, logs: Logs = None) -> None:
        if not self.is_active:
            return
        if self.has_trained:
            self._replay(is_last=True)
            name = type(self).__name__
            if self._previous.step == self._start_step:
                user_messages.warn(
                    f"{name}: the optimizer it reads took no step. If the model trains with"
                    " optimizers other than `model.optimizer`, wrap each with kmp.wrap and pass"
                    f" the one to read: {name}(optimizer=...)."
                )
            elif GRADIENTS in self.parts and self._last_sampled_step <= self._start_step:
                user_messages.warn(
                    f"{name}: no gradients were sampled, because the training step was traced"
                    " before `on_train_begin`. Call `on_train_begin` first, or trace the step"
                    " again: step = tf.function(step.python_function)."
                )
        self._close()
        self.optimizer.sampler.stop(self)

    def read(self) -> None:
        """Reads the optimizer now, and records its state if it has taken a step since the last record."""
        if self.optimizer.counters.read_counts().step == self._previous.step:
            self._plan_next_read(self._previous.step)
            return
        snapshot = self.optimizer.snapshot()
        record = record_of(snapshot, self._previous, self.parts)
        sample = self._new_sample(snapshot)
        if sample is not None:
            zeros, norm = sample.histogram.zero_fraction, sample.total_norm
            found = {"step": sample.step, "grad_zeros": zeros, "grad_norm": norm, "sample": sample}
            if sample.step == snapshot.step:
                record |= found
            else:  # an execution of several steps
                self.add_record(found)
            if math.isfinite(norm):
                self._logged[GRADIENTS] = norm
        if len(record) > 1:
            self.add_record(record)
        self._previous = snapshot
        self._logged |= {key: record[key] for key in (LOSS_SCALE, OVERFLOWS) if key in record}
        self._plan_next_read(snapshot.step)
        # The first steps often overflow. Sample until one does not: a short training has few other
        # samples.
        if sample is not None and self._retries_left:
            self._retries_left -= 1
            self._sample_next_step()
        self._replay()

    def add_record(self, record: Record) -> None:
        """Adds a record to `run` and the log; without a `step`, that of the last step that was read."""
        if self.has_trained and "layers" not in self.run.settings:  # built by the first step
            self.run.header = header(self.model, self.optimizer, has_trained=True)
        self._open_log()
        record = {"step": self._previous.step} | record
        self.run.append(record)
        self._size += record_size(record) + (self._writer.write(self.run) if self._writer else 0)

    def replay_again(self, usable_scale: float | None) -> Record:
        """Replays the last batch once more, after a change of the model. Returns the keys of a record."""
        assert self._replayer is not None
        return self._replayer.replay_again(self._previous, self._selected_variables(), usable_scale)

    @property
    def earlier_fallbacks(self) -> list[Record]:
        """The `fallback` records in the log that this training continues; after the first `on_epoch_begin`."""
        return self._writer.fallbacks if self._writer else []

    def write_verdict(self) -> None:
        """Writes what `kmp.advise` makes of the log for TensorBoard, if the log is open."""
        if self._writer is not None:
            self._writer.write_verdict()

    def replay_stuck(self) -> None:
        """Replays the last batch that was captured, of a training that is stuck."""
        self.read()
        if self._replayer:
            self._add_replay(
                self._replayer.replay_stuck(self._previous, self._selected_variables())
            )

    def _replay(self, is_last: bool = False) -> None:
        if self._replayer:
            self._add_replay(
                self._replayer.replay_if_due(
                    self._previous, self._selected_variables(), is_last=is_last
                )
            )

    def _add_replay(self, found: Record | None) -> None:
        if found:
            self.last_replay = found.get("replay")
            self.add_record(found)

    def _open_log(self) -> None:
        """Makes the run and the log continue after the step at which this training began."""
        if not self._is_open:
            self._is_open = True
            self.run.rows[:] = [row for row in self.run.rows if row["step"] <= self._start_step]
            if self.log_dir and self._is_chief:
                self._writer = self._writer or LogWriter(self, self.log_dir, self._start_step)
                self._size = max(self._size, self._writer.size_at_start)

    def _close(self) -> None:
        self._weights_before = {}
        if self._replayer:
            self._replayer.end()
        if self._writer:
            self._writer.close()
        self._replayer = self._writer = self._lock = None

    @property
    def _interval(self) -> int:
        """The number of steps from read to read: `every_n_steps`, and more in a long run."""
        return int(
            min(self.every_n_steps * 2 ** min(self._size // self.budget, _MOST_DOUBLINGS), NEVER)
        )

    def _plan_next_read(self, step: int) -> None:
        interval = self._interval
        self._batches_left = interval - step % interval
        if GRADIENTS in self.parts and interval != self._sampling_interval:
            self._sampling_interval = interval
            self.optimizer.sampler.start(self, interval)

    def _sample_next_step(self) -> None:
        self._batches_left = 1
        if GRADIENTS in self.parts:
            # Another callback may have trained since the last read.
            self._requested_step = self.optimizer.counters.read_counts().step + 1
            self._sampling_interval = self._interval
            self.optimizer.sampler.start(self, self._sampling_interval, first=self._requested_step)

    def _selected_variables(self) -> dict[str, Any]:
        """Returns the variables to sample by path; none before the model is built."""
        by_path = self.optimizer.variables_by_path()
        if not by_path and self.optimizer is self.model.optimizer and self.model.built:
            variables = (
                self.model.trainable_variables
            )  # the first step builds the optimizer on these
            by_path = dict(zip(paths_of(variables), variables, strict=True))
        if self.variables is None or not by_path:
            return by_path
        paths = list(by_path)
        return {
            paths[index]: by_path[paths[index]] for index in matching_indices(self.variables, paths)
        }

    def _new_sample(self, snapshot: Snapshot) -> GradientSample | None:
        """Returns the sample of a snapshot, with the update of the weights if it was measured.

        `None` if it was recorded before, or is that of another callback with another interval.
        """
        sample = snapshot.sample
        if GRADIENTS not in self.parts or sample is None:
            return None
        last, interval = self._last_sampled_step, self._sampling_interval
        is_due = (
            sample.step // interval > last // interval or last < self._requested_step <= sample.step
        )
        if not is_due:
            return None
        self._last_sampled_step = sample.step
        if sample.histogram.is_finite:
            self._retries_left = 0
        self._samples_until_update -= 1
        if self.variables is not None:
            sample = sample.select([name for name in self._selected_variables() if name in sample])
        is_measured = self._weights_before and sample.step > self._steps_before
        if is_measured and int(self.optimizer.iterations.numpy()) > self._updates_before:
            sample = with_updates(sample, self._weights_before, self._selected_variables())
            self._measured_updates += 1
            self._samples_until_update = (
                self.updates_every - 1 if self._measured_updates >= self.first_updates else 0
            )
        elif not self._measured_updates:  # the first step may have built the model
            weights = self._selected_variables()
            sample = replace(sample, weight_norm=with_updates(sample, weights, weights).weight_norm)
        return sample
