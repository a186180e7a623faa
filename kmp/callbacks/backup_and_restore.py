"""Resuming a killed run, on one worker or on several; and saving a model so that no kill and no full disk spoils it."""

import errno
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np

from kmp.backend import distribution, keras_internals
from kmp.callbacks.model_saving import save_atomically
from kmp.policy import all_optimizers_of
from kmp.utils import atomic_files, user_messages, validation

logger = logging.getLogger("kmp")

Logs = dict[str, Any] | None


class _ResumePoint(keras.Layer):
    """What a resumed run needs beside the weights, in their file: an attribute of the optimizer, which Keras saves.

    Attributes:
        epochs: Integer, epochs done; `None` after loading from a file that does not say.
        random_states: Integer array of shape `(generators, 2)`: Keras saves no state of `Dropout` and its like.
    """

    def __init__(self) -> None:
        super().__init__(name="resume_point", dtype="float32", trainable=False)
        self.epochs: int | None = None
        self.random_states = np.zeros((0, 2), np.int64)

    def save_own_variables(self, store: Any) -> None:
        store["epochs"], store["random_states"] = np.array(self.epochs), self.random_states

    def load_own_variables(self, store: Any) -> None:
        if "epochs" in store.keys():  # noqa: SIM118  # no dictionary
            self.epochs, self.random_states = int(store["epochs"][()]), np.array(store["random_states"])


class BackupAndRestore(keras.callbacks.BackupAndRestore):
    """Keras' callback, safe against a kill at any moment, exact with `Dropout`, and for several workers.

    Keras writes over the last backup, and then the number of epochs into a file beside it. A run that is killed in
    between repeats an epoch when it is started again; one that is killed earlier in the save may not start again. Here
    a backup takes the last one's place when it is whole, and holds everything: with the weights and the optimizer the
    number of epochs, and the state of random layers. So the resumed run is the run that was never killed, bit for bit,
    if its data come in an order that depends on the epoch alone. Of several workers the chief writes and all read:
    `backup_dir` is a folder that all of them see. A disk that is full keeps the last backup, and is warned of.

    What it cannot do, as Keras' cannot: go on in mid-epoch. With an integer `save_freq`, the weights are those of
    mid-epoch, and the epoch starts again from its first batch. Nor does it keep what other callbacks count, such as the
    patience of `EarlyStopping`, or the state of random operations that have no `keras.random.SeedGenerator` in a layer.
    List it last, so that what other callbacks do at an epoch's end is in the backup.

    Args:
        backup_dir: Folder for the backup.
        save_freq: `"epoch"`, or an integer number of batches.
        double_checkpoint: Boolean, whether to keep the backup before the last too, for a disk that fails.
        delete_checkpoint: Boolean, whether to delete the backup when training is done.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If one is outside its range; in `on_train_begin`, if the model is not built or has no optimizer, or
            if the backup is another model's.
        OSError: In `on_train_begin`, if the backup cannot be read, or the folder not be made.
        RuntimeError: In `on_train_begin`, if several workers find different backups.

    Example:
    >>> import kmp, tempfile
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> x, y, folder = np.ones((8, 4)), np.ones((8, 1)), tempfile.mkdtemp()
    >>> backup = kmp.callbacks.BackupAndRestore(folder, delete_checkpoint=False)
    >>> _ = model.fit(x, y, epochs=2, verbose=0, callbacks=[backup])
    >>> model.fit(x, y, epochs=3, verbose=0, callbacks=[backup]).epoch  # goes on from there
    [2]
    """

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: str | int = "epoch",
        double_checkpoint: bool = True,
        delete_checkpoint: bool = True,
    ) -> None:
        self._folder = validation.local_path("backup_dir", backup_dir)
        if save_freq != "epoch":
            save_freq = validation.positive_integer("save_freq", save_freq)
        super().__init__(str(self._folder), save_freq, validation.boolean("double_checkpoint", double_checkpoint))
        self.delete_checkpoint = validation.boolean("delete_checkpoint", delete_checkpoint)
        self._point = _ResumePoint()
        # Keras' names, so that either callback reads what the other has written.
        self._latest = self._folder / "latest.weights.h5", self._folder / "training_metadata.json"
        self._previous = tuple(path.with_name(f"{path.name}.bkp") for path in self._latest)

    def on_train_begin(self, logs: Logs = None) -> None:
        self._check()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._epochs = self._batches = self._batches_since_saving = 0
        keras_internals.set_initial_epoch(self.model, None)  # what an earlier training left
        self._restore()
        strategy, epoch = self.model.distribute_strategy, self._epochs
        # Equal for all if, and only if, the sum of squares is as small as it can be; so all workers raise or none does.
        if (
            distribution.total(strategy, epoch**2) * distribution.total(strategy, 1)
            != distribution.total(strategy, epoch) ** 2
        ):
            raise RuntimeError(
                f"The workers would go on from different epochs, this one from {epoch}. `backup_dir` must be a folder "
                f"that all of them see. Received: backup_dir={self.backup_dir!r}"
            )

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._epochs, self._batches = epoch, 0

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._batches_since_saving += batch + 1 - self._batches
        self._batches = batch + 1
        if self.save_freq != "epoch" and self._batches_since_saving >= self.save_freq:
            self._batches_since_saving = 0
            self._save()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._epochs, self._batches = epoch + 1, 0
        if self.save_freq == "epoch":
            self._save()

    def on_train_end(self, logs: Logs = None) -> None:
        keras_internals.set_initial_epoch(self.model, None)  # or the next training would start from it
        if self.delete_checkpoint and distribution.is_chief(self.model.distribute_strategy):
            for path in (*self._previous, *reversed(self._latest)):  # a kill in between leaves the last one whole
                atomic_files.partial_path(path).unlink(missing_ok=True)
                path.unlink(missing_ok=True)
            if self._folder.exists() and not any(self._folder.iterdir()):
                self._folder.rmdir()

    def _check(self) -> None:
        if not (self.model.built and self.model.weights):
            raise ValueError("BackupAndRestore needs a model that is built: call it on a batch of data before `fit`.")
        optimizers = all_optimizers_of(self.model)
        if not optimizers:
            raise ValueError("BackupAndRestore needs a model with an optimizer.")
        if any(not optimizer.built for optimizer in optimizers if optimizer is not self.model.optimizer):
            user_messages.warn(
                "The model holds optimizers of its own that are not built, so a backup cannot restore them. Call their "
                "`build(variables)` before `fit`."
            )
        optimizers[0].resume_point = self._point

    def _restore(self) -> None:
        self._point.epochs = None
        found = [(weights, metadata) for weights, metadata in (self._latest, self._previous) if weights.exists()]
        errors = []
        for weights, metadata in found:
            try:
                _read_through(weights)
            except (OSError, RuntimeError, KeyError, ValueError) as error:  # HDF5 has no error of its own
                errors.append(f"{weights.name}: {error}")
                continue
            self._load(weights)
            self._epochs = _epochs_of_keras(metadata) if self._point.epochs is None else self._point.epochs
            keras_internals.set_initial_epoch(self.model, self._epochs)
            return
        if errors:
            message = f"The backup cannot be read ({'; '.join(errors)}). Delete it to start from the beginning"
            raise OSError(errno.EIO, message, str(self._folder))

    def _load(self, weights: Path) -> None:
        optimizer = self.model.optimizer
        if optimizer is not None and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        if weights.suffix == ".bkp":  # which Keras does not load by that name
            logger.warning("%s cannot be read: going back to the backup before it.", self._latest[0])
            named = self._folder / f"restoring-{os.getpid()}.weights.h5"
            shutil.copyfile(weights, named)
            try:
                self.model.load_weights(named)
            finally:
                named.unlink()
        else:
            self.model.load_weights(weights)
        if self._point.epochs is not None:
            _set_random_states(self.model, self._point.random_states)

    def _save(self) -> None:
        if not distribution.is_chief(self.model.distribute_strategy):
            return
        self._point.epochs, self._point.random_states = self._epochs, _random_states(self.model)
        try:
            if self.double_checkpoint:
                for path, previous in zip(self._latest, self._previous, strict=True):
                    if path.exists():
                        with atomic_files.whole(previous) as partial:
                            shutil.copyfile(path, partial)
            save_atomically(self.model, self._latest[0])
            atomic_files.write_json(self._latest[1], {"epoch": self._epochs, "batch": self._batches})
        except OSError as error:
            user_messages.warn(
                f"The backup of epoch {self._epochs} was not written ({error}). Training goes on; the last whole one "
                "stays."
            )


def _read_through(weights: Path) -> None:
    """Reads all of an HDF5 file, so that one that was cut short is found out before any of it is loaded."""
    with h5py.File(weights) as file:
        file.visititems(lambda name, item: item[()] if isinstance(item, h5py.Dataset) and item.size else None)


def _epochs_of_keras(metadata: Path) -> int:
    """Returns the number of epochs that Keras' own callback wrote beside the weights."""
    try:
        return int(json.loads(metadata.read_text())["epoch"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"The backup does not say how many epochs it has ({error}). Delete it to start from the beginning"
        raise OSError(errno.EIO, message, str(metadata)) from error


def _random_variables(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables that are no weights and belong to no metric: those of `keras.random.SeedGenerator`s."""
    others = [*model.weights, *(variable for metric in model.metrics for variable in metric.variables)]
    known = {id(variable) for variable in others}
    return [variable for variable in model.variables if id(variable) not in known]


def _random_states(model: keras.Model) -> np.ndarray:
    return np.array([variable.numpy() for variable in _random_variables(model)], np.int64).reshape(-1, 2)


def _set_random_states(model: keras.Model, states: np.ndarray) -> None:
    variables = _random_variables(model)
    if len(variables) != len(states):
        raise ValueError(
            f"The backup is another model's: it has {len(states)} random generators, and this model {len(variables)}."
        )
    for variable, state in zip(variables, states, strict=True):
        variable.assign(state)
