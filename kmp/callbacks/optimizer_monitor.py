"""Reads one optimizer for the callbacks of a run and stores their records."""

import logging
from pathlib import Path
from typing import Any
from weakref import WeakSet

import keras
from filelock import FileLock

from kmp.backend import compute_dtypes
from kmp.callbacks.log_writer import LogWriter
from kmp.callbacks.model_saving import is_chief
from kmp.callbacks.run_header import header
from kmp.callbacks.thinning import Thinning, counts_size, sample_size
from kmp.optimizer import LossScaleOptimizer
from kmp.records import Run, Snapshot
from kmp.utils import FLOAT16

logger = logging.getLogger("kmp")

_logged_models: WeakSet[keras.Model] = WeakSet()


class OptimizerMonitor:
    """Holds the records of a run, its log file, and the newest snapshot of the optimizer.

    Callbacks that share a monitor share all three. After a step, only the first callback that reads copies a snapshot
    to the host.

    Args:
        log_dir: Folder for `kmp.jsonl` and TensorBoard's files, or `None` to write no file.
        optimizer: The optimizer to read, or `None` for the model's.
    """

    sample_budget = 3_000_000  # bytes of samples, in memory or in the log, after which half as many are taken
    counts_budget = 500_000  # bytes of overflow counts by variable, after which half as many records have them

    def __init__(self, log_dir: Path | None = None, optimizer: LossScaleOptimizer | None = None) -> None:
        self.log_dir = log_dir
        self.run = Run()
        self.samples = Thinning(self.sample_budget)
        self.overflow_counts = Thinning(self.counts_budget)
        self.last_epoch: tuple[int, int] | None = None  # whose metrics are recorded, and its last step
        self._optimizer = optimizer
        self._newest: Snapshot | None = None
        self._writer: LogWriter | None = None

    def has_optimizer(self, model: keras.Model, callback: str) -> bool:
        """Returns whether there is an optimizer to read. If not, logs once per model what gives records.

        Args:
            model: The model in training.
            callback: The name of the callback that reads it, for the error message.

        Raises:
            ValueError: If the model computes in float16 and its optimizer is not a `kmp.LossScaleOptimizer`.
        """
        optimizer = self.optimizer_of(model)
        if isinstance(optimizer, LossScaleOptimizer):
            return True
        dtypes = compute_dtypes(model)
        facts = {"callback": callback, "optimizer": _described(optimizer), "dtypes": " and ".join(sorted(dtypes))}
        if FLOAT16.name in dtypes:
            raise ValueError(_UNSCALED.format(**facts))
        if model not in _logged_models:
            _logged_models.add(model)
            logger.warning(_NOTHING_TO_READ.format(**facts))
        return False

    def optimizer_of(self, model: keras.Model) -> LossScaleOptimizer:
        """Returns the optimizer to read, if `has_optimizer`."""
        return self._optimizer or model.optimizer

    def clear(self) -> None:
        """Removes the records of an earlier training."""
        self.run.rows.clear()
        self.last_epoch = None
        self.run.header = {}

    def check(self, model: keras.Model) -> FileLock | None:
        """Checks that `log_dir` is writable, and locks it for this process.

        Returns:
            The lock, or `None`; see `LogWriter.check`.

        Raises:
            OSError: If it is not writable, or another process has locked it.
            ImportError: If TensorBoard is not installed.
        """
        folder = self._writable_folder(model)
        return None if folder is None else LogWriter.check(folder)

    def describe(self, model: keras.Model, optimizer: LossScaleOptimizer) -> None:
        """Sets the run's header: the versions and the settings of a new training."""
        self.run.header = header(model, optimizer)

    def start(self, optimizer: LossScaleOptimizer) -> Snapshot:
        """Returns a new snapshot, even if no step was taken since the last one: weights may have been loaded."""
        self._newest = optimizer.snapshot()
        self._measure_size()
        return self._newest

    def snapshot(self, optimizer: LossScaleOptimizer) -> Snapshot:
        """Returns the newest snapshot. Takes a new one if the optimizer has taken a step since."""
        if self._newest is None or self._newest.step != optimizer.counters.read_counts().steps:
            self._newest = optimizer.snapshot()
        return self._newest

    def open(self, model: keras.Model, optimizer: LossScaleOptimizer, first_step: int) -> None:
        """Opens the log of a training that continues after `first_step`, unless it is open."""
        folder = self._writable_folder(model)
        if folder is not None and (self._writer is None or self._writer.is_closed):
            self._writer = LogWriter.open(folder, model, optimizer, first_step)
            self._measure_size()

    def drop_after(self, step: int) -> None:
        """Removes the run's records after a step, for training that continues after it."""
        self.last_epoch = None
        self.run.drop_after(step)
        self._measure_size()

    def append(self, record: dict[str, Any]) -> None:
        """Adds a record to the run, and to the log if it is open."""
        self.run.append(record)
        self.samples.size += sample_size(record)
        self.overflow_counts.size += counts_size(record)
        if self._writer:
            self._writer.write(record, self.run.rows[:-1])

    def close(self) -> None:
        """Closes the log."""
        if self._writer:
            self._writer.close()
            self._writer = None

    def write_verdict(self) -> None:
        """Writes what `advise` makes of the run, for TensorBoard, if the log is open."""
        if self._writer:
            self._writer.write_verdict()

    def _measure_size(self) -> None:
        """Sets the sizes of what is stored to those of the run or, if that has more, of the log that it continues."""
        samples, counts = (self._writer.sample_size, self._writer.counts_size) if self._writer else (0, 0)
        self.samples.size = max(samples, sum(map(sample_size, self.run.rows)))
        self.overflow_counts.size = max(counts, sum(map(counts_size, self.run.rows)))

    def _writable_folder(self, model: keras.Model) -> Path | None:
        """Returns the folder that this process writes to: of several workers, only the chief writes."""
        return self.log_dir if is_chief(model.distribute_strategy) else None


def _described(optimizer: Any) -> str:
    return "None" if optimizer is None else f"{type(optimizer).__module__.split('.')[0]}'s {type(optimizer).__name__}"


_UNSCALED = (
    "{callback} needs a kmp.LossScaleOptimizer, but the model's optimizer is {optimizer}. The model computes in "
    "{dtypes}. Compile the model after kmp.enable() and without auto_scale_loss=False, or with "
    "kmp.LossScaleOptimizer(opt)."
)
_NOTHING_TO_READ = (
    "kmp's callbacks have nothing to read: the model's optimizer is {optimizer}. The model computes in {dtypes}, which "
    "needs no loss scale. To record its gradients, compile it with kmp.wrap(optimizer, loss_scale=1.0)."
)
