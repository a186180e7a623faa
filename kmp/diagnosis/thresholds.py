"""The thresholds of the diagnosis, each with its source or the measurement behind it.

Those of the replay stand here too: it decides which layers it tries in float32. A test moves each
by a fifth and by a factor of two on the recorded runs of the programs of `docs/advice.md`, and
`docs/thresholds.md` lists which changes of a verdict that made. "Not seen" marks a threshold that
none of these runs depends on within a factor of two: its reason is an argument, not a measurement.
"""

# Shares of all training steps.
FEW_SKIPPED = (
    0.01  # a dynamic scale skips about one step in 2000, and a few rare batches do no harm
)
SKIPPED_BY_GROWTH = 0.02  # one growth in 200 steps or more skips at most 0.5 % of them
MANY_SKIPPED = 0.05  # more than a scale costs that has settled
MOST_SKIPPED = 0.1  # noticeably longer training

# Numbers of steps.
STUCK_AFTER = 12  # skipped in a row: from the default 2^15 down to 2^3, which suits most losses
SKIPPED_AT_START = 6  # from the default 2^15 down to 2^9: normal
SLOW_START = 10  # skipped at the start, which costs too much also in a short run
SMALL_GROWTH_INTERVAL = 200  # a tenth of the default

# Shares of gradient elements. Subnormal and flushed elements are the smallest; training bears to
# lose many of them.
SUBNORMAL_AT_LOW_SCALE = 0.05  # at a scale below 1, to which overflows in one layer have driven it
MANY_SUBNORMAL = 0.25  # a larger scale costs nothing
MOSTLY_SUBNORMAL = 0.5  # too many, also where gradients agree, or where a larger scale overflows
UNDERFLOWED = 0.05  # of one variable
MANY_FLUSHED = 0.05  # to zero in float16 but not in float32
MOSTLY_FLUSHED = 0.5  # of one variable
MANY_ZEROS = 0.1  # dropout and ReLU cause zeros too, so a reference decides
TOLERATED_UNDERFLOW = 1e-3  # at a recommended scale
FEW_TOO_SMALL = 0.01  # below this the verdict does not give their norm
MUCH_LOST = 1e-3  # of the norm of all gradients: a thousandth is below the noise of a batch
MANY_LOST_SQUARES = 0.1  # of the gradient elements
MANY_LOST_UPDATES = 0.2  # of the weights with a nonzero gradient
MOSTLY_LOST = 0.5  # of the weights of one variable
MANY_LOST_VALUES = 0.1  # of one variable: they are 0 or Inf in float16

# Relative errors of a comparison with float32. Sound programs stay below 0.004 for outputs and
# 0.12 for gradients in float16, and 0.02 for outputs in bfloat16; programs that float16 ruins are
# at 0.25 and more. An error of the outputs alone does no harm: that of a constant that all
# examples share, such as the mean of a regression, can be large beside how they vary, and the loss
# not notice it.
HARMFUL_OUTPUT_ERROR = 0.05
HARMFUL_OUTPUT_ERROR_ALONE = 0.25  # where there are no gradients, or no layer adds to it
HARMFUL_GRADIENT_ERROR = 0.25
NOTICED_GRADIENT_ERROR = 0.1  # beside a harmful error of the outputs
SMALL_GRADIENT_ERROR = 0.1  # of a layer's gradients: those of another batch differ by more
CONVERGED = 1e-3  # of the largest gradients of the layer: smaller ones are nothing but rounding
SLOW_UPDATE = 0.5  # of a state: it moves half the way to the value of a batch, or less
MAIN_PART = 0.5  # of an error of outputs, or of the results of an operation
UNSCALED_PART = 0.1  # of a gradient that does not grow with the loss scale: found ones have 13 %
FAITHFUL_PART = 0.5  # of a gradient that grows, if the loss is scaled at all

# Powers of two.
SPARE_BITS = 6.0  # of headroom: far more than a scale needs that grows until it overflows
MARGIN_BITS = 1  # of headroom at the highest recommended scale
USABLE_BITS = 2  # between the largest gradient of a replay and float16's maximum
LOG2_DEFAULT_SCALE = 15  # of `kmp.enable`

# Norm of an update, relative to the norm of the weights.
TYPICAL_UPDATE = 1e-2  # at the high end; 1e-3 is usual
LARGE_UPDATE = 0.05  # smaller ones cannot raise the loss a hundredfold
RISING_UPDATE = 0.2  # with a loss that rose and stayed high
EXPLODING_UPDATE = 0.5  # with skipped steps or a loss that rose a hundredfold
DIVERGING_UPDATE = 1.0  # a training that overflows may diverge in any number format then

# Losses.
RISING_LOSS = 2.0  # times the first loss: noise of one batch stays below
EXPLODING_LOSS = 100.0  # times the first loss
SMALL_LOSS = 0.01  # a first loss below counts as this
FALLING_LOSS = 0.99  # times that of the middle epoch
LAST_LOSSES = 5  # the number of batches in the median

# Others.
FEW_COMPARISONS = 2  # with float32: the start and the end of a run
FEW_SAMPLES = 3  # the least that show the start, the middle and the end of a run
AGREEING_COMPARISONS = 3  # in a row in which gradients differ and one layer cures it: a proof
TOO_LARGE_STEP = 10.0  # of Adam, times the learning rate; about 1 is usual
OVERFLOWS_FLOAT32 = 1e9  # an input that does so in a few operations, such as a square and a product
INVALID_BY_ROUNDING = 1e-3  # of a target beyond 0 and 1, as by resizing a mask
