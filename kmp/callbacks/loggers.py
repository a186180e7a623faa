"""The callbacks that record one part of what `Monitor` does."""

from kmp.callbacks.monitor import Monitor
from kmp.callbacks.optimizer_reader import PathLike
from kmp.callbacks.training_records import GRADIENTS, LOSS_SCALE, OVERFLOWS
from kmp.optimizer import LossScaleOptimizer


class _CountLogger(Monitor):
    """Records counts only: without the arguments about samples."""

    def __init__(
        self,
        log_dir: PathLike | None = None,
        every_n_steps: int = 250,
        optimizer: LossScaleOptimizer | None = None,
    ) -> None:
        super().__init__(log_dir, every_n_steps, optimizer, reference=None)


class LossScaleLogger(_CountLogger):
    """Logs the loss scale, as `loss_scale` in `logs`: what `Monitor` records, without overflows and gradients.

    Takes `log_dir`, `every_n_steps` and `optimizer`, as `Monitor` does, and raises the same errors.

    Example:
    >>> import keras, kmp, numpy as np
    >>> with kmp.enable(initial_scale=1024.0):
    ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    >>> history = model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0, callbacks=[kmp.callbacks.LossScaleLogger()])
    >>> history.history["loss_scale"]
    [1024.0]
    """

    parts = (LOSS_SCALE,)


class OverflowCounter(_CountLogger):
    """Counts the steps that were skipped because the loss or a gradient was non-finite, as `overflow_count` in `logs`.

    What `Monitor` records, without the loss scale and gradients. `run` and the log also have, since
    the record before, `overflow_rate`, the fraction of steps that were skipped;
    `nonfinite_loss_count`, the skipped steps since training began whose loss was non-finite before
    it was scaled, which no loss scale prevents; the variable where the last overflow with a finite
    loss originated; and for each variable the number of steps in which it overflowed and in which
    the overflow originated there.

    Takes `log_dir`, `every_n_steps` and `optimizer`, as `Monitor` does, and raises the same errors.

    Example:
    >>> import keras, kmp, numpy as np
    >>> with kmp.enable():
    ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    >>> y = np.full((8, 1), 1e4)  # at the loss scale 2^15, gradients exceed 65504
    >>> counter = kmp.callbacks.OverflowCounter()
    >>> history = model.fit(np.ones((8, 4)), y, verbose=0, callbacks=[counter])
    >>> history.history["overflow_count"], counter.run.last("nonfinite_loss_count")
    ([1], 0)
    """

    parts = (OVERFLOWS,)


class GradientHistogram(Monitor):
    """Samples gradients at regular steps: a histogram of binary exponents for each variable.

    What `Monitor` records, without the loss scale and overflows, with the same arguments.
    `run.samples` and the log have the samples, and `grad_zeros`, the fraction of gradient elements
    that are exactly zero: an upper bound on the fraction that float16 flushed to zero.

    Example:
    >>> import keras, kmp, numpy as np
    >>> with kmp.enable():
    ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    >>> histogram = kmp.callbacks.GradientHistogram(variables="*/kernel")
    >>> _ = model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0, callbacks=[histogram])
    >>> histogram.run.samples[0]
    <GradientSample step=1 loss_scale=32768: 1 variables>
    """

    parts = (GRADIENTS,)
