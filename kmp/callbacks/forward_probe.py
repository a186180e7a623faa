"""The callback that finds the first NaN or Inf of a forward pass."""

from typing import Any

from kmp.callbacks.nonfinite_activation_probe import NonfiniteActivationProbe
from kmp.callbacks.optimizer_callback import Logs, OptimizerCallback
from kmp.optimizer import LossScaleOptimizer
from kmp.policy import guarding
from kmp.records import Snapshot


class ForwardProbe(OptimizerCallback):
    """Finds the first NaN or Inf in the forward pass of each step whose loss is non-finite.

    The result is a layer's path, `"the batch's x"` (or `y`, or `sample_weight`), or `"the loss function"`. It is
    recorded as `nonfinite_activation` in `run` and the log, and shown in the report and in the message of a
    `StuckError`. During training it is also in `optimizer.snapshot()`. An input `x` beyond float16's 65504 counts as
    Inf.

    The probe checks the layer outputs of the step itself. It computes nothing while losses are finite. Values that a
    layer computes inside a loop, as an RNN does, are checked only at the layer's output. With several replicas, those
    of this process are checked. Each `fit` with this callback traces the training step again. It adds nothing to
    `logs`, and does nothing for a model that needs no loss scale and is compiled without `kmp.LossScaleOptimizer`.

    Args:
        log_dir: Folder for `kmp.jsonl` and TensorBoard's files, or `None` to write no file.
        every_n_steps: Integer, at least 1: how often to read the optimizer, in optimizer steps.
        optimizer: The `kmp.LossScaleOptimizer` whose losses to check, for a model with several. Defaults to the
            model's.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `every_n_steps` is below 1; in `on_train_begin`, if a float16 model has no
            `kmp.LossScaleOptimizer`.
        OSError: In `on_train_begin`, if `log_dir` cannot be written.

    Example:
    >>> import keras, kmp, numpy as np
    >>> with kmp.enable():
    ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    >>> probe = kmp.callbacks.ForwardProbe()
    >>> _ = model.fit(np.full((8, 4), np.inf), np.ones((8, 1)), verbose=0, callbacks=[probe])
    >>> probe.run.last("nonfinite_activation")
    "the batch's x"
    """

    def _prepare_train_step(self, optimizer: LossScaleOptimizer) -> bool:
        guarding.install(self.model)
        self._remove_probe()  # a training that ended with an error leaves its probe installed
        probe = NonfiniteActivationProbe(self.model, [optimizer])
        optimizer.probe = probe
        guarding.probes_of(self.model).append(probe)
        return True

    def on_train_end(self, logs: Logs = None) -> None:
        super().on_train_end(logs)
        if self._is_active:
            self._remove_probe()
            self.model.make_train_function(force=True)

    def _remove_probe(self) -> None:
        probes, probe = guarding.probes_of(self.model), self.optimizer.probe
        if isinstance(probe, NonfiniteActivationProbe) and probe in probes:
            probes.remove(probe)
            probe.remove()
        self.optimizer.probe = None

    def _record_of(self, snapshot: Snapshot) -> dict[str, Any] | None:
        if snapshot.nonfinite_loss_count == self._last_snapshot.nonfinite_loss_count:
            return None
        return {"step": snapshot.step, "nonfinite_activation": snapshot.nonfinite_activation}
