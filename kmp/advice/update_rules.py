"""Rules about the updates of the weights."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from kmp.advice import thresholds
from kmp.advice.finding import ERROR, Edit, Finding, SetArguments
from kmp.advice.run_metrics import RunMetrics, name_of
from kmp.advice.sample_statistics import counts_below, unscaled_counts
from kmp.advice.wording import learning_rate, of_steps, optimizer_call, smaller_learning_rate
from kmp.utils import BFLOAT16, FLOAT16, FLOAT32, FloatFormat

_LARGEST_LOST = 2.0**FLOAT16.flush_exponent
_WITH_SQUARES = (
    "Adam",
    "AdamW",
    "Lamb",
    "Nadam",
)  # divide by the root of a mean of squares, plus epsilon
_BETA_2 = 0.999  # Keras' default for these optimizers
_IN_FLOAT32 = "keeps weights and optimizer state in float32; or epsilon=1e-4"


def division_by_epsilon(metrics: RunMetrics) -> Finding | None:
    """Reports an optimizer whose epsilon is 0 in the dtype of its state, so that it divides by 0."""
    epsilon, replay = metrics.settings.get("epsilon"), metrics.forward_replay
    if epsilon is None or replay is None or not replay.nonfinite_variables:
        return None
    is_float16 = FLOAT16.name in metrics.settings.get("variable_dtypes", [])
    is_always_zero = (
        abs(epsilon) < FLOAT32.smallest_normal
    )  # TensorFlow flushes subnormal numbers to zero
    if not is_always_zero and not (is_float16 and epsilon <= _LARGEST_LOST):
        return None
    path = replay.nonfinite_variables[0]
    title = "The optimizer divides by zero: its epsilon is 0."
    evidence = (
        f"{of_steps(metrics, metrics.overflows)} were skipped, and {path} contains NaN or Inf since"
        " an update"
    )
    edits: list[Edit] = []
    note = "where all gradients of a weight were 0, it divides 0 by epsilon"
    if is_always_zero:
        edits = [SetArguments(optimizer_call(metrics), {"epsilon": "1e-7"})]
    if is_float16:
        title = (
            f"The optimizer divides by zero: its epsilon of {epsilon:g} is 0 in float16, the dtype"
            " of its state."
        )
        evidence += f". float16 rounds {_LARGEST_LOST:.2g} and less to zero"
        edits, note = [*_with_float32_weights(metrics, [path], FLOAT16), *edits], _IN_FLOAT32
    return Finding("optimizer_state", ERROR, title, evidence, edits, note, path)


def lost_squares(metrics: RunMetrics) -> Finding | None:
    """Reports Adam's state in float16, where it divides gradients by its epsilon alone.

    Where float16 rounds the mean of squared gradients to zero, a gradient g takes a step of g /
    epsilon times the learning rate. Elsewhere a step is at most about the learning rate.
    """
    settings, rate = metrics.settings, learning_rate(metrics)
    epsilon, optimizer = settings.get("epsilon"), settings.get("optimizer", "")
    if epsilon is None or epsilon <= _LARGEST_LOST or optimizer not in _WITH_SQUARES or not rate:
        return None
    if FLOAT16.name not in settings.get("variable_dtypes", []):
        return None
    # Of each variable in float16, the root mean square of what changed, in the steps that were
    # measured.
    rate *= settings.get("steps_per_execution", 1)
    in_float32 = settings.get("float32_variables", ())
    steps = (
        (norm / math.sqrt(changed) / rate, path, sample.step)
        for sample in metrics.run.samples
        if sample.has_update and sample.histogram.is_finite
        for path, norm, changed in zip(
            sample.names, sample.update_norm.tolist(), sample.updates.tolist(), strict=True
        )
        if changed and path not in in_float32 and math.isfinite(norm)
    )
    times, path, step = max(steps, default=(0.0, "", 0))
    # A constraint may change weights by more. So gradients whose squares are lost have to be
    # frequent, too.
    part = 1.0 - settings.get(
        "beta_2", _BETA_2
    )  # of a squared gradient is added to the mean of squares
    highest = math.floor(math.log2(_LARGEST_LOST / part) / 2) if part > 0 else 0
    lowest = math.ceil(math.log2(thresholds.TOO_LARGE_STEP * epsilon))
    counts = unscaled_counts(metrics.finite_samples)
    below_lowest, below_highest = counts_below(counts, np.array([lowest, highest]))
    are_lost = below_highest - below_lowest > thresholds.MANY_LOST_SQUARES * max(1.0, counts.sum())
    if times <= thresholds.TOO_LARGE_STEP or not are_lost:
        return None
    return Finding(
        "optimizer_state",
        ERROR,
        f"The steps of {optimizer} are too large: its state is float16, where the squares of small"
        f" gradients are 0, so it divides by its epsilon of {epsilon:g} alone.",
        f"in step {step}, {path} changed by {times:.3g} times the learning rate (root mean square;"
        f" 1 is usual); what a gradient below 2^{highest} adds to the mean of squares is 0 in"
        " float16",
        _with_float32_weights(metrics, [path], FLOAT16),
        _IN_FLOAT32,
        "epsilon",
    )


def exploding(metrics: RunMetrics) -> Finding | None:
    """Reports updates that are too large in any number format."""
    step, ratio = metrics.update_ratio
    first, highest, last = metrics.losses
    limit = thresholds.EXPLODING_LOSS * max(abs(first), thresholds.SMALL_LOSS)
    is_large_update, is_loss_rising = ratio > thresholds.EXPLODING_UPDATE, highest > limit
    are_many_skipped = metrics.overflows > thresholds.MOST_SKIPPED * metrics.steps
    has_large_updates = is_large_update and (are_many_skipped or is_loss_rising)
    # With small updates, a high loss at the end comes from a different batch, not from an
    # explosion.
    stays_high = abs(last) > limit and not 0.0 < ratio < thresholds.LARGE_UPDATE
    has_high_loss = is_loss_rising and (metrics.ends_nonfinite or stays_high)
    has_risen = ratio > thresholds.RISING_UPDATE and highest > thresholds.RISING_LOSS * first
    has_not_learned = first > 0 and has_risen and last > first / 2
    # The loss of one batch may be noisy: that of the epochs stays near the first, and falls to the
    # end.
    _, losses = metrics.run.metrics.get("loss", (None, np.empty(0)))
    if len(losses) > 1 and losses.max() <= thresholds.RISING_LOSS * first:
        has_not_learned &= bool(
            losses[-1] >= thresholds.FALLING_LOSS * losses[(len(losses) - 1) // 2]
        )
    if not (has_large_updates or has_high_loss or has_not_learned):
        return None
    evidence = []
    if is_large_update or has_not_learned:
        evidence.append(
            f"in step {step} the update was {ratio:.2g} times as large as the weights (L2 norms;"
            " 0.001 is typical)"
        )
    if is_loss_rising or has_not_learned:
        evidence.append(f"the loss rose from {first:.3g} to {highest:.3g}")
    if metrics.ends_nonfinite:
        evidence.append(
            f"the loss was NaN or Inf in the last {metrics.consecutive_overflows} steps, after"
            " steps with a finite loss"
        )
    if metrics.overflows:
        evidence.append(f"{of_steps(metrics, metrics.overflows)} were skipped")
    return Finding(
        "exploding",
        ERROR,
        "Training diverges: the updates are too large in any number format.",
        "; ".join(evidence),
        smaller_learning_rate(metrics),
        "or clipnorm=1.0" if metrics.settings.get("optimizer") == "SGD" else "",
    )


def lost_updates(metrics: RunMetrics) -> Finding | None:
    """Reports weights in 16 bits that are too coarse for their updates."""
    dtypes = metrics.settings.get("variable_dtypes", [])
    number_format = next((found for found in (FLOAT16, BFLOAT16) if found.name in dtypes), None)
    if number_format is None:
        return None
    # Of the weights with a nonzero gradient, those that stayed as they were in the updates that
    # were measured.
    nonzero: Counter[str] = Counter()
    unchanged: Counter[str] = Counter()
    for sample in metrics.run.samples:
        if sample.has_update and sample.histogram.is_finite:
            counts = sample.elements - sample.zeros
            nonzero.update(dict(zip(sample.names, counts.tolist(), strict=True)))
            lost = np.maximum(counts - sample.updates, 0)
            unchanged.update(dict(zip(sample.names, lost.tolist(), strict=True)))
    share = sum(unchanged.values()) / max(1, sum(nonzero.values()))
    if share <= thresholds.MANY_LOST_UPDATES:
        return None
    shares = {name: unchanged[name] / count for name, count in nonzero.items() if count}
    variables = sorted(shares, key=shares.__getitem__, reverse=True)
    variables = [name for name in variables if shares[name] > thresholds.MOSTLY_LOST]
    name, where = number_format.name, "the weights"
    if variables and metrics.settings.get("policy", name) != name:
        layers = list(dict.fromkeys(map(metrics.layer_of, variables)))
        where = f"the weights of {', '.join(repr(name_of(layer)) for layer in layers[:3])}"
    return Finding(
        "lost_updates",
        ERROR,
        f"Updates are lost: {where} are in {name}, and many steps are too small to change them.",
        f"{share:.0%} of the weights with a nonzero gradient stayed as they were in the sampled"
        f" updates{f', most of {variables[0]}' if variables else ''}: a {name} weight does not"
        f" change by less than 2^-{number_format.fraction_bits + 2} of its magnitude",
        _with_float32_weights(metrics, variables, number_format),
        "keeps the weights in float32",
        variables[0] if variables else "",
    )


def _with_float32_weights(
    metrics: RunMetrics, variables: Sequence[str], number_format: FloatFormat
) -> list[Edit]:
    """Returns the edits after which these variables, now in a 16-bit dtype, are float32: all, or those of a layer."""
    name = number_format.name
    if not variables or metrics.settings.get("policy", name) == name:
        return [SetArguments("kmp.enable", {"policy": f"'mixed_{name}'"})]
    own_dtype = [
        path for path in variables if path in metrics.settings.get("own_dtype_variables", [])
    ]
    layers = dict.fromkeys(metrics.layer_of(path) for path in variables if path not in own_dtype)
    edits: list[Edit] = [
        SetArguments("self.add_weight", {"dtype": "'float32'"}, name_of(path)) for path in own_dtype
    ]
    edits += [
        SetArguments(
            f"keras.layers.{metrics.layers.get(layer, '')}",
            {"dtype": f"'mixed_{name}'"},
            name_of(layer),
        )
        for layer in layers
    ]
    return edits
