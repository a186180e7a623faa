"""Callbacks that record one part of what `Monitor` does, and neither replay, repair nor stop."""

from kmp.callbacks.monitor import Monitor
from kmp.callbacks.training_records import GRADIENTS, LOSS_SCALE, OVERFLOWS, PathLike
from kmp.optimizer import LossScaleOptimizer


class _Logger(Monitor):
    """Records only."""

    def __init__(
        self,
        log_dir: PathLike | None = None,
        every_n_steps: int = 250,
        optimizer: LossScaleOptimizer | None = None,
    ) -> None:
        super().__init__(log_dir, every_n_steps, optimizer, replay=False, on_nonfinite="ignore")


class LossScaleLogger(_Logger):
    """Logs the loss scale, as `loss_scale` in `logs`: 1 where no layer computes in float16.

    Takes `log_dir`, `every_n_steps` and `optimizer`, as `Monitor` does, and raises the same errors.

    Example:
    >>> import keras, kmp, numpy as np
    >>> with kmp.enable(initial_scale=1024.0):
    ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    >>> x, y, logger = np.ones((8, 4)), np.ones((8, 1)), kmp.callbacks.LossScaleLogger()
    >>> model.fit(x, y, verbose=0, callbacks=[logger]).history["loss_scale"]
    [1024.0]
    """

    recorded = (LOSS_SCALE,)


class OverflowCounter(_Logger):
    """Counts the skipped steps, as `overflow_count` in `logs`.

    A step is skipped if its loss or a gradient is non-finite. `run` and the log also have:

    - `overflow_rate`: the fraction of steps that were skipped since the record before.
    - `nonfinite_loss_count`: the skipped steps since training began whose loss was non-finite
      before it was scaled, which no loss scale prevents.
    - `overflow_origin`: the variable where the last overflow with a finite loss originated.
    - `overflows_by_variable`, `overflow_origins_by_variable`: the number of steps in which the
      gradient of a variable was non-finite, and in which the overflow originated there.

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

    recorded = (OVERFLOWS,)


class GradientHistogram(Monitor):
    """Samples gradients at regular steps: a histogram of binary exponents for each variable.

    `run.samples` and the log have the samples, and `grad_zeros`, the fraction of gradient elements
    that are exactly zero: in float16, an upper bound on the fraction that was flushed to zero.

    Takes `log_dir`, `every_n_steps`, `optimizer` and `variables`, as `Monitor` does, and raises the
    same errors.

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

    recorded = (GRADIENTS,)

    def __init__(
        self,
        log_dir: PathLike | None = None,
        every_n_steps: int = 250,
        optimizer: LossScaleOptimizer | None = None,
        *,
        variables: str | list[str] | None = None,
    ) -> None:
        super().__init__(
            log_dir,
            every_n_steps,
            optimizer,
            variables=variables,
            replay=False,
            on_nonfinite="ignore",
        )
