"""Rules about the updates of the weights."""

import math

import numpy as np

from kmp.advice.edits import SetArguments
from kmp.advice.finding import ERROR, Finding
from kmp.advice.run_metrics import RunMetrics
from kmp.advice.wording import exploding_edits, name_of, of_steps
from kmp.utils import BFLOAT16, FLOAT16

_EXPLODING_UPDATE = 0.5  # of the weights' norm, in one step; 1e-3 is typical
_RISING_UPDATE = 0.2  # with a loss that rose and stayed high
_RISING_LOSS = 2.0  # times the first loss
_FALLING_LOSS = 0.99  # times that in the middle of training
_LARGE_UPDATE = 0.05  # smaller updates cannot raise the loss a hundredfold
_EXPLODING_LOSS = 100.0  # times the first loss
_SMALL_LOSS = 0.01
_SKIPPED_BY_EXPLOSION = 0.1
_LARGEST_CONSTANT_LOST = 2.0**FLOAT16.flush_exponent
_MANY_LOST = 0.2
_WITH_SQUARES = ("Adam", "AdamW", "Lamb", "Nadam")  # divide by the root of a mean of squares, plus epsilon
_USUAL_BETA_2 = 0.999  # Keras' default for these optimizers
_TOO_LARGE_STEP = 1000.0  # times the learning rate
_MANY_LOST_SQUARES = 0.1


def optimizer_state(metrics: RunMetrics) -> Finding | None:
    """Reports an optimizer that divides by zero or takes too large steps, because it keeps its state in float16."""
    epsilon = metrics.setting("epsilon", None)
    if FLOAT16.name not in metrics.setting("variable_dtypes", []) or epsilon is None:
        return None
    found = (
        _division_by_zero(metrics, epsilon) if epsilon <= _LARGEST_CONSTANT_LOST else _lost_squares(metrics, epsilon)
    )
    if found is None:
        return None
    title, evidence, location = found
    return Finding(
        "optimizer_state",
        ERROR,
        title,
        evidence,
        (SetArguments("kmp.enable", {"policy": "'mixed_float16'"}),),
        "keeps weights and optimizer state in float32; or epsilon=1e-4",
        location,
    )


def _division_by_zero(metrics: RunMetrics, epsilon: float) -> tuple[str, str, str] | None:
    """Returns title, evidence and location if weights became NaN."""
    replay = metrics.forward_replay
    if replay is None or not replay.nonfinite_variables:
        return None
    return (
        f"The optimizer divides by zero: its epsilon of {epsilon:g} is 0 in float16, the dtype of its state.",
        f"{of_steps(metrics, metrics.overflows)} were skipped, and {replay.nonfinite_variables[0]} contains NaN or Inf "
        f"since an update. float16 rounds {_LARGEST_CONSTANT_LOST:.2g} and less to zero",
        replay.nonfinite_variables[0],
    )


def _lost_squares(metrics: RunMetrics, epsilon: float) -> tuple[str, str, str] | None:
    """Returns title, evidence and location if Adam divides many gradients by its epsilon alone.

    Where float16 rounds the mean of squared gradients to zero, a gradient g takes a step of g / epsilon times the
    learning rate. The usual step is about the learning rate.
    """
    optimizer = metrics.setting("optimizer", "")
    if optimizer not in _WITH_SQUARES or metrics.setting("policy", FLOAT16.name) != FLOAT16.name:
        return None
    part = 1.0 - metrics.setting("beta_2", _USUAL_BETA_2)  # of a squared gradient is added to the mean of squares
    highest = math.floor(math.log2(_LARGEST_CONSTANT_LOST / part) / 2) if part > 0 else 0
    lowest = _TOO_LARGE_STEP * epsilon
    share = metrics.gradients.share_between(math.ceil(math.log2(lowest)), highest)
    if share <= _MANY_LOST_SQUARES:
        return None
    return (
        f"The steps of {optimizer} are too large: its state is float16, where the squares of small gradients are 0, so "
        f"it divides by its epsilon of {epsilon:g} alone.",
        f"{share:.0%} of the nonzero gradient elements are between {lowest:.2g} and 2^{highest}: what one of them adds "
        "to the mean of squares is 0 in float16, and its step is more than "
        f"{_TOO_LARGE_STEP:g} times the learning rate",
        "epsilon",
    )


def exploding(metrics: RunMetrics) -> Finding | None:
    """Reports updates that are too large in any number format."""
    step, ratio = metrics.gradients.update_ratio
    first, highest, last = metrics.first_loss, metrics.highest_loss, metrics.last_loss
    limit = _EXPLODING_LOSS * max(abs(first), _SMALL_LOSS)
    is_large_update, is_loss_rising = ratio > _EXPLODING_UPDATE, highest > limit
    are_many_skipped = metrics.overflows > _SKIPPED_BY_EXPLOSION * metrics.steps
    # With small updates, a high loss at the end comes from a different batch, not from an explosion.
    stays_high = abs(last) > limit and not 0.0 < ratio < _LARGE_UPDATE
    has_risen = ratio > _RISING_UPDATE and highest > _RISING_LOSS * first
    has_not_learned = first > 0 and has_risen and last > first / 2 and not _falls_in_epochs(metrics)
    if (
        not has_not_learned
        and not (is_large_update and (are_many_skipped or is_loss_rising))
        and not (is_loss_rising and (metrics.ends_nonfinite or stays_high))
    ):
        return None
    evidence = []
    if is_large_update or has_not_learned:
        evidence.append(
            f"in step {step} the update was {ratio:.2g} times as large as the weights (L2 norms; 0.001 is typical)"
        )
    if is_loss_rising or has_not_learned:
        evidence.append(f"the loss rose from {first:.3g} to {highest:.3g}")
    if metrics.ends_nonfinite:
        evidence.append(
            f"the loss was NaN or Inf in the last {metrics.consecutive_overflows} steps, after steps with a finite loss"
        )
    if metrics.overflows:
        evidence.append(f"{of_steps(metrics, metrics.overflows)} were skipped")
    return Finding(
        "exploding",
        ERROR,
        "Training diverges: the updates are too large in any number format.",
        "; ".join(evidence),
        exploding_edits(metrics, ratio),
        "or clipnorm=1.0" if metrics.setting("optimizer", "") == "SGD" else "",
    )


def _falls_in_epochs(metrics: RunMetrics) -> bool:
    """Whether the loss of the epochs stays near the first, and falls to the end: that of one batch may be noisy."""
    _, losses = metrics.run.metrics.get("loss", (None, np.empty(0)))
    if len(losses) < 2 or losses.max() > _RISING_LOSS * metrics.first_loss:
        return False
    return bool(losses[-1] < _FALLING_LOSS * losses[(len(losses) - 1) // 2])


def lost_updates(metrics: RunMetrics) -> Finding | None:
    """Reports weights in 16 bits that are too coarse for their updates."""
    dtypes = metrics.setting("variable_dtypes", [])
    number_format = next((found for found in (FLOAT16, BFLOAT16) if found.name in dtypes), None)
    if number_format is None:
        return None
    share, variables = metrics.gradients.lost_updates
    if share <= _MANY_LOST:
        return None
    name = number_format.name
    named = f", most of {variables[0]}" if variables else ""
    own_dtype = set(metrics.setting("own_dtype_variables", []))
    layers = list(dict.fromkeys(map(metrics.layer_of, variables)))
    is_policy = metrics.setting("policy", name) == name or not layers
    edits = [SetArguments("kmp.enable", {"policy": f"'mixed_{name}'"})]
    where = "the weights"
    if not is_policy:  # only some layers have this dtype
        of_weights = [
            SetArguments("self.add_weight", {"dtype": "'float32'"}, name_of(path))
            for path in variables
            if path in own_dtype
        ]
        of_layers = [
            SetArguments(f"keras.layers.{metrics.class_of(layer)}", {"dtype": f"'mixed_{name}'"}, name_of(layer))
            for layer in dict.fromkeys(metrics.layer_of(path) for path in variables if path not in own_dtype)
        ]
        edits = [*of_weights, *of_layers]
        where = f"the weights of {', '.join(repr(name_of(layer)) for layer in layers[:3])}"
    return Finding(
        "lost_updates",
        ERROR,
        f"Updates are lost: {where} are in {name}, and many steps are too small to change them.",
        f"{share:.0%} of the weights with a nonzero gradient stayed as they were in the sampled updates{named}: a "
        f"{name} weight does not change by less than 2^-{number_format.fraction_bits + 2} of its magnitude",
        tuple(edits),
        "keeps the weights in float32",
        variables[0] if variables else "",
    )
