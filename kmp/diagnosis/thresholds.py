"""The thresholds of the diagnosis, each with its source or the measurement behind it.

Those by which the report finds where two runs differ stand here too. `docs/thresholds.md` has how
far each can be moved before a verdict on one of the recorded runs of the programs of
`docs/advice.md` changes. A threshold that none of these runs limits is derived, which its comment
says, or measured elsewhere.
"""

# Shares of a whole. More than half of it is most of it: a definition.
MOST = 0.5

# Shares of all training steps.
# Derived: a dynamic scale skips about one step in 2000, and one that grows every 100 steps to an
# overflow one in 100. What costs fewer steps than this costs less than the noise of a run.
FEW_SKIPPED = 0.01
# Measured: notebook 1 trains as well with a scale that grows every 50 steps, which skips 0.011.
SKIPPED_BY_GROWTH = 0.02
MANY_SKIPPED = 0.05  # more than a scale costs that has settled
MOST_SKIPPED = 0.1  # noticeably longer training

# Numbers of steps.
STUCK_AFTER = 12  # skipped in a row: from the default 2^15 down to 2^3, which suits most losses
SKIPPED_AT_START = 6  # from the default 2^15 down to 2^9: normal
SLOW_START = 10  # skipped at the start, which costs too much also in a short run

# Shares of gradient elements, or of the values of a weight. Subnormal and flushed elements are the
# smallest; training bears to lose many of them.
# Below float16's normal range, where a larger scale would not overflow. Measured: notebook 8 trains
# a head of a model at 0.31, and it learns nothing; no recorded run without replays is near it.
MANY_SUBNORMAL = 0.25
# To zero in float16 but not in float32, or zeros of which that is not known; of one variable also
# below the normal range.
MANY_FLUSHED = 0.05
# Of the elements at a recommended scale, or of the norm of all gradients. Derived: the noise of a
# batch is about one over the root of its examples, and this is that of a million.
NEGLIGIBLE = 1e-3
MANY_LOST_SQUARES = 0.1  # of the gradient elements
# Of the weights with a nonzero gradient: the runs lose 73 % and more with this fault, and 11 % and
# less without.
MANY_LOST_UPDATES = 0.2

# Relative errors of a comparison with float32. Sound programs stay below 0.004 for outputs and
# 0.12 for gradients in float16, and mostly below 0.02 and 0.18 in bfloat16; programs that float16
# ruins are at 0.25 and more. An error of the outputs alone does no harm: that of a constant that
# all examples share, such as the mean of a regression, can be large beside how they vary, and the
# loss not notice it.
HARMFUL_OUTPUT_ERROR = 0.05
# In bfloat16, which rounds eight times as coarsely. Measured: sound programs reach 0.04 in a
# transformer of two blocks, and 0.1 in an autoencoder whose outputs hardly vary between examples;
# programs that bfloat16 ruins are at 0.44 and more.
HARMFUL_OUTPUT_ERROR_IN_BFLOAT16 = 0.25
# Examples of a comparison in bfloat16. How outputs and gradients vary between two examples says
# little. Measured: a sound transformer of six blocks had errors of 0.04 and 0.08 on 32 of them, and
# of 0.44 and 0.25 on 2.
FEW_EXAMPLES = 8
HARMFUL_OUTPUT_ERROR_ALONE = 0.25  # where there are no gradients, or no layer adds to it
HARMFUL_GRADIENT_ERROR = 0.25
# Times the sampling noise of the gradients, of which rounding adds as much again where it does no
# more. Measured: a regression in bfloat16 that has converged is sound at 1.3 times.
BEYOND_NOISE = 2.0
# Of a layer's gradients: those of another batch differ by more. Such an error makes subnormal ones
# harmless, and an error of the outputs that the gradients do not notice.
SMALL_GRADIENT_ERROR = 0.1
# Of the largest gradients of the layer. Derived: a gradient begins as the difference of an output
# and a target; where this is a thousandth of what it was at first, the rounding of the output, up
# to 2^-11 of it in float16, is half of it.
CONVERGED = 1e-3
# Where those of all layers together have converged. Measured: those of an attention whose inputs
# are random at first are small from the beginning, and fell to a thousandth; those of a branch that
# float16 does not train stay.
CONVERGED_WITH_ALL = 1e-2
# Of a state that does not depend on the batch. Derived: a moving average of weights with a decay of
# 0.9 moves on by 90 %, and what moves on by less is soon where it goes to, rounded or not.
STEADY_UPDATE = 0.9

# Powers of two.
SPARE_BITS = 6.0  # of headroom: far more than a scale needs that grows until it overflows
# Of headroom at the highest recommended scale. Measured: in 31 of 33 healthy recorded runs no
# sample of the gradients is more than twice as large as all others.
MARGIN_BITS = 1

# Norm of an update, relative to the norm of the weights.
# Of a proposed learning rate. Measured: the median of the samples of a healthy recorded run is at
# most 0.03, and that of half of the runs at most 0.011.
TYPICAL_UPDATE = 1e-2
LARGE_UPDATE = 0.05  # smaller ones cannot raise the loss a hundredfold
RISING_UPDATE = 0.2  # with a loss that rose and stayed high: smaller ones do not raise it for long
EXPLODING_UPDATE = 0.5  # with skipped steps or a loss that rose a hundredfold
# A training that overflows may diverge in any number format then, and layers in float32 do not
# repair a divergence.
DIVERGING_UPDATE = 1.0
# Of the next update, as SGD's learning rate and the gradients of one batch in float32 estimate it.
# Derived: an estimate from one batch may be wrong by a factor of ten.
DIVERGING_ESTIMATE = 10 * DIVERGING_UPDATE
# Norm of the weights, times that of the first sample. Derived: beside weights that have doubled, an
# update looks half as large as it does beside those of the start.
GROWN_WEIGHTS = 2.0
# Of an input, in a training that diverges. Derived: images of bytes end at 255, and normalized
# inputs near 10.
LARGE_INPUT = 300.0
# Of Adam, times the learning rate; about 1 is usual. Derived: a step is at most (1 - beta_1) /
# sqrt(1 - beta_2) = 3.2 (Kingma and Ba, "Adam", section 2.1), and a schedule may change it.
TOO_LARGE_STEP = 10.0

# Losses.
RISING_LOSS = 2.0  # times the first loss: noise of one batch stays below
# Times the first loss: a divergence has no limit. Measured: in the healthy recorded runs the loss
# rises to at most 1.7 times the first one, in three that diverge to 88, 140 and 9,900 times.
EXPLODING_LOSS = 100.0
SMALL_LOSS = 0.01  # a first loss below counts as this
FALLING_LOSS = 0.99  # times that of the middle epoch
LAST_LOSSES = 5  # in the median. Derived: two noisy batches do not decide

# Activations.
# The outputs of the model in float32, times the largest input or 1. Measured: in a residual network
# whose blocks double the signal, float32 reaches an accuracy of 0.75 with outputs of 1e2, of 0.53
# with 4e5, and of 0.3 or less from 2e7; with blocks that start small, 0.96. Outputs of sound
# programs in raw units reach 5e3.
GROWN_OUTPUTS = 1e6
# An input that overflows float32 in a few operations. Derived: the fourth power is 1e36, and a sum
# of 340 of these is beyond float32.
OVERFLOWS_FLOAT32 = 1e9

# Comparisons and samples.
FEW_COMPARISONS = 2  # with float32: the start and the end of a run
FEW_SAMPLES = 3  # the least that show the start, the middle and the end of a run
AGREEING_COMPARISONS = 3  # in a row in which gradients differ and one layer cures it: a proof
# The latest ones, of which half have to show that gradients differ. Derived: so many as are needed
# for a proof are most of them.
VOTING_COMPARISONS = 2 * AGREEING_COMPARISONS - 1

# Of two runs, in the report, which lists what differs. Measured: two small classifiers with and
# without convolutions, each trained in float16 with four seeds.
# Of a metric's largest value. Measured: accuracies differ by up to 0.05; losses by up to 0.23, so
# a loss that is marked may differ by chance.
DIFFERENT_METRIC = 0.1
# Than in the other run, of all elements of a layer. Measured: shares differ by up to 0.29.
MORE_ZEROS = 0.3
LARGER_NORM = 4.0  # times that of a layer in the other run. Measured: norms differ up to 3.4 times
