"""The verdict of a diagnosis: what the records of a run exclude, and what they leave unknown."""

import math
from collections.abc import Callable
from typing import NamedTuple

from kmp.advice.finding import Finding
from kmp.advice.run_metrics import RunMetrics
from kmp.utils import DTYPES_16_BIT, FLOAT16, as_power

_MANY_ZEROS = 0.1
_MANY_SKIPPED = 0.05
_MUCH_LOST = 1e-3  # of the norm of all gradients
_FEW_TOO_SMALL = 0.01
_FEW_SAMPLES = 3


class Exclusion(NamedTuple):
    """The evidence that excludes a cause.

    Attributes:
        causes: The causes of findings that are excluded.
        is_excluded: Whether the records exclude them.
        unknown: What is unknown otherwise.
        remedy: What shows it. `{call}` stands for the call that sets the loss scale.
    """

    causes: tuple[str, ...]
    is_excluded: Callable[[RunMetrics], bool]
    unknown: str
    remedy: str


def _has_few_skipped_steps(metrics: RunMetrics) -> bool:
    return metrics.overflows <= _MANY_SKIPPED * metrics.steps or metrics.startup_overflows[0] == metrics.overflows


def _has_enough_samples(metrics: RunMetrics) -> bool:
    """Whether there are enough finite samples, and one is of the second half: gradients change in training."""
    samples = metrics.gradients.finite_samples
    return len(samples) >= _FEW_SAMPLES and 2 * max(sample.step for sample in samples) >= metrics.steps


def _has_no_unknown_zeros(metrics: RunMetrics) -> bool:
    """Whether few elements are zero, or a float32 pass shows that float16 flushed little."""
    if not metrics.has_reference:
        return metrics.gradients.zero_share <= _MANY_ZEROS and not metrics.gradients.all_zero_variables
    return _lost_norm(metrics) <= _MUCH_LOST


def _lost_norm(metrics: RunMetrics) -> float:
    """Returns an upper bound of the norm of the elements that are too small, relative to that of all gradients."""
    sample = metrics.gradients.finite_samples[-1]
    lost = math.sqrt(metrics.gradients.underflow_share * sample.histogram.total) * 2.0**FLOAT16.flush_exponent
    return lost * sample.loss_scale / metrics.scale / sample.largest if sample.largest else math.inf


def _has_updates_that_change_weights(metrics: RunMetrics) -> bool:
    dtypes = metrics.setting("variable_dtypes", [])
    ratios = [ratio for _, ratio in metrics.gradients.update_ratios]
    if not dtypes:  # unknown, in logs of earlier versions
        return not ratios or max(ratios) > 0
    return not set(DTYPES_16_BIT) & set(dtypes) or max(ratios, default=0.0) > 0


# A NaN or Inf in a loss always has a finding, and so has a loss that is not scaled.
EXCLUSIONS = (
    Exclusion(
        ("backward_overflow", "scale_too_large", "growth_interval_too_small", "optimizer_state"),
        _has_few_skipped_steps,
        "why steps overflow",
        "a longer run, because a dynamic scale settles after its first steps",
    ),
    Exclusion(
        ("branch_underflow", "scale_too_small", "range"),
        _has_enough_samples,
        f"the gradients of the whole run, from fewer than {_FEW_SAMPLES} samples or none of its second half",
        "a smaller every_n_steps in kmp.callbacks.defaults()",
    ),
    Exclusion(
        ("branch_underflow", "scale_too_small", "range"),
        _has_no_unknown_zeros,
        "whether float16 flushed the gradient elements that are exactly zero",
        "a replay, with Keras' training step on one replica, or fewer zeros with {call}(initial_scale=2.0**24)",
    ),
    Exclusion(
        ("branch_underflow", "range"),
        lambda metrics: not metrics.flushed_layers,
        "what the layers lose whose gradients are mostly zero in float16, but not in float32",
        "a training in float32 to compare with",
    ),
    Exclusion(
        ("lost_updates",),
        _has_updates_that_change_weights,
        "whether updates change weights in float16",
        "kmp.callbacks.defaults(), which measures updates",
    ),
    Exclusion(
        ("exploding",),
        lambda metrics: math.isfinite(metrics.last_loss) or metrics.gradients.update_ratio[1] > 0,
        "whether training diverges",
        "kmp.callbacks.defaults(), which records losses and updates",
    ),
)


def verdict(metrics: RunMetrics, problems: list[Finding]) -> str:
    """Returns the effect of float16 on a run, in a few sentences: the first problem if there is one."""
    gradients = metrics.gradients
    if not metrics.steps:
        return "The run is empty: nothing was recorded."
    if problems:
        return problems[0].title
    skipped = f"{metrics.overflows} of {metrics.steps} steps {'was' if metrics.overflows == 1 else 'were'} skipped"
    if gradients.curve is None or not gradients.finite_samples:
        reason = "No sampled step was finite" if gradients.samples else "No gradients were sampled"
        return f"{skipped}. {reason}, so underflow is unknown."
    if not metrics.is_float16:
        return f"{skipped}. The run computed in {metrics.dtypes}, where gradients need no loss scale."
    doubts = [exclusion for exclusion in EXCLUSIONS if not exclusion.is_excluded(metrics)]
    effect = (
        "No sign that float16 hurts this run"
        if doubts
        else "float16 does not hurt the gradients and updates of this run"
    )
    unknown = []
    for doubt in doubts:
        if doubt.is_excluded is _has_no_unknown_zeros and not metrics.has_reference:
            unknown.append(_zeros(metrics))
        unknown.append(f"Unknown: {doubt.unknown}; to find out: {doubt.remedy.format(call=metrics.settings_call)}.")
    is_small = metrics.has_reference and gradients.underflow_share > _FEW_TOO_SMALL and not doubts
    count = len(gradients.finite_samples)
    norm = f" (at most {_lost_norm(metrics):.1g} of the norm)" if is_small else ""
    numbers = (
        f"{skipped}, and at the loss scale in use, {as_power(metrics.scale)}, {gradients.subnormal_share:.1%} of the "
        f"nonzero gradient elements are subnormal in float16 and {gradients.underflow_share:.1%} are too small for "
        f"float16{norm}, in {count} sample{'s' * (count != 1)}."
    )
    return " ".join([f"{effect}: {numbers}", *(unknown or [_not_measured(metrics)])])


def _not_measured(metrics: RunMetrics) -> str:
    text = "Rounding in the forward pass is not measured"
    if metrics.setting("train_step", "keras") == "keras":
        return f"{text}."
    return f"{text}, nor whether the custom `train_step` scales each of its losses."


def _zeros(metrics: RunMetrics) -> str:
    gradients = metrics.gradients
    variables = metrics.unexplained_zero_variables
    named = variables[0] if len(variables) == 1 else f"{len(variables)} variables"
    including = f", including all of {named}" if variables else ""
    reason = ""
    error = metrics.run.last("replay_error")
    if error:
        reason = f"; the replay of a batch failed with {error}"
    elif all(replay.is_forward_only for replay in metrics.replays):
        reason = (
            "; no batch was replayed, which needs reference='auto', Keras' training step, one replica and dense inputs"
        )
    return f"{gradients.zero_share:.1%} are exactly zero{including}{reason}."
