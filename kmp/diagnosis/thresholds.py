"""The thresholds of the diagnosis, each with its source or the measurement behind it.

Those by which the report finds where two runs differ stand here too. A test moves each by a fifth
and by a factor of two on the recorded runs of the programs of `docs/advice.md`, and
`docs/thresholds.md` lists which changes of a verdict that made. "Not seen" marks a threshold that
none of these runs depends on within a factor of two: its reason is an argument, not a measurement.
"""

# Shares of all training steps.
# A dynamic scale skips about one step in 2000, and a few rare batches do no harm. Not seen: no run
# that skips about so many has a cause in which it decides. Kept, because a single bad batch is no
# error.
FEW_SKIPPED = 0.01
# One growth in 200 steps or more skips at most 0.5 % of them. Not seen: the runs with this fault
# skip far more. Kept, because such a share costs little.
SKIPPED_BY_GROWTH = 0.02
MANY_SKIPPED = 0.05  # more than a scale costs that has settled
MOST_SKIPPED = 0.1  # noticeably longer training

# Numbers of steps.
STUCK_AFTER = 12  # skipped in a row: from the default 2^15 down to 2^3, which suits most losses
SKIPPED_AT_START = 6  # from the default 2^15 down to 2^9: normal
SLOW_START = 10  # skipped at the start, which costs too much also in a short run
# A tenth of the default. Not seen: the runs have the default, or 100 and less. Kept, because a
# scale that grows more slowly has to overflow for another reason.
SMALL_GROWTH_INTERVAL = 200

# Shares of gradient elements. Subnormal and flushed elements are the smallest; training bears to
# lose many of them.

# At a scale below 1, to which overflows in one layer have driven it. Not seen: in
# the one run in which it decides, no element is subnormal. Kept, because the cause is the layer,
# not the scale that fell.
SUBNORMAL_AT_LOW_SCALE = 0.05
# A larger scale costs nothing. Not seen: where a run has so many and a larger scale would
# not overflow, float16 also flushes many. Kept for runs without a replay, in which that is not
# known.
MANY_SUBNORMAL = 0.25
MOSTLY_SUBNORMAL = 0.5  # too many, also where gradients agree, or where a larger scale overflows
# Of one variable. Not seen: it selects the variable that a sentence and the report name. Kept,
# because a variable with fewer loses next to nothing.
UNDERFLOWED = 0.05
MANY_FLUSHED = 0.05  # to zero in float16 but not in float32
MOSTLY_FLUSHED = 0.5  # of one variable
MANY_ZEROS = 0.1  # dropout and ReLU cause zeros too, so a reference decides
# At a recommended scale. Not seen: it limits the lowest recommended scale, and the changes use the
# highest. Kept, because `what_if` returns both.
TOLERATED_UNDERFLOW = 1e-3
FEW_TOO_SMALL = 0.01  # below this the verdict does not give their norm
# Of the norm of all gradients: a thousandth is below the noise of a batch. Not seen: the
# runs in which it decides lose far less, or all. Kept, because no other check bounds what is lost.
MUCH_LOST = 1e-3
MANY_LOST_SQUARES = 0.1  # of the gradient elements
# Of the weights with a nonzero gradient. Not seen: the runs lose 73 % and more with this fault, and
# 11 % and less without. Kept, because the threshold lies between them.
MANY_LOST_UPDATES = 0.2
MOSTLY_LOST = 0.5  # of the weights of one variable
# Of one variable: they are 0 or Inf in float16. Not seen: no error of a run begins at such
# weights. Kept, because a sentence names them as the reason only if they are many.
MANY_LOST_VALUES = 0.1

# Relative errors of a comparison with float32. Sound programs stay below 0.004 for outputs and
# 0.12 for gradients in float16, and mostly below 0.02 and 0.18 in bfloat16; programs that float16
# ruins are at 0.25 and more. An error of the outputs alone does no harm: that of a constant that
# all examples share, such as the mean of a regression, can be large beside how they vary, and the
# loss not notice it.

HARMFUL_OUTPUT_ERROR = 0.05
# In bfloat16, which rounds eight times as coarsely: sound programs reach 0.04 in a transformer of
# two blocks, and 0.1 in an autoencoder whose outputs hardly vary between examples; programs that
# bfloat16 ruins are at 0.44 and more. Not seen: the only recorded run in bfloat16 is at 0.005.
# Kept, because an error that only rounds the outputs of an autoencoder is no harm.
HARMFUL_OUTPUT_ERROR_IN_BFLOAT16 = 0.25
# Examples of a comparison in bfloat16. How outputs and gradients vary between two examples says
# little: a sound transformer of six blocks had errors of 0.04 and 0.08 on 32 of them, and of 0.44
# and 0.25 on 2. Not seen: the recorded run has 32. Kept, because a slow replay takes fewer.
FEW_EXAMPLES = 8
HARMFUL_OUTPUT_ERROR_ALONE = 0.25  # where there are no gradients, or no layer adds to it
# Not seen: the largest errors of the runs are below 0.19 or above 0.5. Kept, because the threshold
# lies between them.
HARMFUL_GRADIENT_ERROR = 0.25
# Times the sampling noise of the gradients, of which rounding adds as much again where it does no
# more: a regression in bfloat16 that has converged is sound at 1.3 times. Not seen: no run has an
# error of one to four times the noise in which it decides. Kept, because the noise is an estimate.
BEYOND_NOISE = 2.0
# Beside a harmful error of the outputs. Not seen: the errors of gradients are far larger there.
# Kept, because an error of the outputs that no gradient shows does no harm.
NOTICED_GRADIENT_ERROR = 0.1
# Of a layer's gradients: those of another batch differ by more. Only gradients that agree make
# subnormal ones harmless.
SMALL_GRADIENT_ERROR = 0.1
CONVERGED = 1e-3  # of the largest gradients of the layer: smaller ones are nothing but rounding
# Where those of all layers together have converged. An attention whose inputs are random at first
# begins with small gradients, and they fell to a thousandth; those of a branch that float16 does
# not train stay.
CONVERGED_WITH_ALL = 1e-2
# Of a state: it moves half the way to the value of a batch, or less. Not seen: no state of a run
# stands out from the noise. Kept, because a state that moves faster is another one with the next
# batch.
SLOW_UPDATE = 0.5
# Of a state that does not depend on the batch: a moving average of weights with a decay of 0.9
# moves on by 90 %. Not seen: no run has such a state. Kept, because what moves on by less is soon
# where it goes to, rounded or not.
STEADY_UPDATE = 0.9
MAIN_PART = 0.5  # of an error of outputs, or of the results of an operation

# Powers of two.
SPARE_BITS = 6.0  # of headroom: far more than a scale needs that grows until it overflows
MARGIN_BITS = 1  # of headroom at the highest recommended scale

# Norm of an update, relative to the norm of the weights.
TYPICAL_UPDATE = 1e-2  # at the high end; 1e-3 is usual
LARGE_UPDATE = 0.05  # smaller ones cannot raise the loss a hundredfold
# With a loss that rose and stayed high. Not seen: the losses of the runs with updates near it do
# not double. Kept, because smaller updates do not raise a loss for long.
RISING_UPDATE = 0.2
EXPLODING_UPDATE = 0.5  # with skipped steps or a loss that rose a hundredfold
# A training that overflows may diverge in any number format then. Not seen: the updates of the runs
# in which it decides are below 0.25 or above 12. Kept, because layers in float32 do not repair a
# divergence.
DIVERGING_UPDATE = 1.0
# Of the next update, as SGD's learning rate and the gradients in float32 estimate it. Not seen:
# those of the runs are below 1.1, and of a program with inputs up to 3000 it is 4500. Kept, because
# layers in float32 do not repair a divergence.
DIVERGING_ESTIMATE = 10.0
# Of an input, in a training that diverges: images of bytes end at 255, normalized inputs near 10.
# Not seen: the inputs of the runs that diverge are normalized. Kept, because a smaller learning
# rate does not cure inputs of so different sizes.
LARGE_INPUT = 300.0

# Losses.
RISING_LOSS = 2.0  # times the first loss: noise of one batch stays below
# Times the first loss. A divergence has no limit, and noise stays far below.
EXPLODING_LOSS = 100.0
SMALL_LOSS = 0.01  # a first loss below counts as this
FALLING_LOSS = 0.99  # times that of the middle epoch
# The number of batches in the median. Not seen: the last losses of a run are all high or all low.
# Kept, because one noisy batch must not decide.
LAST_LOSSES = 5

# Activations.
# The outputs of the model in float32, times the largest input or 1. In a residual network whose
# blocks double the signal, float32 reaches an accuracy of 0.75 with outputs of 1e2, of 0.53 with
# 4e5, and of 0.3 or less from 2e7; with blocks that start small, 0.96. Outputs of sound programs
# in raw units reach 5e3. Not seen: those of no run do so. Kept, because a format with more range
# does not cure it.
GROWN_OUTPUTS = 1e6
# Of the growth, by its logarithm, the most that one layer may make: a cube of features, or a change
# of units, is all of it. Not seen: no run has such outputs. Kept, because one layer that
# overflows may be computed in float32.
GROWN_IN_ONE_LAYER = 0.5

# Of two runs, in the report. Chosen, not measured: they select what a table lists, no cause.
DIFFERENT_METRIC = 0.1  # of its largest value
MORE_ZEROS = 0.1  # than in the other run, of all elements of a layer
LARGER_NORM = 4.0  # times the norm of a layer in the other run

# Others.
FEW_COMPARISONS = 2  # with float32: the start and the end of a run
FEW_SAMPLES = 3  # the least that show the start, the middle and the end of a run
AGREEING_COMPARISONS = 3  # in a row in which gradients differ and one layer cures it: a proof
# The latest ones, of which half have to show that gradients differ. Not seen: the comparisons of a
# run agree, or more than gradients differs. Kept, because three in a row are most of five.
VOTING_COMPARISONS = 2 * AGREEING_COMPARISONS - 1
# Of Adam, times the learning rate; about 1 is usual. Not seen: those of the run with lost squares
# take more than 100 times. Kept, because a constraint or a schedule can make a step somewhat
# longer.
TOO_LARGE_STEP = 10.0
# An input that does so in a few operations, such as a square and a product. Not seen: the data of
# no run overflow float32. Kept, because an overflow of smaller inputs is not one of the data.
OVERFLOWS_FLOAT32 = 1e9
