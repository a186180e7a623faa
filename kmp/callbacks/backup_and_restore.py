"""The callback that resumes a killed run, on one worker or several."""

import errno
import json
import logging
import os
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import tensorflow as tf

from kmp.backend import distribution, keras_internals, model_files
from kmp.callbacks.model_saving import is_chief, save_atomically
from kmp.policy import all_optimizers_of
from kmp.utils import FolderLock, atomic_files, user_messages, validation

logger = logging.getLogger("kmp")

Logs = dict[str, Any] | None


class _ResumePoint(keras.Layer):
    """What a resumed run needs besides the weights. Keras saves it with them, as an attribute of the optimizer.

    Attributes:
        epochs: Integer, completed epochs; `None` after loading a file without this number.
        random_states: Integer array of shape `(generators, 2)`: the states of layers such as `Dropout`, which Keras
            does not save.
    """

    def __init__(self) -> None:
        super().__init__(name="resume_point", dtype="float32", trainable=False)
        self.epochs: int | None = None
        self.random_states = np.zeros((0, 2), np.int64)

    def save_own_variables(self, store: Any) -> None:
        store["epochs"], store["random_states"] = np.array(self.epochs), self.random_states

    def load_own_variables(self, store: Any) -> None:
        if "epochs" in store.keys():  # noqa: SIM118  # not a dict
            self.epochs, self.random_states = int(store["epochs"][()]), np.array(store["random_states"])


class BackupAndRestore(keras.callbacks.BackupAndRestore):
    """Keras' callback with atomic backups, exact resumption with `Dropout`, and support for several workers.

    Keras overwrites the last backup, and then writes the number of epochs to a second file. A run that is killed
    between the two writes repeats an epoch after the restart. A run that is killed while the weights are written may
    not restart at all. Here a complete backup replaces the last one atomically, in one file: weights, optimizer, number
    of epochs, and the states of random layers. A resumed run is therefore bit-for-bit identical to an uninterrupted
    one, provided that the order of its data depends only on the epoch. With several workers, the chief writes and all
    read, so all of them need access to `backup_dir`. If a backup cannot be written, as on a full disk or at a quota,
    the callback warns and keeps the last backup, and training continues.

    A backup is created in host memory before it is written: that takes as many bytes as the file, which are those of
    the weights and the optimizer's variables, plus some kilobytes per layer. During training, the operating system
    locks `backup_dir` for the process, so that an independent training cannot replace its files. Some network file
    systems have no such locks; there, give each training its own folder.

    As with Keras' callback, training does not resume within an epoch: with an integer `save_freq`, the weights are from
    within the epoch, and the epoch starts again from its first batch. The state of other callbacks is not saved, such
    as the patience of `EarlyStopping`; nor is the state of random operations without a `keras.random.SeedGenerator` in
    a layer. List this callback last, so that the backup includes what other callbacks do at the end of an epoch.

    Args:
        backup_dir: Folder for the backup.
        save_freq: `"epoch"`, or an integer number of batches.
        double_checkpoint: Boolean, whether to keep the previous backup too, in case the last one becomes corrupt.
        delete_checkpoint: Boolean, whether to delete the backup at the end of training.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is outside its range; in `on_train_begin`, if the model is not built or has no
            optimizer, or if the backup is from another model.
        OSError: In `on_train_begin`, if the backup cannot be read, the folder cannot be created, or another process
            trains with it.
        RuntimeError: In `on_train_begin`, if workers find different backups.

    Example:
    >>> import kmp, tempfile
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> x, y, folder = np.ones((8, 4)), np.ones((8, 1)), tempfile.mkdtemp()
    >>> backup = kmp.callbacks.BackupAndRestore(folder, delete_checkpoint=False)
    >>> _ = model.fit(x, y, epochs=2, verbose=0, callbacks=[backup])
    >>> model.fit(x, y, epochs=3, verbose=0, callbacks=[backup]).epoch  # resumes after epoch 2
    [2]
    """

    @validation.suggests_arguments
    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: str | int = "epoch",
        double_checkpoint: bool = True,
        delete_checkpoint: bool = True,
    ) -> None:
        self._folder = validation.local_path("backup_dir", backup_dir)
        if not (isinstance(save_freq, str) and save_freq == "epoch"):
            save_freq = validation.positive_integer("save_freq", save_freq)
        super().__init__(str(self._folder), save_freq, validation.boolean("double_checkpoint", double_checkpoint))
        self.delete_checkpoint = validation.boolean("delete_checkpoint", delete_checkpoint)
        self._resume_point = _ResumePoint()
        self._folder_lock: FolderLock | None = None
        # Keras' file names, so that each callback can read the backups of the other.
        self._latest = self._folder / "latest.weights.h5", self._folder / "training_metadata.json"
        self._previous = tuple(path.with_name(f"{path.name}.bkp") for path in self._latest)

    def on_train_begin(self, logs: Logs = None) -> None:
        self._check_model()
        self._folder.mkdir(parents=True, exist_ok=True)
        if is_chief(self.model.distribute_strategy):
            self._folder_lock = FolderLock.acquire("backup_dir", self._folder)
        self._epochs = self._batches = self._batches_since_saving = 0
        keras_internals.set_initial_epoch(self.model, None)  # an earlier training may have set it
        self._restore()
        epochs = _gather_from_replicas(self.model.distribute_strategy, self._epochs)
        if len(set(epochs)) > 1:
            raise RuntimeError(
                f"The workers would resume after different numbers of epochs, this one after {self._epochs}. "
                f"`backup_dir` must be a folder that all workers share. Received: backup_dir={self.backup_dir!r}"
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
        keras_internals.set_initial_epoch(self.model, None)  # otherwise the next training starts from it
        if self.delete_checkpoint and is_chief(self.model.distribute_strategy):
            for path in (*self._previous, *reversed(self._latest)):  # a kill in between leaves the last backup complete
                atomic_files.remove_leftovers(path)
                path.unlink(missing_ok=True)
            if self._folder.exists() and not any(self._folder.iterdir()):
                self._folder.rmdir()
        self._folder_lock = None

    def _check_model(self) -> None:
        if not (self.model.built and self.model.weights):
            raise ValueError("BackupAndRestore needs a built model: call the model on a batch of data before `fit`.")
        optimizers = all_optimizers_of(self.model)
        if not optimizers:
            raise ValueError("BackupAndRestore needs a model with an optimizer.")
        if any(not optimizer.built for optimizer in optimizers if optimizer is not self.model.optimizer):
            user_messages.warn(
                "The model has optimizers besides `model.optimizer` that are not built, so a backup cannot restore "
                "them. Call `build(variables)` on each before `fit`."
            )
        optimizers[0].resume_point = self._resume_point

    def _restore(self) -> None:
        self._resume_point.epochs = None
        backups = [(weights, metadata) for weights, metadata in (self._latest, self._previous) if weights.exists()]
        errors = []
        for weights, metadata in backups:
            try:
                _check_readable(weights)
            except (OSError, RuntimeError, KeyError, ValueError) as error:  # h5py has no error class of its own
                errors.append(f"{weights.name}: {error}")
                continue
            self._load(weights)
            epochs = self._resume_point.epochs
            self._epochs = _epochs_from_metadata(metadata) if epochs is None else epochs
            keras_internals.set_initial_epoch(self.model, self._epochs)
            return
        if errors:
            message = f"The backup cannot be read ({'; '.join(errors)}). Delete it to start from the beginning"
            raise OSError(errno.EIO, message, str(self._folder))

    def _load(self, weights: Path) -> None:
        optimizer = self.model.optimizer
        if optimizer is not None and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        if weights.suffix == ".bkp":  # Keras does not load a file with this suffix
            logger.warning("%s cannot be read: restoring the previous backup.", self._latest[0])
            model_files.load_weights(self.model, weights)
        else:
            self.model.load_weights(weights)
        if self._resume_point.epochs is not None:
            _set_random_states(self.model, self._resume_point.random_states)

    def _save(self) -> None:
        if not is_chief(self.model.distribute_strategy):
            return
        self._resume_point.epochs, self._resume_point.random_states = self._epochs, _random_states(self.model)
        try:
            if self.double_checkpoint:
                for path, previous in zip(self._latest, self._previous, strict=True):
                    if path.exists():
                        atomic_files.atomic_copy(path, previous)
            save_atomically(self.model, self._latest[0])
            atomic_files.write_json(self._latest[1], {"epoch": self._epochs, "batch": self._batches})
        except (OSError, MemoryError) as error:
            user_messages.warn(
                f"The backup of epoch {self._epochs} was not written ({user_messages.first_line(error)}). "
                "Training continues, and the last complete backup is kept."
            )


def _check_readable(weights: Path) -> None:
    """Reads an HDF5 file completely, to detect a truncated or corrupt file before any of it is loaded."""
    with h5py.File(weights) as file:
        file.visititems(lambda name, item: item[()] if isinstance(item, h5py.Dataset) and item.size else None)


def _epochs_from_metadata(metadata: Path) -> int:
    """Returns the number of epochs in the second file of Keras' callback."""
    try:
        return int(json.loads(metadata.read_text())["epoch"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"The backup has no number of epochs ({error}). Delete it to start from the beginning"
        raise OSError(errno.EIO, message, str(metadata)) from error


def _random_variables(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables of each `keras.random.SeedGenerator`: those that are neither weights nor a metric's."""
    others = [*model.weights, *(variable for metric in model.metrics for variable in metric.variables)]
    known = {id(variable) for variable in others}
    return [variable for variable in model.variables if id(variable) not in known]


def _random_states(model: keras.Model) -> np.ndarray:
    return np.array([variable.numpy() for variable in _random_variables(model)], np.int64).reshape(-1, 2)


def _set_random_states(model: keras.Model, states: np.ndarray) -> None:
    variables = _random_variables(model)
    if len(variables) != len(states):
        raise ValueError(
            f"The backup is from another model: it has {len(states)} random generators, and this model has "
            f"{len(variables)}."
        )
    for variable, state in zip(variables, states, strict=True):
        variable.assign(state)


def _gather_from_replicas(strategy: tf.distribute.Strategy, number: int) -> list[int]:
    """Returns each replica's number, the same list on all workers. Blocks until all workers have called it.

    Args:
        strategy: The strategy.
        number: This worker's number, an int64.
    """
    if not distribution.has_several_workers(strategy):
        return [number]
    # Not every device can exchange integers, but each can exchange float32, which represents 16-bit integers exactly.
    digits = np.array([number], np.int64).view(np.uint16).astype(np.float32)
    gathered = strategy.gather(strategy.run(lambda: tf.constant(digits[None])), axis=0)
    return gathered.numpy().astype(np.uint16).view(np.int64)[:, 0].tolist()
