"""Reads the optimizer of a training, and writes the records."""

import math
from dataclasses import replace
from typing import Any

import keras
from filelock import FileLock

from kmp.callbacks.log_writer import LogWriter
from kmp.callbacks.monitor_settings import MonitorSettings
from kmp.callbacks.sample_schedule import SampleSchedule
from kmp.callbacks.training_records import (
    GRADIENTS,
    LOSS_SCALE,
    OVERFLOWS,
    Logs,
    header,
    layer_classes,
    metrics_record,
    record_of,
    record_size,
)
from kmp.gradients.gradient_sampler import paths_of
from kmp.gradients.sampling_clock import NEVER
from kmp.guarding.guarded_step import Repair, guarded_step_of, trained_optimizers
from kmp.optimizer import LossScaleOptimizer
from kmp.records import GradientSample, Record, Run, Snapshot
from kmp.records.gradient_sample import layer_of
from kmp.records.layer_names import stable_name, stable_names
from kmp.utils import user_messages
from kmp.utils.names import matching_indices

BUDGET = 4_000_000  # bytes of records, in memory or on disk, after which the interval doubles
_MOST_DOUBLINGS = 40


class Recorder:
    """The records of one training.

    Args:
        settings: The settings of the monitor.
        run: Gets the records.
        model: The model in training.
        optimizer: The optimizer to read.

    Attributes:
        previous: The last snapshot.
        logged: What is added to Keras' `logs`.
        has_trained: Whether the training has had a batch.
        batches_left: The batches until the next read is due; each counts as one step.
        repairs_recorded: How many of the model's repairs have a record, or are of an earlier
            training.
    """

    def __init__(
        self,
        settings: MonitorSettings,
        run: Run,
        model: keras.Model,
        optimizer: LossScaleOptimizer,
    ) -> None:
        self._settings, self._model, self._optimizer = settings, model, optimizer
        self.run = run
        self.sampling: SampleSchedule | None = None
        if GRADIENTS in settings.recorded:
            selects_all = settings.variables is None
            self.sampling = SampleSchedule(optimizer, self.selected_variables, selects_all)
        self._writer: LogWriter | None = None
        self._lock: FileLock | None = None
        self.has_trained = False
        self.previous: Snapshot

    @property
    def _is_chief(self) -> bool:
        """Whether this process writes the files, of several workers."""
        return self._model.distribute_strategy.extended.should_checkpoint

    def prepare(self) -> bool:
        """Prepares files and the training step. Returns whether it must be traced again."""
        if self._settings.log_dir and self._is_chief:
            self._lock = LogWriter.check(self._settings.log_dir)
        is_new = False
        if self.sampling:
            self.selected_variables()  # raises for a bad pattern before anything is prepared
            is_new = self.sampling.prepare()
        self._set_header()
        return is_new

    def start(self) -> None:
        """Begins at the step of the optimizer."""
        snapshot = self._optimizer.snapshot()
        # The first record has all counts by variable.
        self.previous = replace(
            snapshot, loss_dtype=None, overflows_by_variable={}, overflow_origins_by_variable={}
        )
        self.first_step = snapshot.step
        self._is_open = False
        rows = self._rows_before()
        # Where the records begin, in a training that may continue another one.
        self._began = rows[0].step - 1 if rows else self.first_step
        # The bytes of records and TensorBoard's histograms, in memory or on disk.
        self._size = sum(map(record_size, rows))
        # `History` and `CSVLogger` take the keys of the first epoch, so all keys exist from the
        # start.
        initial: dict[str, float] = {
            LOSS_SCALE: snapshot.loss_scale,
            OVERFLOWS: snapshot.overflow_count,
            GRADIENTS: math.nan,
        }
        self.logged = {key: initial[key] for key in self._settings.recorded}
        self.name_layers()
        self.batches_left = 1
        self.repairs_recorded = len(self._repairs)
        if self.sampling:
            self.sampling.start(snapshot, self._interval)

    def name_layers(self) -> None:
        """Adds the keys of the norms by layer to `logged`, if asked for and the model is built."""
        self._keys_of_layers: dict[str, str] = {}
        variables = self.selected_variables()
        if self.sampling is None or not self._settings.log_norms or not variables:
            return
        names = stable_names(layer_classes(self._model))
        for layer in map(layer_of, variables):
            self._keys_of_layers[layer] = f"{GRADIENTS}/{stable_name(layer, names)}"
        self.logged |= dict.fromkeys(self._keys_of_layers.values(), math.nan)

    def _rows_before(self) -> list[Record]:
        return [row for row in self.run.rows if row.step <= self.first_step]

    def open_log(self) -> None:
        """Makes the run and the log continue after the step at which this training began."""
        if self._is_open:
            return
        self._is_open = True
        self.run.rows[:] = self._rows_before()
        if self._settings.log_dir and self._is_chief:
            if self._writer is None:
                self._writer = LogWriter(self, self._settings.log_dir, self.first_step)
            self._size = max(self._size, self._writer.size_at_start)

    @property
    def earlier_fallbacks(self) -> list[Record]:
        """The `fallback` records in the log that this training continues."""
        return self._writer.fallbacks if self._writer else []

    def begin_epoch(self, epoch: int, batches: int) -> None:
        """Samples the first step of an epoch without a step that is divisible by the interval.

        Args:
            epoch: The number of the epoch.
            batches: Those of an epoch; 0 while Keras does not know.
        """
        if self.sampling is None or epoch % (self._interval // self._settings.every_n_steps):
            return
        step = self.previous.step
        if (step + batches) // self._interval == step // self._interval:
            self.batches_left = 1
            self.sampling.sample_next_step(self._interval)

    def begin_batch(self) -> None:
        """Prepares to measure the update of a call that is read after it."""
        if self.sampling and self.batches_left <= self._model.steps_per_execution:
            self.sampling.begin_batch()

    def end_batch(self) -> None:
        """Frees what `begin_batch` prepared."""
        if self.sampling:
            self.sampling.end_batch()

    def read(self, step: int) -> bool:
        """Records the state of the optimizer if it has taken a step. Returns whether.

        Args:
            step: The number of steps that it has taken.
        """
        if step == self.previous.step:
            self._plan_next_read(step)
            return False
        snapshot = self._optimizer.snapshot()
        record = record_of(snapshot, self.previous, self._settings.recorded)
        sample = self.sampling.take(snapshot) if self.sampling else None
        if sample is not None:
            self._add_sample(sample, record)
        if record != Record(step=snapshot.step):  # else nothing is recorded of this step
            self.add(record)
        self.previous = snapshot
        counters = [key for key in (LOSS_SCALE, OVERFLOWS) if key in self._settings.recorded]
        self.logged |= {key: getattr(record, key) for key in counters}
        self._plan_next_read(snapshot.step)
        if sample is not None and self.sampling and self.sampling.needs_another():
            self.batches_left = 1
            self.sampling.sample_next_step(self._interval)
        return True

    @property
    def _repairs(self) -> list[Repair]:
        guard = guarded_step_of(self._model)
        return guard.repairs if guard else []

    @property
    def has_new_repairs(self) -> bool:
        """Whether the model was repaired, maybe by another callback, and no record has it."""
        return len(self._repairs) > self.repairs_recorded

    def add_repairs(self) -> None:
        """Records the new repairs of the model at the last step that was read."""
        new = self._repairs[self.repairs_recorded :]
        self.repairs_recorded = len(self._repairs)
        for repair in new:
            step, layers = self.previous.step, list(repair.layers)
            self.add(Record(step=step, fallback=layers, fallback_reason=repair.reason))

    def _add_sample(self, sample: GradientSample, record: Record) -> None:
        """Adds a sample to the record of its step, or before it, as a record of its own."""
        # Not that of the last step in an execution of several steps.
        is_of_step = sample.step == record.step
        target = record if is_of_step else Record(step=sample.step)
        target.grad_zeros = sample.histogram.zero_fraction
        target.grad_norm = sample.total_norm
        target.sample = sample
        if not is_of_step:
            self.add(target)
        norms = {GRADIENTS: target.grad_norm}
        if self._keys_of_layers:
            layers = sample.by_layer()
            keys = [self._keys_of_layers[layer] for layer in layers]
            norms |= zip(keys, layers.norm.tolist(), strict=True)
        self.logged |= {key: value for key, value in norms.items() if math.isfinite(value)}

    def add(self, record: Record) -> None:
        """Adds a record to `run` and the log."""
        # The first step builds the layers, and the optimizer of a loop.
        if self.has_trained and not self._is_header_of_trained:
            self._set_header()
        self.open_log()
        self.run.append(record)
        self._size += record_size(record)
        if self._writer:
            self._size += self._writer.write(self.run)

    def _set_header(self) -> None:
        self._is_header_of_trained = self.has_trained
        self.run.header = header(
            self._model,
            self._optimizer,
            replay=self._settings.replay,
            has_trained=self.has_trained,
        )

    def end_epoch(self, epoch: int, logs: Logs) -> None:
        """Records the metrics of an epoch."""
        learning_rate = getattr(self._optimizer.inner_optimizer, "learning_rate", None)
        metrics = {key: value for key, value in (logs or {}).items() if key not in self.logged}
        values = {"learning_rate": learning_rate, **metrics}
        record = metrics_record(self.previous.step, epoch, values)
        if record.metrics and record.step:  # without a step the run has not begun
            self.add(record)

    def warn_if_nothing_was_recorded(self) -> None:
        """Warns at the end of a training in which no step was taken, or none was sampled."""
        name = self._settings.callback
        if self.previous.step == self.first_step:
            user_messages.warn(
                f"{name}: the optimizer it reads took no step. If the model trains with optimizers"
                " other than `model.optimizer`, wrap each with kmp.wrap and pass the one to read:"
                f" {name}(optimizer=...)."
            )
        elif self.sampling and self.sampling.last_step <= self.first_step:
            user_messages.warn(
                f"{name}: no gradients were sampled, because the training step was traced before"
                " `on_train_begin`. Call `on_train_begin` first, or trace the step again: step ="
                " tf.function(step.python_function)."
            )

    def write_verdict(self) -> None:
        """Writes what `kmp.advise` makes of the log for TensorBoard, if the log is open."""
        if self._writer is not None:
            self._writer.write_verdict()

    def close(self) -> None:
        """Closes the files, and stops sampling."""
        if self._writer:
            self._writer.close()
        self._writer = self._lock = None
        if self.sampling:
            self.sampling.end_batch()
            self.sampling.stop()

    def selected_variables(self) -> dict[str, Any]:
        """Returns the variables to sample by path; none before the model is built."""
        by_path = self._optimizer.variables_by_path()
        # One of several may train a part of them.
        trains_all = list(trained_optimizers(self._model).values()) == [self._optimizer]
        if not by_path and trains_all and self._model.built:
            variables = self._model.trainable_variables  # the first step builds the optimizer
            by_path = dict(zip(paths_of(variables), variables, strict=True))
        if self._settings.variables is None or not by_path:
            return by_path
        paths = list(by_path)
        selected = [paths[index] for index in matching_indices(self._settings.variables, paths)]
        return {path: by_path[path] for path in selected}

    @property
    def _interval(self) -> int:
        """The number of steps from read to read: `every_n_steps`, and more in a long run."""
        doublings = min(self._size // BUDGET, _MOST_DOUBLINGS)
        return int(min(self._settings.every_n_steps * 2**doublings, NEVER))

    def _plan_next_read(self, step: int) -> None:
        """Plans to read at the next step that the interval divides.

        And before, each time the steps have doubled: a run of any length has records of its second
        half. Not once the records are so large that the interval grows.
        """
        interval, steps = self._interval, step - self._began
        self.batches_left = interval - step % interval
        doubled = 1 << steps.bit_length()
        is_early = doubled - steps < self.batches_left and doubled < self._settings.every_n_steps
        is_early &= interval == self._settings.every_n_steps
        if is_early:
            self.batches_left = doubled - steps
        if self.sampling:
            self.sampling.follow(interval, step + self.batches_left if is_early else 0)
