"""Resuming a killed run, on one worker or on several."""

import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np

from kmp import _arguments, _replicas

logger = logging.getLogger("kmp")

Logs = dict[str, Any] | None


def save_whole(model: keras.Model, path: Path) -> None:
    """Saves a model, or its weights where `path` ends in `.weights.h5`; what is there already stays until it is done.

    Raises:
        OSError: If it cannot be written. Nothing has changed then.
    """
    suffix = next(suffix for suffix in _arguments.MODEL_SUFFIXES if path.name.endswith(suffix))
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        partial = Path(folder) / f"model{suffix}"
        if suffix == ".keras":
            model.save(partial)
        else:
            model.save_weights(partial)
        partial.replace(path)


class _ResumePoint(keras.Layer):
    """What a resumed run needs beside the weights, in their file: an attribute of the optimizer, which Keras saves.

    Attributes:
        epochs: Integer, epochs done; 0 after loading from a file that does not say.
        random_states: Integer array of shape `(generators, 2)`: Keras saves no state of `Dropout` and its like.
    """

    def __init__(self) -> None:
        super().__init__(name="resume_point", dtype="float32", trainable=False)
        self.epochs = 0
        self.random_states = np.zeros((0, 2), np.int64)

    def save_own_variables(self, store: Any) -> None:
        store["epochs"], store["random_states"] = np.array(self.epochs), self.random_states

    def load_own_variables(self, store: Any) -> None:
        self.epochs = int(store["epochs"][()]) if "epochs" in store.keys() else 0  # noqa: SIM118  # no dictionary
        if self.epochs:
            self.random_states = np.array(store["random_states"])


class BackupAndRestore(keras.callbacks.BackupAndRestore):
    """Keras' callback, safe against a kill at any moment, exact with `Dropout`, and for several workers.

    Keras writes the weights, then the number of epochs into a file beside them. A run that is killed between the two
    repeats an epoch when it is started again, and one killed within the second does not start at all. Here both are in
    one file, and with them the state of random layers, so that the resumed run is the run that was never killed, bit
    for bit, if its data come in an order that depends on the epoch alone. Of several workers the chief writes and all
    read: `backup_dir` is a folder that all of them see.

    What it cannot do, as Keras' cannot: go on in mid-epoch. With an integer `save_freq`, the weights are those of
    mid-epoch, and the epoch starts again from its first batch. Nor does it keep the state of random operations that
    have no `keras.random.SeedGenerator` in a layer.

    Args:
        backup_dir: Folder for the backup.
        save_freq: `"epoch"`, or an integer number of batches.
        double_checkpoint: Boolean, whether to keep the backup before the last too. True by default (Keras: false),
            because one that was being written at the kill is lost.
        delete_checkpoint: Boolean, whether to delete the backup when training is done.

    Raises:
        ValueError: If an argument is outside its range; in `on_train_begin`, if the backup is another model's.
        OSError: In `on_train_begin`, if the backup cannot be read.
        RuntimeError: In `on_train_begin`, if several workers find different backups.
    """

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: str | int = "epoch",
        double_checkpoint: bool = True,
        delete_checkpoint: bool = True,
    ) -> None:
        super().__init__(str(_arguments.local_path("backup_dir", backup_dir)), save_freq, double_checkpoint)
        self.delete_checkpoint = delete_checkpoint
        self._point = _ResumePoint()

    def on_train_begin(self, logs: Logs = None) -> None:
        strategy = self.model.distribute_strategy
        if self._is_chief:  # first, because it may have to mend the files
            self._restore(logs)
        workers = _replicas.total(strategy, 1)
        if not self._is_chief:
            self._restore(logs)
        epoch = self.model._initial_epoch or 0
        if _replicas.total(strategy, epoch) != epoch * workers:
            raise RuntimeError(
                f"The workers would go on from different epochs, this one from {epoch}. `backup_dir` must be a folder "
                f"that all of them see. Received: backup_dir={self.backup_dir!r}"
            )

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._point.epochs = epoch + 1
        if self._is_chief:
            self._note_random_states()
            super().on_epoch_end(epoch, logs)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if self._is_chief and self.save_freq != "epoch":
            self._note_random_states()
            super().on_train_batch_end(batch, logs)

    def on_train_end(self, logs: Logs = None) -> None:
        if self._is_chief:
            super().on_train_end(logs)

    @property
    def _is_chief(self) -> bool:
        return _replicas.is_chief(self.model.distribute_strategy)

    def _restore(self, logs: Logs) -> None:
        self.model.optimizer.resume_point = self._point
        self._point.epochs = 0
        folder = Path(self.backup_dir)
        if any(folder.glob("*.weights.h5")):  # without weights, what is beside them says nothing
            self._load(folder, logs)
        if self._point.epochs:
            self.model._initial_epoch = self._point.epochs  # as Keras' own does: no public name sets it
            for variable, state in zip(_random_states(self.model), self._point.random_states, strict=True):
                variable.assign(state)

    def _load(self, folder: Path, logs: Logs) -> None:
        try:
            super().on_train_begin(logs)
        except json.JSONDecodeError:
            logger.info("The kill left no number of epochs in %s; the weights beside it have it.", folder)
        except OSError as error:
            if any(folder.glob("*.json")):
                message = f"The backup cannot be read ({error}). Delete it to start from the beginning"
                raise OSError(error.errno, message, str(folder)) from error
            # Keras writes the JSON after the weights, so no backup was ever whole.
            logger.warning("The kill left no whole backup in %s: training starts from the beginning.", folder)

    def _note_random_states(self) -> None:
        states = [variable.numpy() for variable in _random_states(self.model)]
        self._point.random_states = np.array(states, np.int64).reshape(-1, 2)


def _random_states(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables that are no weights and belong to no metric: those of `keras.random.SeedGenerator`s."""
    others = [*model.weights, *(variable for metric in model.metrics for variable in metric.variables)]
    known = {id(variable) for variable in others}
    return [variable for variable in model.variables if id(variable) not in known]
