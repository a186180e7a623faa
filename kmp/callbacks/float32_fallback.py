"""The callback that lets a training go on in which float16 fails in a few layers."""

import contextlib
from typing import Any

import keras

from kmp.advice import advise
from kmp.backend import keras_internals, layers_by_path, sublayers
from kmp.callbacks.monitor import Monitor
from kmp.callbacks.optimizer_reader import Logs
from kmp.records import Replay
from kmp.utils import DTYPES_16_BIT, FLOAT32, user_messages, validation

# The causes of findings that float16 alone has: not data, labels, a learning rate or weights with NaN.
CURABLE = (
    "backward_overflow",
    "constant",
    "forward_overflow",
    "forward_underflow",
    "loss_overflow",
    "precision_loss",
    "rounding",
)
_STREAK = 4  # skipped steps in a row, after which it looks for a cause
_CHECKED_EVERY = 32  # batches; each check copies a few numbers from the device


class Float32Fallback(keras.callbacks.Callback):
    """Sets layers to float32 in which float16 provably fails, and continues the training.

    When steps are skipped in a row, or a comparison shows that float16 changes outputs and gradients, the monitor's
    replay of a batch searches the fewest layers that have to compute in float32, at most twelve. If it finds them, and
    the cause is not the data, the labels, the learning rate or the weights, this callback sets their `dtype_policy` and
    that of their sublayers to float32, and replays the batch once more. Only if that is sound, the training step is
    traced again and the training continues; otherwise everything is as before. Variables, optimizer, loss scale and
    counters stay.

    It warns with the layers, the reason, the step and the change that makes it permanent, and records `fallback`. The
    layers of a functional or Sequential model keep their policy in each file that is saved, and so do layers that a
    custom class creates with a `dtype` of their own. A training that resumes in a new process, with a model that is
    built again, falls back again within its first steps.

    Does nothing where no batch can be replayed, see `Monitor`; and nothing to a training without overflows and harmful
    errors.

    Args:
        monitor: The `kmp.callbacks.Monitor` of the same `fit`, listed before it, with `reference="auto"`.

    Raises:
        TypeError: If `monitor` is not a `Monitor`.
        ValueError: If it has `reference=None`.

    Example:
    >>> from kmp import callbacks
    >>> monitor = callbacks.Monitor()
    >>> attached = [monitor, callbacks.Float32Fallback(monitor), callbacks.StuckDetector()]
    """

    def __init__(self, monitor: Monitor) -> None:
        super().__init__()
        validation.instance("monitor", monitor, Monitor, "a kmp.callbacks.Monitor")
        self.monitor = monitor
        if monitor.reference is None:
            raise ValueError("`monitor` must replay batches: create it with reference='auto'.")

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copy has: the settings, without the model, which `fit` sets."""
        return vars(self) | {"_model": None, "_rejected": None}

    def on_train_begin(self, logs: Logs = None) -> None:
        self._batches_left = 1
        self._rejected: Replay | None = None
        self._records = 0  # of the run, when it was examined last

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if not self.monitor.is_active:
            return
        self._batches_left -= self.model.steps_per_execution
        streak = 0
        if self._batches_left <= 0:
            streak = self.monitor.optimizer.counters.read_counts().overflows_in_a_row
            self._batches_left = streak or _CHECKED_EVERY  # a longer streak is looked at again when it has doubled
        if streak >= _STREAK:
            self.monitor.read()
        self._repair()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if self.monitor.is_active:
            self._repair()

    def _repair(self) -> None:
        """Sets the layers to float32 that the last replay found, if it is a proof and float16 is the cause."""
        replay, records = self.monitor.last_replay, len(self.monitor.run.rows)
        is_known = replay is self._rejected or records == self._records
        if replay is None or is_known or not replay.float32_layers:
            return
        if replay.is_finite and replay.error_origin is None:
            return  # only gradients differ, which one batch does not prove
        self._records = records
        finding = next(iter(advise(self.monitor.run).problems), None)
        if finding is None:
            return  # a later record may have one
        self._rejected = replay
        layers = layers_by_path(self.model)
        if finding.cause not in CURABLE or not layers.keys() >= set(replay.float32_layers):
            return
        chosen = {id(inner): inner for path in replay.float32_layers for inner in sublayers(layers[path])}.values()
        changed = [layer for layer in chosen if layer.compute_dtype in DTYPES_16_BIT]
        with contextlib.ExitStack() as stack:
            for layer in changed:
                stack.enter_context(keras_internals.dtype_policy_replaced(layer, keras.DTypePolicy(FLOAT32.name)))
            proof = self.monitor.replay_again()
        result = proof.get("replay")
        if result is None or not result.is_finite or (replay.is_finite and result.is_harmful):
            return
        for layer in changed:
            layer.dtype_policy = FLOAT32.name
        self.model.make_train_function(force=True)
        self.model.test_function = self.model.predict_function = None  # traced again when they are used
        step = self.monitor.add_record({"fallback": replay.float32_layers, "fallback_reason": finding.title})
        self.monitor.add_record(proof)
        change = finding.change.replace("\n", "\n  ")
        user_messages.warn(
            f"{finding.title} At step {step} kmp set {', '.join(map(repr, replay.float32_layers))} to float32, and the "
            f"training continues. To make it permanent:\n  {change}"
        )
