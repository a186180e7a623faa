"""The callback that watches a training."""

import contextlib
import logging
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakSet

import keras

from kmp.backend.keras_internals import compute_dtypes
from kmp.callbacks.monitor_settings import MonitorSettings
from kmp.callbacks.nonfinite_steps import ON_NONFINITE
from kmp.callbacks.stuck_detector import StuckError
from kmp.callbacks.training import Training
from kmp.callbacks.training_records import RECORDED, Logs, PathLike
from kmp.gradients.sampling_clock import NEVER
from kmp.guarding.guarded_step import trained_optimizers
from kmp.optimizer import LossScaleOptimizer
from kmp.records import Header, Run
from kmp.utils import user_messages, validation
from kmp.utils.float_formats import FLOAT16

logger = logging.getLogger("kmp")
_CONFIGURATION_ERRORS = (ValueError, TypeError, OSError)
_logged_models: WeakSet[keras.Model] = WeakSet()


class Monitor(keras.callbacks.Callback):
    """Records a training, finds what 16 bits lose, repairs it where it can, and stops it if stuck.

    The compiled step counts on the device. This callback copies the counts to the host after the
    first steps, at most every 32 batches, and at the end of each epoch. In `logs`:

    - `loss_scale`: the loss scale of the next step; 1 if the training loop does not scale its loss.
    - `overflow_count`: steps skipped since training began because the loss or a gradient was
      non-finite.
    - `grad_norm`: the L2 norm of all gradients, without the loss scale, of the last sample in which
      it is finite; NaN before the first. With `log_norms`, `grad_norm/LAYER` is that of each layer.

    **Records.** `run` and the log have more, see `kmp.records`: the variables in which overflows
    originated, and samples of the gradients with a histogram of binary exponents, the norm and the
    amax of each gradient. The first twelve samples and every tenth after them also measure the
    weight update of the step, or of the execution with `steps_per_execution`; a step that updates
    no weights has none, and the next sample measures it. TensorBoard has the histogram of all
    gradients of each sample, and those by layer of the samples with the weight update. Each time
    the records have grown by 4 MB in the log and in TensorBoard's files, the interval doubles: the
    log of a million steps stays below 50 MB.

    **Replays.** At most 32 examples of a batch of the training are passed through the graph of the
    training step, in the precision of the model and in float32: at the first step and at the end,
    and when steps are skipped or, in float16, many gradients are zero; also each time the steps are
    four times as many, while all comparisons take at most 0.25 seconds plus 1 % of the time of the
    training, and in the middle at 5 %; or 8 seconds plus 2 % once one has shown that the precisions
    differ. A training that goes on in the next call of `fit` with the same callback is compared as
    one training. One comparison that takes longer is followed by smaller ones, of 8 examples; of
    large ones, such as images of 300 x 300, there are at most a 16th of those of the training. This
    measures what the precision changes in the outputs and gradients of each layer, and finds the
    operation that first returned NaN or Inf, and the layers that have to compute in float32;
    `kmp.advise` reports it. The first of these replays and, within that time, one in the second
    half of the training also pass their batch in the other 16-bit format. A replay takes at most 8
    seconds, or 2 % of the time of the training; the search in a batch that 16 bits ruin takes at
    most 4 seconds more, and a pass in bfloat16 2. Model and seeds stay unchanged, and no code of
    the user runs; only a step with `run_eagerly=True`, and a repaired step before the repair is
    made, are traced once. Not with several replicas, nor in a training loop that runs eagerly.

    **Repairs.** When steps are skipped in a row, or a comparison shows that 16 bits change outputs
    and gradients, a replay searches the fewest layers that have to compute in float32, at most
    twelve; or a model of that size that computes outside of its layers. If it finds them, and the
    cause is not the data, the targets, the learning rate or the weights, the `dtype_policy` of
    these layers and their sublayers becomes float32. The batch is replayed once more, and only if
    that is sound, the step is traced again and the training continues; otherwise everything is as
    before. Variables, optimizer and counters stay. A loss scale that the overflows have lowered
    returns to the initial one, or to what the batch then allows. A warning says which layers, why,
    at which step, and which change makes it permanent. Saved files keep the policy, and a training
    that continues the log in `log_dir` sets the layers before its first step.

    **NaN and Inf.** No loss scale prevents a loss that is NaN or Inf or, where the scale is fixed
    at 1, such gradients. Their step is skipped, and `on_nonfinite` decides what follows: at once
    where Keras' `logs` show it, else at the next check. A training is stuck after `patience`
    skipped steps in a row, or if a step overflows at the `min_scale`; with `steps_per_execution`,
    at the end of an execution. The error names the cause, the overflow origin and what to try. The
    model keeps the weights from before the skipped steps.

    **bfloat16 and float32** models are watched too. They have no loss scale to log: `loss_scale` is
    1. bfloat16 is compared and repaired as float16 is. Of a model in float32, only batches of
    skipped steps are replayed, to find where NaN and Inf begin. Does nothing for a model that is
    compiled without `kmp.LossScaleOptimizer`, as without `kmp.enable`; the logger `"kmp"` says so
    once per model. `model.compile(kmp.wrap("adam"))` wraps the optimizer of a model that exists
    already.

    Args:
        log_dir: Folder for `kmp.jsonl` and TensorBoard's files, or `None` to write no file.
        every_n_steps: Integer, at least 1: how often to record and sample, in steps of the
            optimizer; between two records, each batch counts as one. Gradients are sampled in each
            step divisible by this number; in the first step of `fit`, and in further ones until one
            does not overflow, at most 16; in the first step of an epoch without such a step; and
            before this number of steps each time that they have doubled, for a short training. An
            execution of several steps keeps its last sample.
        optimizer: The `kmp.LossScaleOptimizer` to read. Defaults to all that the training step of
            the model uses: of several, as in a GAN, each has a run in `runs`, a folder in
            `log_dir`, a report and keys of its own, such as `loss_scale/d_optimizer`.
        variables: The variables to sample: a path as in `variable.path`, a pattern with `*` and `?`
            as in a shell, such as `"*/kernel"`, or a list of these. Defaults to all.
        replay: Whether to replay batches to find what 16 bits lose, and where NaN begins.
        repair: Whether to repair the training by layers in float32. Needs `replay`.
        on_nonfinite: What to do if a step is skipped that no loss scale saves. `"skip"` warns once
            per streak of skipped steps, and raises a `kmp.callbacks.StuckError` if the training is
            stuck. `"raise"` raises it at the first such step. `"lower_learning_rate"` is `"skip"`,
            and halves the learning rate once per streak. `"warn"` is `"skip"`, with a warning in
            place of the error. `"ignore"` does neither.
        patience: Integer, at least 1: the consecutive skipped steps of a stuck training.
        log_norms: Whether `logs` have the gradient norm of each layer of `variables`.
        report: An `.html` file: the report of `kmp report`, written at the end of training, and at
            epoch ends as long as that takes at most a twentieth of the time. A failure to write it
            is a warning. It replaces an earlier report, and no other file.
        failing_batch: An `.npz` file for the batch of the first step that no loss scale saves, to
            look for the cause: the arrays `x`, `y` and `sample_weight`; of several tensors,
            `x/KEY` or `x/INDEX`. The warning of that step names the file, also if it cannot be
            written. It replaces an earlier batch, and no other file. Needs `replay`, one replica,
            and another `on_nonfinite` than `"ignore"`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is outside its range; in `on_train_begin`, if a float16 model has
            no `kmp.LossScaleOptimizer`, if a pattern matches no variable, or if a schedule sets the
            learning rate that is to be lowered.
        OSError: In `on_train_begin`, if `log_dir`, `report` or `failing_batch` cannot be written,
            or if the file `report` or `failing_batch` exists and is not one of kmp.
        StuckError: During training, as `on_nonfinite` says.

    Example:
    >>> import keras, kmp, numpy as np
    >>> with kmp.enable():
    ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    >>> x, y = np.ones((8, 4)), np.full((8, 1), 1e4)  # gradients of 2^15 * 1e4 exceed 65504
    >>> history = model.fit(x, y, verbose=0, callbacks=[kmp.callbacks.Monitor()]).history
    >>> history["loss_scale"], history["overflow_count"]
    ([16384.0], [1])
    """

    recorded: Collection[str] = RECORDED
    adds_to_logs = True  # so `fit` calls it before callbacks that may use the keys

    def __init__(
        self,
        log_dir: PathLike | None = None,
        every_n_steps: int = 250,
        optimizer: LossScaleOptimizer | None = None,
        *,
        variables: str | list[str] | None = None,
        replay: bool = True,
        repair: bool = True,
        on_nonfinite: str = "skip",
        patience: int = 100,
        log_norms: bool = False,
        report: PathLike | None = None,
        failing_batch: PathLike | None = None,
    ) -> None:
        super().__init__()
        if optimizer is not None:
            validation.instance(
                "optimizer", optimizer, LossScaleOptimizer, "a kmp.LossScaleOptimizer or None"
            )
        self.log_dir = None if log_dir is None else validation.local_path("log_dir", log_dir)
        self.every_n_steps = min(validation.positive_integer("every_n_steps", every_n_steps), NEVER)
        self.variables = validation.patterns("variables", variables)
        self.replay = validation.boolean("replay", replay)
        self.repair = validation.boolean("repair", repair) and self.replay
        self.on_nonfinite = validation.one_of("on_nonfinite", on_nonfinite, ON_NONFINITE)
        self.patience = validation.positive_integer("patience", patience)
        self.log_norms = validation.boolean("log_norms", log_norms)
        self.report = None
        if report is not None:
            self.report = validation.local_path("report", report, (".html",))
        self.failing_batch = None
        if failing_batch is not None:
            self.failing_batch = validation.local_path("failing_batch", failing_batch, (".npz",))
            if not self.replay or self.on_nonfinite == "ignore":
                raise ValueError(
                    "failing_batch needs replay=True, which keeps batches, and another on_nonfinite"
                    f" than 'ignore'. Received: replay={replay}, on_nonfinite={on_nonfinite!r}"
                )
        self.run = Run()
        self._optimizer = optimizer
        self.runs: dict[str, Run] = {}
        self._trainings: dict[str, Training] = {}
        self._ended: dict[str, Training] = {}  # the last ones, which the next ones may continue

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copy has: the settings and the records, without the model."""
        return vars(self) | {"_model": None, "_trainings": {}, "_ended": {}}

    @property
    def optimizer(self) -> LossScaleOptimizer:
        """The optimizer to read: the one passed to the constructor, or else the model's."""
        return self._optimizer or self.model.optimizer

    def on_train_begin(self, logs: Logs = None) -> None:
        self._stop()  # an interrupted training leaves the log open and its folder locked
        optimizers = self._watched_optimizers()
        if not optimizers:
            self.run.rows.clear()
            self.run.header = Header()
            return
        with self._only_watching(_CONFIGURATION_ERRORS):
            params = self.params or {}  # without `steps` if Keras does not know them
            first, *others = optimizers
            self.runs = {first: self.run} | {name: self.runs.get(name, Run()) for name in others}
            trainings = {
                name: Training(
                    self._settings(name if others else ""),
                    self.runs[name],
                    self.model,
                    optimizer,
                    before=self._ended.get(name),
                    epochs=params.get("epochs") or 0,
                    batches_of_epoch=params.get("steps") or 0,
                )
                for name, optimizer in optimizers.items()
            }
            is_new = [training.prepare() for training in trainings.values()]
            if any(is_new):
                self.model.make_train_function(force=True)
            for training in trainings.values():
                training.start()
            self._trainings = trainings

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        with self._only_watching(_CONFIGURATION_ERRORS):
            for training in self._trainings.values():
                if not training.recorder.has_trained:
                    training.first_epoch = epoch
                    training.start()
                training.open_log()
                training.begin_epoch(epoch)

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        with self._only_watching():
            for training in self._trainings.values():
                training.begin_batch()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        for training in self._trainings.values():
            if not training.recorder.has_trained:
                training.recorder.name_layers()  # the first step may have built them
        with self._only_watching():
            for training in self._trainings.values():
                training.end_batch(logs)
        self._add_to(logs)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        with self._only_watching():
            for training in self._trainings.values():
                training.end_epoch(epoch, logs)
        self._add_to(logs)

    def on_train_end(self, logs: Logs = None) -> None:
        with self._only_watching():
            has_steps = any(each.has_steps for each in self._trainings.values())
            for training in self._trainings.values():
                # A model may have an optimizer that it does not use.
                training.end(warns=training.has_steps or not has_steps)
        self._ended, self._trainings = self._trainings or self._ended, {}

    def _settings(self, name: str) -> MonitorSettings:
        """Returns the settings of the training by an optimizer; of one of several with its name."""

        def own(path: Path | None) -> Path | None:
            return path.with_stem(f"{path.stem}-{name}") if path and name else path

        return MonitorSettings(
            callback=type(self).__name__,
            recorded=self.recorded,
            log_dir=self.log_dir and self.log_dir / name,
            every_n_steps=self.every_n_steps,
            variables=self.variables,
            replay=self.replay,
            repair=self.repair,
            on_nonfinite=self.on_nonfinite,
            patience=self.patience,
            log_norms=self.log_norms,
            report=own(self.report),
            failing_batch=own(self.failing_batch),
        )

    def _add_to(self, logs: Logs) -> None:
        if logs is None:
            return
        for name, training in self._trainings.items():
            for key, value in training.recorder.logged.items():
                is_of_each = len(self._trainings) > 1 and key in RECORDED
                logs[f"{key}/{name}" if is_of_each else key] = value

    def _stop(self) -> None:
        trainings, self._trainings = self._trainings, {}
        for training in trainings.values():
            with contextlib.suppress(Exception):
                training.close()

    @contextlib.contextmanager
    def _only_watching(self, passing: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Ends the watching, with a warning, and not the training, if the watching fails.

        Args:
            passing: The errors of a wrong configuration.
        """
        try:
            yield
        except Exception as error:
            # A warning of kmp may be an error.
            if isinstance(error, (StuckError, UserWarning, *passing)):
                raise
            self._stop()
            user_messages.warn(
                f"{type(self).__name__} stops: {type(error).__name__}:"
                f" {user_messages.one_line(error)}. The training continues."
            )

    def _watched_optimizers(self) -> dict[str, LossScaleOptimizer]:
        """Returns the optimizers to read, by name.

        If there is none, logs once per model what gives records.

        Raises:
            ValueError: If the model computes in float16 and no optimizer is a
                `kmp.LossScaleOptimizer`.
        """
        if self._optimizer is not None:
            return {"optimizer": self._optimizer}
        found = trained_optimizers(self.model)
        if found:
            return {re.sub(r"\W+", "_", name).strip("_"): each for name, each in found.items()}
        used = getattr(self.model, "optimizer", None)
        dtypes = compute_dtypes(self.model)
        name = "None" if used is None else _qualified_name(used)
        computes = f"The model computes in {' and '.join(sorted(dtypes))}"
        facts = f"the model's optimizer is {name}. {computes}"
        if FLOAT16.name in dtypes:
            raise ValueError(
                f"{type(self).__name__} needs a kmp.LossScaleOptimizer, but {facts}. Compile the"
                " model after kmp.enable() and without auto_scale_loss=False, or with"
                " kmp.LossScaleOptimizer(opt). If the model sets `self.optimizer` itself, write"
                " self.optimizer = kmp.wrap(opt)."
            )
        if self.model not in _logged_models:
            _logged_models.add(self.model)
            logger.warning(
                "kmp's callbacks have nothing to read: %s. Compile it after kmp.enable(...) and"
                " without auto_scale_loss=False, or wrap its optimizer:\n"
                "    model.compile(kmp.wrap('adam'), ...)",
                facts,
            )
        return {}


def _qualified_name(value: Any) -> str:
    return f"{type(value).__module__.split('.')[0]}'s {type(value).__name__}"
