"""The thresholds of all rules, each with its reason. The programs of `docs/advice.md` test them together."""

# Shares of all training steps.
FEW_SKIPPED = (
    0.01  # a dynamic scale skips about one step in 2000, and a few rare batches do no harm
)
SKIPPED_BY_GROWTH = 0.02  # one growth in 200 steps or more skips at most 0.5 % of them
MANY_SKIPPED = 0.05  # more than a scale costs that has settled
MOST_SKIPPED = 0.1  # noticeably longer training

# Numbers of steps.
STUCK_AFTER = (
    12  # consecutive skipped steps: from the default 2^15 down to 2^3, which suits most losses
)
SKIPPED_AT_START = 6  # from the default 2^15 down to 2^9: normal
SLOW_START = 10  # skipped steps at the start that cost too much also in a short run
SMALL_GROWTH_INTERVAL = 200  # a tenth of the default

# Shares of gradient elements. Subnormal and flushed elements are the smallest; training bears to
# lose many of them.
SUBNORMAL_AT_LOW_SCALE = 0.05  # at a scale below 1, to which overflows in one layer have driven it
MANY_SUBNORMAL = 0.25  # a larger scale costs nothing
MOSTLY_SUBNORMAL = (
    0.5  # too many, also where compared gradients agree, or where a larger scale would overflow
)
UNDERFLOWED = 0.05  # of one variable
MANY_FLUSHED = 0.05  # to zero in float16 but not in float32
MOSTLY_FLUSHED = 0.5  # of one variable
# more flushed elements could matter; dropout and ReLU cause zeros too, so a reference decides
MANY_ZEROS = 0.1
TOLERATED_UNDERFLOW = 1e-3  # at a recommended scale
FEW_TOO_SMALL = 0.01  # below this the verdict does not give their norm
MUCH_LOST = 1e-3  # of the norm of all gradients: a thousandth is below the noise of a batch
MANY_LOST_SQUARES = 0.1  # of the gradient elements
MANY_LOST_UPDATES = 0.2  # of the weights with a nonzero gradient
MOSTLY_LOST = 0.5  # of the weights of one variable
MANY_LOST_VALUES = 0.1  # of one variable: they are 0 or Inf in float16

# Relative errors.
MAIN_PART = 0.5  # of an error of outputs, or of the results of an operation
SMALL_GRADIENT_ERROR = 0.1  # of a layer's gradients: those of another batch differ by more

# Powers of two.
SPARE_BITS = 6.0  # of headroom: far more than a scale needs that grows until it overflows
MARGIN_BITS = 1  # of headroom at the highest recommended scale
LOG2_DEFAULT_SCALE = 15  # of `kmp.enable`

# Norm of an update, relative to the norm of the weights.
TYPICAL_UPDATE = 1e-2  # at the high end; 1e-3 is usual
LARGE_UPDATE = 0.05  # smaller ones cannot raise the loss a hundredfold
RISING_UPDATE = 0.2  # with a loss that rose and stayed high
EXPLODING_UPDATE = 0.5  # with skipped steps or a loss that rose a hundredfold

# Losses.
RISING_LOSS = 2.0  # times the first loss: noise of one batch stays below
EXPLODING_LOSS = 100.0  # times the first loss
SMALL_LOSS = 0.01  # a first loss below counts as this
FALLING_LOSS = 0.99  # times that of the middle epoch
LAST_LOSSES = 5  # the number of batches in the median

# Others.
FEW_COMPARISONS = 2  # with float32: the start and the end of a run
FEW_SAMPLES = 3  # the least that show the start, the middle and the end of a run
TOO_LARGE_STEP = 10.0  # of Adam, times the learning rate; about 1 is usual
OVERFLOWS_FLOAT32 = 1e9  # an input that does so in a few operations, such as a square and a product
