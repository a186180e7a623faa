"""The callback that finds where a forward pass goes wrong."""

from typing import Any

from kmp.callbacks.nonfinite_activation_probe import NonfiniteActivationProbe
from kmp.callbacks.optimizer_callback import Logs, OptimizerCallback
from kmp.optimizer import LossScaleOptimizer
from kmp.policy import skipped_step_rollback
from kmp.records import Snapshot


class ForwardProbe(OptimizerCallback):
    """Names what was the first to be inf or nan in the forward pass of a step whose loss was not finite.

    That is a layer's path, `"the batch's x"` (or `y`, or `sample_weight`), or `"the loss function"`; under
    `nonfinite_activation` in `run` and in the log, in the report, in the error of a stuck run, and while it trains in
    `optimizer.snapshot()`. A number in the batch beyond float16's 65504 counts as inf. It looks at the outputs of the
    layers in the step itself; while losses are finite it computes nothing. What a layer computes inside a loop, as an
    RNN does, is seen when it leaves the loop. On several replicas, those of this process are looked at. Each `fit` with
    it traces its training step anew.

    Args:
        log_dir: Folder for `kmp.jsonl` and TensorBoard's files, or `None` to write no file.
        every_n_steps: Integer, at least 1: how often to read, by the optimizer's step counter.
        optimizer: The `kmp.LossScaleOptimizer` whose losses to watch, for a model that holds several; its own by
            default.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If `every_n_steps` is below 1; in `on_train_begin`, if the optimizer is not kmp's.
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

    def _prepare(self, optimizer: LossScaleOptimizer) -> bool:
        skipped_step_rollback.install(self.model)
        self._remove()  # one that was left by a training which ended in an error
        probe = NonfiniteActivationProbe(self.model, [optimizer])
        optimizer.probe = probe
        skipped_step_rollback.probes_of(self.model).append(probe)
        return True

    def on_train_end(self, logs: Logs = None) -> None:
        super().on_train_end(logs)
        self._remove()
        self.model.make_train_function(force=True)

    def _remove(self) -> None:
        probes, probe = skipped_step_rollback.probes_of(self.model), self.optimizer.probe
        if isinstance(probe, NonfiniteActivationProbe) and probe in probes:
            probes.remove(probe)
            probe.remove()
        self.optimizer.probe = None

    def _row(self, snapshot: Snapshot) -> dict[str, Any] | None:
        if snapshot.nonfinite_loss_count == self._last.nonfinite_loss_count:
            return None
        return {"step": snapshot.step, "nonfinite_activation": snapshot.nonfinite_activation}
