"""Reading one optimizer for the callbacks of a run, and recording what they read."""

from pathlib import Path
from typing import Any

import keras

from kmp.backend import compute_dtypes, distribution
from kmp.callbacks.log_writer import LogWriter, header
from kmp.optimizer import LossScaleOptimizer
from kmp.records import Run, Snapshot
from kmp.utils import FLOAT16


class OptimizerMonitor:
    """The run that callbacks record into, its log, and the newest snapshot of the optimizer that they read.

    Callbacks that share a monitor share all three: after a step, the first that reads copies the snapshot to the host.

    Args:
        log_dir: Folder for `kmp.jsonl` and TensorBoard's files, or `None` to write no file.
        optimizer: The optimizer to read, or `None` for the model's own.
    """

    def __init__(self, log_dir: Path | None = None, optimizer: LossScaleOptimizer | None = None) -> None:
        self.log_dir = log_dir
        self.run = Run()
        self._optimizer = optimizer
        self._newest: Snapshot | None = None
        self._writer: LogWriter | None = None

    def optimizer_of(self, model: keras.Model, callback: str) -> LossScaleOptimizer:
        """Returns the optimizer that is read.

        Args:
            model: The model in training.
            callback: The name of the callback that reads, for the message.

        Raises:
            ValueError: If it is not kmp's.
        """
        optimizer = self._optimizer or getattr(model, "optimizer", None)
        if not isinstance(optimizer, LossScaleOptimizer):
            raise ValueError(_no_loss_scale(callback, model, optimizer))
        return optimizer

    def prepare(self, model: keras.Model, optimizer: LossScaleOptimizer) -> None:
        """Ends what an interrupted training left open, and describes the new one in the run's header.

        Raises:
            OSError: If `log_dir` cannot be written.
        """
        folder = self._folder(model)
        if folder is not None:
            LogWriter.check(folder)
        self.close()
        self.run.header = header(model, optimizer)

    def start(self, optimizer: LossScaleOptimizer) -> Snapshot:
        """Returns a new snapshot, also where no step was taken since the last one: a file may have been loaded."""
        self._newest = optimizer.snapshot()
        return self._newest

    def snapshot(self, optimizer: LossScaleOptimizer) -> Snapshot:
        """Returns the newest snapshot, read again if the optimizer has taken a step since."""
        if self._newest is None or self._newest.step != optimizer.counters.read_steps():
            self._newest = optimizer.snapshot()
        return self._newest

    def open(self, model: keras.Model, optimizer: LossScaleOptimizer, first_step: int) -> None:
        """Opens the log, of a training that starts after `first_step`, if it is not open."""
        folder = self._folder(model)
        if folder is not None and self._writer is None:
            self._writer = LogWriter.open(folder, model, optimizer, first_step)

    def record(self, row: dict[str, Any]) -> None:
        """Adds a record to the run, and writes it to the log if that is open."""
        self.run.append(row)
        if self._writer:
            self._writer.write(row)

    def close(self) -> None:
        """Closes the log."""
        if self._writer:
            self._writer.close()
            self._writer = None

    def _folder(self, model: keras.Model) -> Path | None:
        """Returns where this process writes; of several workers, only the chief does."""
        return self.log_dir if distribution.is_chief(model.distribute_strategy) else None


def _no_loss_scale(callback: str, model: keras.Model, optimizer: Any) -> str:
    kind = type(optimizer)
    found = f"{kind.__module__.split('.')[0]}'s {kind.__name__}" if optimizer is not None else "None"
    dtypes = sorted(compute_dtypes(model))
    advice = (
        "Compile the model after kmp.enable() and without auto_scale_loss=False, or with kmp.LossScaleOptimizer(opt)."
        if FLOAT16.name in dtypes
        else "That needs no loss scale: leave kmp's callbacks out, or compile with kmp.LossScaleOptimizer(opt, "
        "loss_scale=1.0) to see its gradients all the same. For float16 call kmp.enable() before building the model; "
        "again after keras.backend.clear_session(), and in each thread, which have the policy float32."
    )
    reads = f"{callback} reads kmp.LossScaleOptimizer, and the model's optimizer is {found}"
    return f"{reads}; the model computes in {' and '.join(dtypes)}. {advice}"
