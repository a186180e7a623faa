"""The base of the callbacks that read the optimizer of a training."""

import logging
import os
from typing import Any
from weakref import WeakSet

import keras

from kmp import guarding
from kmp.backend import compute_dtypes
from kmp.optimizer import LossScaleOptimizer
from kmp.utils import FLOAT16

PathLike = str | os.PathLike[str]
Logs = dict[str, Any] | None

logger = logging.getLogger("kmp")

_logged_models: WeakSet[keras.Model] = WeakSet()


class CopyableCallback(keras.callbacks.Callback):
    """A callback that can be copied between trainings. Of several workers, only the chief writes its files."""

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copy has: the settings and the records, without the model, which `fit` sets."""
        return vars(self) | {"_model": None}

    @property
    def _is_chief(self) -> bool:
        """Whether this process writes the files."""
        return self.model.distribute_strategy.extended.should_checkpoint


class OptimizerReader(CopyableCallback):
    """Reads an optimizer after a number of batches. Between two reads nothing is copied: each batch counts as one step.

    A subclass reads in `read`, which sets `_batches_left`, and begins a training in `_start`, which
    may run twice.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        if optimizer is not None and not isinstance(optimizer, LossScaleOptimizer):
            raise TypeError(
                "`optimizer` must be a kmp.LossScaleOptimizer or None. Received:"
                f" optimizer={optimizer!r}"
            )
        self._optimizer = optimizer
        self.is_active = False  # whether there is an optimizer to read in this training
        self.has_trained = False  # whether this training has had a batch
        self._batches_left = 1  # until the next read

    @property
    def optimizer(self) -> LossScaleOptimizer:
        """The optimizer to read: the one passed to the constructor, or else the model's."""
        return self._optimizer or self.model.optimizer

    def on_train_begin(self, logs: Logs = None) -> None:
        self.has_trained = False
        self.is_active = self._has_optimizer()
        if self.is_active:
            if self._prepare():
                self.model.make_train_function(force=True)
            self._start()

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        if self.is_active and not self.has_trained:
            # again: a later callback's `on_train_begin` may have loaded the optimizer
            self._start()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if self.is_active:
            self.has_trained = True
            self._batches_left -= self.model.steps_per_execution
            if self._batches_left <= 0:
                self.read()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if self.is_active:
            self.read()

    def read(self) -> None:
        """Reads the optimizer now."""
        raise NotImplementedError

    def _start(self) -> None:
        """Begins a training at the step of the optimizer."""
        raise NotImplementedError

    def _prepare(self) -> bool:
        """Adds to the training step what the callback needs. Returns whether the step must be traced again."""
        return self.optimizer is self.model.optimizer and guarding.guard_train_step(self.model)

    def _has_optimizer(self) -> bool:
        """Whether there is an optimizer to read. If not, logs once per model what gives records.

        Raises:
            ValueError: If the model computes in float16 and the optimizer is not a
                `kmp.LossScaleOptimizer`.
        """
        used: Any = self.optimizer
        if isinstance(used, LossScaleOptimizer):
            return True
        dtypes = compute_dtypes(self.model)
        name = (
            "None"
            if used is None
            else f"{type(used).__module__.split('.')[0]}'s {type(used).__name__}"
        )
        facts = (
            f"the model's optimizer is {name}. The model computes in {' and '.join(sorted(dtypes))}"
        )
        if FLOAT16.name in dtypes:
            raise ValueError(
                f"{type(self).__name__} needs a kmp.LossScaleOptimizer, but {facts}. Compile the"
                " model after kmp.enable() and without auto_scale_loss=False, or with"
                " kmp.LossScaleOptimizer(opt)."
            )
        if self.model not in _logged_models:
            _logged_models.add(self.model)
            logger.warning(
                "kmp's callbacks have nothing to read: %s, which needs no loss scale. To record its"
                " gradients, compile it with kmp.wrap(optimizer, loss_scale=1.0).",
                facts,
            )
        return False
