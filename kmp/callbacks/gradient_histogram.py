"""The callback that samples gradients."""

from typing import Any

from kmp.callbacks.optimizer_callback import Logs, OptimizerCallback, PathLike
from kmp.gradients import UpdateWatch, check_batch, float32_sample, paths_of
from kmp.optimizer import LossScaleOptimizer
from kmp.records import Snapshot
from kmp.utils import matching, validation


class GradientHistogram(OptimizerCallback):
    """Counts gradient elements by binary exponent, in the compiled step, at a cadence, for each variable.

    In `logs`: `grad_zeros`, the share of elements that are exactly zero: an upper bound on what float16 flushed; and in
    an epoch's logs `grad_norm`, the L2 norm of all gradients of the last sample, without the loss scale. The samples,
    with the size of each gradient, are in `run.samples` and in the log; TensorBoard has the histograms, by layer and in
    all. The first sample (of a model that is not built yet, the second) and every tenth after it also tell what the
    step did to the weights; with `steps_per_execution`, what the execution did which holds the sampled step.

    Args:
        log_dir: Folder for `kmp.jsonl` and TensorBoard's files, or `None` to write no file.
        every_n_steps: Integer, at least 1: sampled are the first step of a `fit`, each step that this divides, and the
            first step of an epoch that would have no sample. An execution of several steps keeps its last sample.
        optimizer: The `kmp.LossScaleOptimizer` to read, for a model that holds several; its own by default.
        variables: Which variables to sample: a path as in `variable.path`, a pattern (`*` and `?` as in a shell, such
            as `"*/kernel"`), or a list of them; all by default.
        reference: A batch `(x, y)` or `(x, y, sample_weight)`, to take through the model in float32, eagerly and
            without leaving a trace, after the first step and at each epoch's end: it tells what float16 flushed to zero
            from what is zero anyway. Best as many examples as a training batch has: the mean over more of them has
            fewer zeros. For models that train with the loss they were compiled with. None by default.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If `every_n_steps` is below 1; in `on_train_begin`, if the optimizer is not kmp's, or a pattern
            matches no variable, or `reference` does not fit (a model that is not built yet tells in its first step).
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

    updates_every = 10  # samples: measuring an update takes several times as long as sampling

    def __init__(
        self,
        log_dir: PathLike | None = None,
        every_n_steps: int = 250,
        optimizer: LossScaleOptimizer | None = None,
        *,
        variables: str | list[str] | None = None,
        reference: tuple[Any, ...] | None = None,
    ) -> None:
        super().__init__(log_dir, every_n_steps, optimizer)
        self.variables = validation.patterns("variables", variables)
        self.reference = None if reference is None else validation.batch("reference", reference)
        self._updates = UpdateWatch()

    def _prepare(self, optimizer: LossScaleOptimizer) -> bool:
        self._chosen_variables()  # an error of a pattern, or of the batch, comes before anything is prepared
        if self.reference is not None and self.model.built:
            check_batch(self.model, self.reference)
        is_new = optimizer.prepare_sampling(self.variables)
        return super()._prepare(optimizer) or is_new

    def _start(self) -> None:
        super()._start()
        self._sampled = self._last.sample.step if self._last.sample else 0
        self._is_first_due = True
        self._samples_to_update = 0
        self._is_reference_due = self.reference is not None
        self.optimizer.start_sampling(self, self.every_n_steps)

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        super().on_epoch_begin(epoch, logs)
        at_end = self._last.step + self._steps_in_epoch
        if at_end // self.every_n_steps == self._last.step // self.every_n_steps:
            self._is_first_due = True  # or the epoch would have no sample
            self.optimizer.start_sampling(self, self.every_n_steps)

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        if self._samples_to_update <= 0 and (self._is_first_due or self._is_sampled_next):
            self._armed_at = self.optimizer.counters.read_steps()
            self._updates.arm(self._chosen_variables())

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._is_first_due = False
        super().on_train_batch_end(batch, logs)
        if self._updates.is_armed:
            self.read()
            self._updates.disarm()
        if self._is_reference_due:
            self._measure_reference()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        super().on_epoch_end(epoch, logs)
        norm = self.run.last("grad_norm")
        if logs is not None and norm is not None:
            logs["grad_norm"] = norm
        if self.reference is not None:
            self._measure_reference()

    def _stop(self) -> None:
        self._updates.disarm()
        self.optimizer.stop_sampling(self)
        super()._stop()

    @property
    def _is_sampled_next(self) -> bool:
        """Whether the coming execution is reckoned to take a step that is sampled."""
        done = self._last.step + self._steps_per_batch * self._batches_since
        coming = done + max(1.0, self._steps_per_batch * self.model.steps_per_execution)
        return coming // self.every_n_steps > done // self.every_n_steps

    def _chosen_variables(self) -> dict[str, Any]:
        found = self.optimizer.variables_by_path()
        if not found and self.optimizer is self.model.optimizer and self.model.built:  # it is built in its first step
            variables = self.model.trainable_variables
            found = dict(zip(paths_of(variables), variables, strict=True))
        if self.variables is None or not found:
            return found
        names = list(found)
        return {names[place]: found[names[place]] for place in matching(self.variables, names)}

    def _row(self, snapshot: Snapshot) -> dict[str, Any] | None:
        sample = snapshot.sample
        if sample is None or sample.step == self._sampled:
            return None
        self._sampled = sample.step
        self._samples_to_update -= 1
        if self.variables is not None:
            sample = sample.select(self.variables)
        if self._updates.is_armed and sample.step > self._armed_at:
            sample = self._updates.measure(sample)
            self._samples_to_update = self.updates_every - 1
        self._keys = {"grad_zeros": sample.histogram.zero_fraction}
        return {"step": sample.step} | self._keys | {"grad_norm": sample.total_norm, "sample": sample.to_dict()}

    def _measure_reference(self) -> None:
        self._is_reference_due = False
        assert self.reference is not None
        sample = float32_sample(self.model, self.reference, self._chosen_variables(), self._last.step)
        self._append({"step": sample.step, "reference": sample.to_dict()})
