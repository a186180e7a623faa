"""The callback that samples gradients."""

from kmp.callbacks.monitor import Monitor
from kmp.callbacks.training_records import GRADIENTS


class GradientHistogram(Monitor):
    """Samples gradients at regular steps: a histogram of binary exponents for each variable.

    What `Monitor` records, without the loss scale and overflows, with the same arguments. `run.samples` and the log
    have the samples, and `grad_zeros`, the fraction of gradient elements that are exactly zero: an upper bound on the
    fraction that float16 flushed to zero.

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
