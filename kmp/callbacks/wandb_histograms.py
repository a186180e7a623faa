"""The callback that sends gradient histograms to Weights & Biases."""

from typing import Any

import keras

from kmp.callbacks.model_saving import is_chief
from kmp.callbacks.optimizer_callback import Logs
from kmp.callbacks.tensorboard_events import histograms_by_tag
from kmp.records import ExponentHistogram, Run
from kmp.utils import user_messages, validation

_STEP = "kmp/step"


class WandbHistograms(keras.callbacks.Callback):
    """Sends the gradient histograms of a run to Weights & Biases, as its own histograms.

    Each sample of `GradientHistogram` is one histogram of all gradients, `kmp/gradient_exponents`, and one for each
    layer, `kmp_by_layer/NAME`, over the optimizer's steps. The bins are binary exponents of the loss-scaled gradients:
    float16 is normal from -14, subnormal from -24. Zeros, Inf and NaN are left out; a gradient that is all zero is at
    -150, and one without a finite element is not sent. On several workers, only the chief sends.

    If Weights & Biases refuses a histogram, it warns and sends no more; training continues.

    Scalars need no callback of kmp's: `wandb.integration.keras.WandbMetricsLogger` sends all of `logs`.

    Args:
        run: The `kmp.records.Run` of other callbacks in the same `fit`, which are listed before this one, such as
            `defaults(...)[0].run`.
        wandb_run: The `wandb.Run` that gets the histograms. Defaults to `wandb.run`, which `wandb.init` sets.

    Raises:
        TypeError: If `run` is not a `kmp.records.Run`, or `wandb_run` is not a `wandb.Run`.
        ImportError: If Weights & Biases is not installed.
        RuntimeError: In `on_train_begin`, if there is no `wandb.Run`.

    Example:
    >>> from kmp import callbacks
    >>> loggers = callbacks.defaults()
    >>> attached = [*loggers, callbacks.WandbHistograms(loggers[0].run)]  # doctest: +SKIP
    """

    def __init__(self, run: Run, wandb_run: Any = None) -> None:
        super().__init__()
        validation.instance("run", run, Run, "the kmp.records.Run of other callbacks, such as defaults(...)[0].run")
        try:
            import wandb
        except ImportError as error:
            raise ImportError("WandbHistograms needs Weights & Biases: pip install wandb") from error
        if wandb_run is not None and not isinstance(wandb_run, wandb.Run):
            raise TypeError(validation.message("wandb_run", wandb_run, "a wandb.Run, such as wandb.init(...) returns"))
        self.run = run
        self._wandb, self._wandb_run = wandb, wandb_run
        self._rows_seen: int | None = None
        self._sends = True

    def on_train_begin(self, logs: Logs = None) -> None:
        self._sends = is_chief(self.model.distribute_strategy)
        if not self._sends:
            return
        if self._current_run is None:
            raise RuntimeError("WandbHistograms needs a run of Weights & Biases: call wandb.init(...) before `fit`.")
        for prefix in ("kmp", "kmp_by_layer"):
            self._current_run.define_metric(f"{prefix}/*", step_metric=_STEP)
        self._rows_seen = None

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        if self._rows_seen is None:  # the callbacks of `run` have dropped the rows of an earlier training by now
            self._rows_seen = len(self.run.rows)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._send_new_samples()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._send_new_samples()

    @property
    def _current_run(self) -> Any:
        return self._wandb.run if self._wandb_run is None else self._wandb_run

    def _send_new_samples(self) -> None:
        rows = self.run.rows[self._rows_seen :]
        self._rows_seen = len(self.run.rows)
        if not self._sends:
            return
        try:
            for sample in Run([row for row in rows if "sample" in row]).samples:
                by_tag = histograms_by_tag(sample, self.run.settings.get("layers", {}))
                self._current_run.log({_STEP: sample.step} | {tag: self._histogram(by_tag[tag]) for tag in by_tag})
        except Exception as error:  # such as a run that was finished meanwhile, which must not end training
            self._sends = False
            user_messages.warn(f"Weights & Biases gets no more histograms: {user_messages.one_line(error)}.")

    def _histogram(self, histogram: ExponentHistogram) -> Any:
        edges, counts = histogram.log2_buckets()
        return self._wandb.Histogram(np_histogram=(counts.tolist(), edges.tolist()))
