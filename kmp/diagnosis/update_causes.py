"""Causes in the updates of the weights."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kmp.diagnosis import edits, thresholds
from kmp.diagnosis.cause import Cause, Edit, Edits, PrepareData, SetArguments, Stage
from kmp.diagnosis.run_metrics import RunMetrics, name_of
from kmp.diagnosis.sample_statistics import counts_below, unscaled_counts
from kmp.records import GradientSample
from kmp.utils.float_formats import BFLOAT16, FLOAT16, FLOAT32, FloatFormat

LARGEST_LOST = 2.0**FLOAT16.flush_exponent  # a square that is 0 in float16
# Those that divide by the root of a mean of squares, plus epsilon.
_WITH_SQUARES = ("Adam", "AdamW", "Lamb", "Nadam")
_BETA_2 = 0.999  # Keras' default for these optimizers


@dataclass(frozen=True, kw_only=True)
class DivisionByEpsilon(Cause):
    """An optimizer whose epsilon is 0 in the dtype of its state, so that it divides by 0.

    Args:
        epsilon: The setting.
        is_float16: Whether the state is float16.
    """

    stage = Stage.WEIGHTS

    epsilon: float
    is_float16: bool

    @classmethod
    def of(cls, run: RunMetrics) -> "DivisionByEpsilon | None":
        """Returns the cause if the run has it."""
        epsilon, replay = run.settings.epsilon, run.forward_replay
        variables = replay.batch.nonfinite_variables if replay else []
        if epsilon is None or not variables:
            return None
        is_float16 = FLOAT16.name in run.settings.variable_dtypes
        # TensorFlow flushes subnormal numbers to zero.
        is_always_zero = abs(epsilon) < FLOAT32.smallest_normal
        if not is_always_zero and not (is_float16 and epsilon <= LARGEST_LOST):
            return None
        change: list[Edit] = []
        if is_float16:
            change += _with_float32_weights(run, variables[:1], FLOAT16)
        if is_always_zero:
            change.append(SetArguments(edits.optimizer_call(run), {"epsilon": "1e-7"}))
        return cls(
            name="optimizer_state",
            location=variables[0],
            edits=tuple(change),
            epsilon=epsilon,
            is_float16=is_float16,
        )


@dataclass(frozen=True, kw_only=True)
class LostSquares(Cause):
    """Adam's state in float16, where it divides gradients by its epsilon alone.

    Where float16 rounds the mean of squared gradients to zero, a gradient g takes a step of
    g / epsilon times the learning rate. Elsewhere a step is at most about the learning rate.

    Args:
        epsilon: The setting.
        step: The step with the largest change.
        path: The path of the variable that changed so much.
        times: The root mean square of that change, divided by the learning rate.
        highest: log2 of the gradients below which the squares are lost.
    """

    stage = Stage.WEIGHTS

    epsilon: float
    step: int
    path: str
    times: float
    highest: int

    @classmethod
    def of(cls, run: RunMetrics) -> "LostSquares | None":
        """Returns the cause if the run has it."""
        rate = edits.learning_rate(run)
        epsilon = run.settings.epsilon
        if epsilon is None or epsilon <= LARGEST_LOST or not rate:
            return None
        if run.settings.optimizer not in _WITH_SQUARES:
            return None
        if FLOAT16.name not in run.settings.variable_dtypes:
            return None
        rate *= run.settings.steps_per_execution
        steps = ((change / rate, path, step) for change, path, step in _changes(run))
        times, path, step = max(steps, default=(0.0, "", 0))
        highest = _highest_lost(run)
        # A constraint may change weights by more. So gradients whose squares are lost have to be
        # frequent, too.
        if times <= thresholds.TOO_LARGE_STEP or not _are_lost(run, epsilon, highest):
            return None
        return cls(
            name="optimizer_state",
            location="epsilon",
            edits=_with_float32_weights(run, [path], FLOAT16),
            epsilon=epsilon,
            step=step,
            path=path,
            times=times,
            highest=highest,
        )


def _changes(run: RunMetrics) -> Iterator[tuple[float, str, int]]:
    """Yields the root mean square of the elements of each float16 variable that changed in a step.

    With the path of the variable and the step.
    """
    in_float32 = run.settings.float32_variables
    for sample in filter(_has_finite_update, run.run.samples):
        columns = zip(
            sample.names, sample.update_norm.tolist(), sample.updates.tolist(), strict=True
        )
        for path, norm, changed in columns:
            if changed and path not in in_float32 and math.isfinite(norm):
                yield norm / math.sqrt(changed), path, sample.step


def _has_finite_update(sample: GradientSample) -> bool:
    return sample.has_update and sample.is_finite


def _highest_lost(run: RunMetrics) -> int:
    """Returns log2 of the gradients whose squares add nothing to a mean in float16."""
    part = 1.0 - (
        _BETA_2 if run.settings.beta_2 is None else run.settings.beta_2
    )  # of a square is added to the mean
    return math.floor(math.log2(LARGEST_LOST / part) / 2) if part > 0 else 0


def _are_lost(run: RunMetrics, epsilon: float, highest: int) -> bool:
    """Whether many gradients are small enough to be lost, and large beside epsilon."""
    lowest = math.ceil(math.log2(thresholds.TOO_LARGE_STEP * epsilon))
    counts = unscaled_counts(run.finite_samples)
    below_lowest, below_highest = counts_below(counts, np.array([lowest, highest]))
    limit = thresholds.MANY_LOST_SQUARES * max(1.0, counts.sum())
    return bool(below_highest - below_lowest > limit)


@dataclass(frozen=True, kw_only=True)
class Exploding(Cause):
    """Updates that are too large in any number format.

    Args:
        step: The step with the largest update.
        ratio: Its norm relative to that of the weights.
        has_large_updates: Whether that, or a loss that rose after it, is the sign.
        first_loss: The first loss.
        highest_loss: The highest loss.
        has_risen: Whether that loss is the sign.
        is_estimated: Whether no update was made yet, and the learning rate and the gradients in
            float32 give the ratio.
        large_input: The inputs as Python source, if they are far from unit scale; may be empty.
        largest_input: Their largest magnitude.
    """

    stage = Stage.WEIGHTS

    step: int
    ratio: float
    has_large_updates: bool
    first_loss: float
    highest_loss: float
    has_risen: bool
    is_estimated: bool = False
    large_input: str = ""
    largest_input: float = 0.0

    @classmethod
    def of(cls, run: RunMetrics) -> "Exploding | None":
        """Returns the cause if the run has it."""
        step, ratio = run.update_ratio
        is_estimated = run.has_no_update and run.estimated_update > thresholds.DIVERGING_ESTIMATE
        if is_estimated:
            step, ratio = run.last_step + 1, run.estimated_update
        first, highest, _ = run.losses
        is_large = ratio > thresholds.EXPLODING_UPDATE
        has_exploded = highest > _exploded_loss(run)
        has_not_learned = _has_not_learned(run)
        are_many_skipped = run.overflows > thresholds.MOST_SKIPPED * run.steps
        has_large_updates = is_large and (are_many_skipped or has_exploded)
        stays_high = has_exploded and (run.ends_nonfinite or _stays_high(run))
        if not (has_large_updates or stays_high or has_not_learned):
            return None
        large_input, largest_input = _large_input(run)
        change: Edit = edits.smaller_learning_rate(run)
        if large_input:
            change = edits.normalized(large_input)
        return cls(
            name="exploding",
            location=large_input,
            edits=(change,),
            step=step,
            ratio=ratio,
            has_large_updates=is_large or has_not_learned,
            first_loss=first,
            highest_loss=highest,
            has_risen=has_exploded or has_not_learned,
            is_estimated=is_estimated,
            large_input=large_input,
            largest_input=largest_input,
        )


def _large_input(run: RunMetrics) -> tuple[str, float]:
    """Returns inputs that are far from unit scale as Python source, and their largest magnitude."""
    checks = [replay.batch for replay in run.replays]
    worst = max(checks, key=lambda each: each.largest_input, default=None)
    if worst is None or worst.largest_input <= thresholds.LARGE_INPUT:
        return "", 0.0
    return f"x{worst.largest_input_key}", worst.largest_input


def _exploded_loss(run: RunMetrics) -> float:
    first, _, _ = run.losses
    return thresholds.EXPLODING_LOSS * max(abs(first), thresholds.SMALL_LOSS)


def _stays_high(run: RunMetrics) -> bool:
    """Whether the last losses are high.

    With small updates, that comes from a different batch, not from an explosion.
    """
    has_small_updates = 0.0 < run.update_ratio[1] < thresholds.LARGE_UPDATE
    return abs(run.losses[2]) > _exploded_loss(run) and not has_small_updates


def _has_not_learned(run: RunMetrics) -> bool:
    """Whether the loss rose after a large update, and did not fall again."""
    first, highest, last = run.losses
    if run.update_ratio[1] <= thresholds.RISING_UPDATE:
        return False
    has_risen = first > 0 and highest > thresholds.RISING_LOSS * first
    has_stayed_high = last > first / 2
    if not (has_risen and has_stayed_high):
        return False
    # The loss of one batch may be noisy: that of the epochs stays near the first, and falls to the
    # end.
    _, losses = run.run.metrics.get("loss", (None, np.empty(0)))
    if len(losses) > 1 and losses.max() <= thresholds.RISING_LOSS * first:
        middle = losses[(len(losses) - 1) // 2]
        return bool(losses[-1] >= thresholds.FALLING_LOSS * middle)
    return True


@dataclass(frozen=True, kw_only=True)
class LostUpdates(Cause):
    """Weights in 16 bits that are too coarse for their updates.

    Args:
        number_format: The format of these weights.
        share: The share of the weights with a nonzero gradient that stayed as they were.
        variables: The paths of the variables of which most did.
        layers: The paths of their layers, if only some layers have weights in 16 bits.
    """

    stage = Stage.MAGNITUDES

    number_format: FloatFormat
    share: float
    variables: list[str]
    layers: list[str]

    @classmethod
    def of(cls, run: RunMetrics) -> "LostUpdates | None":
        """Returns the cause if the run has it."""
        dtypes = run.settings.variable_dtypes
        number_format = next((each for each in (FLOAT16, BFLOAT16) if each.name in dtypes), None)
        if number_format is None:
            return None
        nonzero, unchanged = _unchanged_weights(run)
        share = sum(unchanged.values()) / max(1, sum(nonzero.values()))
        if share <= thresholds.MANY_LOST_UPDATES:
            return None
        variables = _mostly_unchanged(nonzero, unchanged)
        layers = []
        if run.settings.policy not in ("", number_format.name):
            layers = list(dict.fromkeys(map(run.layer_of, variables)))
        return cls(
            name="lost_updates",
            location=variables[0] if variables else "",
            edits=_with_float32_weights(run, variables, number_format),
            number_format=number_format,
            share=share,
            variables=variables,
            layers=layers,
        )


def _unchanged_weights(run: RunMetrics) -> tuple[Counter[str], Counter[str]]:
    """Returns the weights with a nonzero gradient, and how many of them stayed, by variable."""
    nonzero: Counter[str] = Counter()
    unchanged: Counter[str] = Counter()
    for sample in filter(_has_finite_update, run.run.samples):
        counts = sample.elements - sample.zeros
        lost = np.maximum(counts - sample.updates, 0)
        nonzero.update(dict(zip(sample.names, counts.tolist(), strict=True)))
        unchanged.update(dict(zip(sample.names, lost.tolist(), strict=True)))
    return nonzero, unchanged


def _mostly_unchanged(nonzero: Counter[str], unchanged: Counter[str]) -> list[str]:
    """Returns the variables of which most weights stayed, those with the largest share first."""
    shares = {name: unchanged[name] / count for name, count in nonzero.items() if count}
    variables = sorted(shares, key=shares.__getitem__, reverse=True)
    return [name for name in variables if shares[name] > thresholds.MOSTLY_LOST]


def with_float32_weights(name: str) -> str:
    """Returns the statement that converts a model with weights in 16 bits, such as one of a file.

    Args:
        name: The name of their format.
    """
    return f"model = kmp.convert(kmp.to_float32(model), 'mixed_{name}')"


def _are_of_all_layers(run: RunMetrics, variables: Sequence[str], name: str) -> bool:
    """Whether all variables have a 16-bit format by the policies of several layers.

    One that code or one layer chooses for itself is changed there.
    """
    if run.settings.own_dtype_variables:
        return False
    has_several_layers = len(set(map(run.layer_of, variables))) > 1
    return has_several_layers and run.settings.variable_dtypes == [name]


def _with_float32_weights(
    run: RunMetrics, variables: Sequence[str], number_format: FloatFormat
) -> Edits:
    """Returns the edits after which 16-bit variables are float32: all, or those of a layer."""
    name = number_format.name
    is_of_model = not variables or run.settings.policy in ("", name)
    is_mixed = run.settings.policy_in_force == f"mixed_{name}"
    if is_mixed and (is_of_model or _are_of_all_layers(run, variables, name)):
        # The layers keep the policy with which they were created, in another program maybe.
        return (PrepareData(with_float32_weights(name)),)
    if is_of_model:
        return (edits.mixed_policy(name),)
    with_own_dtype = run.settings.own_dtype_variables
    own = [path for path in variables if path in with_own_dtype]
    others = [path for path in variables if path not in with_own_dtype]
    change: list[Edit] = []
    for path in own:
        change.append(SetArguments("self.add_weight", {"dtype": "'float32'"}, name_of(path)))
    for layer in dict.fromkeys(map(run.layer_of, others)):
        class_name = run.layers.get(layer, "")
        # What an embedding returns are its weights, and 8 bits would round these again.
        is_rounded_again = class_name == "Embedding" and number_format is BFLOAT16
        dtype = FLOAT32.name if is_rounded_again else f"mixed_{name}"
        arguments = {"dtype": repr(dtype)}
        change.append(SetArguments(f"keras.layers.{class_name}", arguments, name_of(layer)))
    return tuple(change)
