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
    """Records a training, replays batches, repairs the training, and stops it if it is stuck.

    `kmp.callbacks.defaults` returns one. The guide describes
    [what is recorded](../guide/callbacks.md), [replays](../guide/diagnose.md#replay),
    [repairs](../guide/diagnose.md#repair), [NaN and Inf](../guide/diagnose.md#nan-and-inf) and
    [stuck trainings](../guide/diagnose.md#stuck-training).

    `run` has the records, as a `kmp.records.Run`. Keras' `logs` get three keys:

    - `loss_scale`: the loss scale of the next step; 1 if the training does not scale its loss.
    - `overflow_count`: the steps skipped since training began because the loss or a gradient was
      NaN or Inf.
    - `grad_norm`: the L2 norm of all gradients without the loss scale, from the last sample in
      which it is finite; NaN before the first.

    A model in bfloat16 or float32 that is compiled without `kmp.LossScaleOptimizer` has nothing to
    record: the logger `"kmp"` reports it once per model.

    Args:
        log_dir: Folder for the log `kmp.jsonl` and TensorBoard's event files. Defaults to `None`:
            nothing is written.
        every_n_steps: Integer, at least 1: how often to record and to sample the gradients, in
            steps of the optimizer. Defaults to 250. The start of a training is sampled
            [more often](../guide/callbacks.md#when-it-records).
        optimizer: The `kmp.LossScaleOptimizer` to read. Defaults to all that the training step
            uses. If there are several, as in a GAN, each has a run in `runs`, a folder in
            `log_dir`, a report, and keys such as `loss_scale/d_optimizer`.
        variables: The variables whose gradients are sampled: a path as in `variable.path`, a
            pattern with `*` and `?`, such as `"*/kernel"`, or a list of these. Defaults to all.
        replay: Whether to replay batches, to find what 16 bits lose and where NaN and Inf begin.
            Defaults to True.
        repair: Whether to set layers to float32 if a replay proves that the training needs it.
            Defaults to True. Needs `replay`.
        on_nonfinite: What to do about NaN and Inf that no loss scale prevents, and in a stuck
            training. `"skip"` (default) warns once per streak of such steps, and raises a
            `kmp.callbacks.StuckError` if the training is stuck. `"raise"` raises it at the first
            such step. `"lower_learning_rate"` does what `"skip"` does, and halves the learning rate
            once per streak. `"warn"` only warns, and `"ignore"` does neither.
        patience: Integer, at least 1: the number of consecutive skipped steps after which a
            training is stuck. Defaults to 100.
        log_norms: Whether to add `grad_norm/LAYER` to `logs`, the gradient norm of each layer of
            `variables`. Defaults to False.
        report: An `.html` file for the report, written at the end of training and, as long as that
            takes at most a twentieth of the time, at the end of epochs. It replaces an earlier
            report of kmp, and no other file. A failure to write is a warning. Defaults to `None`.
        failing_batch: An `.npz` file for the batch of the first step with such NaN or Inf. It
            replaces an earlier batch, and no other file. Needs `replay`, one replica, and another
            `on_nonfinite` than `"ignore"`. Defaults to `None`.

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
        name = "None"
        if used is not None:
            library = type(used).__module__.split(".")[0]
            name = f"{library}'s {type(used).__name__}"
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
