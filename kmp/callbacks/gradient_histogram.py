"""The callback that samples gradients."""

import math
from typing import Any

from kmp.callbacks.batch_replayer import BatchReplayer
from kmp.callbacks.optimizer_callback import Logs, OptimizerCallback, PathLike
from kmp.gradients import NEVER, UpdateWatch, paths_of, with_weight_norms
from kmp.optimizer import LossScaleOptimizer
from kmp.records import Snapshot
from kmp.utils import matching_indices, validation

AUTO = "auto"
_RETRIES = 16  # as many halvings lead from the default loss scale to 1


class GradientHistogram(OptimizerCallback):
    """Samples gradients at regular steps: a histogram of binary exponents for each variable.

    The compiled step counts the elements on the device. In `logs`:

    - `grad_norm`: the L2 norm of all gradients, without the loss scale, of the last sample in which it is finite; NaN
      before the first.

    `run.samples` and the log have the samples, with the norm and amax of each gradient, and `grad_zeros`, the fraction
    of gradient elements that are exactly zero: an upper bound on the fraction that float16 flushed to zero. TensorBoard
    has the histograms, per layer and for all layers. The first five samples and every tenth after them also measure the
    weight update of the step; for a model that is not built, the second sample is the first that does. A step that
    updates no weights, because it was skipped or accumulates gradients, has no update to measure, so the next sample
    measures it. With `steps_per_execution`, the update is that of the whole execution.

    Samples are rounded and compressed in the log, see `kmp.records`. A long run takes fewer of them: each time its
    samples, or those of the log that it continues, have grown by 3 MB there, their interval doubles. The first steps of
    epochs are thinned in the same way. So the log of a million steps stays below 50 MB, also for a model with thousands
    of variables.

    Does nothing for a model that needs no loss scale and is compiled without `kmp.LossScaleOptimizer`.

    Args:
        log_dir: Folder for `kmp.jsonl` and TensorBoard's files, or `None` to write no file.
        every_n_steps: Integer, at least 1. Samples the first step of `fit`, and further ones until one does not
            overflow, at most 16; each step divisible by this number; and the first step of an epoch without such a
            step. Fewer in a long run, see above. An execution of several steps keeps its last sample.
        optimizer: The `kmp.LossScaleOptimizer` to read, for a model with several. Defaults to the model's.
        variables: The variables to sample: a path as in `variable.path`, a pattern with `*` and `?` as in a shell, such
            as `"*/kernel"`, or a list of these. Defaults to all.
        reference: `"auto"` replays at most 32 examples of a batch of the training, eagerly, in the precision of the
            model and in float32, when many gradients are zero or steps are skipped, at most three times for each. This
            finds what float16 flushed to zero, the operation that first returned NaN or Inf, and the layers that have
            to compute in float32; `kmp.advise` reports it. Model and seeds stay unchanged. With a `train_step` of the
            user's own, only the forward pass is replayed, after a non-finite loss. Not with several replicas. Or
            `None` for no replay.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is outside its range; in `on_train_begin`, if a float16 model has no
            `kmp.LossScaleOptimizer`, or if a pattern matches no variable.
        OSError: In `on_train_begin`, if `log_dir` cannot be written.

    Example:
    >>> import keras, kmp, numpy as np
    >>> with kmp.enable():
    ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    >>> histogram = kmp.callbacks.GradientHistogram(variables="*/kernel")
    >>> _ = model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0, callbacks=[histogram])
    >>> histogram.run.samples[0]
    <GradientSample step=1 loss_scale=32768: 1 variables>
    """

    first_updates = 5  # samples that measure the update
    updates_every = 10  # in samples after these; measuring an update takes several times as long as sampling

    def __init__(
        self,
        log_dir: PathLike | None = None,
        every_n_steps: int = 250,
        optimizer: LossScaleOptimizer | None = None,
        *,
        variables: str | list[str] | None = None,
        reference: str | None = AUTO,
    ) -> None:
        super().__init__(log_dir, every_n_steps, optimizer)
        self.variables = validation.patterns("variables", variables)
        self.reference = None if reference is None else validation.one_of("reference", reference, (AUTO,))
        self._replayer = BatchReplayer() if self.reference == AUTO else None
        self._update_watch = UpdateWatch()
        self._interval = self.every_n_steps

    def _prepare_train_step(self, optimizer: LossScaleOptimizer) -> bool:
        self._selected_variables()  # raises for a bad pattern before anything is prepared
        is_new = optimizer.prepare_sampling(self.variables)
        is_new = super()._prepare_train_step(optimizer) or is_new
        if self._replayer and optimizer is self.model.optimizer:
            is_new = self._replayer.install(self.model, optimizer) or is_new
        return is_new

    def _begin_training(self) -> None:
        super()._begin_training()
        sample = self._last_snapshot.sample
        self._last_sampled_step = sample.step if sample else 0
        self._samples_next_step = True
        self._has_finite_sample, self._retries_left = False, _RETRIES
        self._samples_until_update = self._measured_updates = 0
        self._epochs_without_sample = 0
        self._sample_next_step()
        if self._replayer:
            self._replayer.begin(self._last_snapshot)

    def read(self, is_epoch_end: bool = False) -> None:
        previous = self._last_sampled_step
        super().read(is_epoch_end)
        # The first steps often overflow. Sample until one does not: a short training has few other samples.
        if self._last_sampled_step != previous and self._retries_left and not self._has_finite_sample:
            self._retries_left -= 1
            self._samples_next_step = True
            self._sample_next_step()
            self._next_read = self._requested_step
        if self._replayer:
            self._replay()

    def _begin_epoch(self) -> None:
        super()._begin_epoch()
        self._update_interval()
        step = self._last_snapshot.step
        if (step + self._batches_per_epoch) // self.every_n_steps == step // self.every_n_steps:
            self._epochs_without_sample += 1
            if self._epochs_without_sample % self.monitor.samples.stride == 0:
                self._samples_next_step = True
                self._sample_next_step()

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        if not self._is_active or self._samples_until_update > 0:
            return
        if self._samples_next_step or self._is_sampled_next:
            self._armed_at = self.optimizer.counters.read_counts().steps
            self._updates_before = self._applied_updates
            self._update_watch.arm(self._selected_variables())

    def _end_batch(self, batch: int) -> None:
        self._samples_next_step = False
        super()._end_batch(batch)
        if self._update_watch.is_armed and self._batches_since_read:  # not read above, because the step was estimated
            self.read()
        self._update_watch.disarm()

    def on_train_end(self, logs: Logs = None) -> None:
        if self._is_active and self._has_trained and self._replayer:
            self._replay(is_last=True)
        super().on_train_end(logs)

    def _end_training(self) -> None:
        self._update_watch.disarm()
        self.optimizer.stop_sampling(self)
        if self._replayer:
            self._replayer.end()
        super()._end_training()

    def _append_record(self, record: dict[str, Any]) -> None:
        super()._append_record(record)
        self._update_interval()

    def _update_interval(self) -> None:
        if self._interval != self._thinned_interval:
            self._interval = self._thinned_interval
            self.optimizer.start_sampling(self, self._interval, next_step=False)

    def _sample_next_step(self) -> None:
        self._interval = self._thinned_interval
        self._requested_step = self._last_snapshot.step + 1
        self.optimizer.start_sampling(self, self._interval)

    @property
    def _thinned_interval(self) -> int:
        """The number of steps from sample to sample: `every_n_steps`, and more in a long run."""
        return min(self.every_n_steps * self.monitor.samples.stride, NEVER)

    def _is_due(self, step: int) -> bool:
        """Whether to record a sample: in a long run, not one that the optimizer took for another callback."""
        if self._interval == self.every_n_steps:
            return step != self._last_sampled_step
        is_on_interval = step // self._interval > self._last_sampled_step // self._interval
        return is_on_interval or self._last_sampled_step < self._requested_step <= step

    @property
    def _is_sampled_next(self) -> bool:
        """Whether the next execution, by the estimated step, takes a step that is divisible by the interval."""
        before = self._last_snapshot.step + self._steps_per_batch * self._batches_since_read
        after = before + max(1.0, self._steps_per_batch * self.model.steps_per_execution)
        return after // self._interval > before // self._interval

    @property
    def _applied_updates(self) -> int:
        """The updates of the weights so far; a step that is skipped or accumulates gradients adds none."""
        return int(self.optimizer.iterations.numpy())

    def _initial_values(self, snapshot: Snapshot) -> dict[str, float]:
        return {"grad_norm": math.nan}

    def _selected_variables(self) -> dict[str, Any]:
        by_path = self.optimizer.variables_by_path()
        if not by_path and self.optimizer is self.model.optimizer and self.model.built:
            variables = self.model.trainable_variables  # the first step builds the optimizer on these
            by_path = dict(zip(paths_of(variables), variables, strict=True))
        if self.variables is None or not by_path:
            return by_path
        paths = list(by_path)
        return {paths[index]: by_path[paths[index]] for index in matching_indices(self.variables, paths)}

    def _record_of(self, snapshot: Snapshot) -> dict[str, Any] | None:
        sample = snapshot.sample
        if sample is None or not self._is_due(sample.step):
            return None
        self._last_sampled_step = sample.step
        self._has_finite_sample |= sample.histogram.is_finite
        self._samples_until_update -= 1
        if self.variables is not None:
            sample = sample.select(self.variables)
        is_of_armed_execution = self._update_watch.is_armed and sample.step > self._armed_at
        if is_of_armed_execution and self._applied_updates > self._updates_before:
            sample = self._update_watch.measure(sample)
            self._measured_updates += 1
            self._samples_until_update = self.updates_every - 1 if self._measured_updates >= self.first_updates else 0
        elif not self._measured_updates:  # the first step may have built the model
            sample = with_weight_norms(sample, self._selected_variables())
        values = {"grad_zeros": sample.histogram.zero_fraction, "grad_norm": sample.total_norm}
        if math.isfinite(sample.total_norm):
            self._logged_values = {"grad_norm": sample.total_norm}
        return {"step": sample.step} | values | {"sample": sample}

    def _replay(self, is_last: bool = False) -> None:
        assert self._replayer is not None
        snapshot, variables = self._last_snapshot, self._selected_variables()
        record = self._replayer.replay_if_due(self.model, snapshot, variables, is_last=is_last)
        if record:
            self._append_record({"step": snapshot.step} | record)
