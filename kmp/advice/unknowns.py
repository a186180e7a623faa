"""What the records of a run leave unknown, and what shows it.

Without any, they exclude each cause of a finding. A NaN or Inf in a loss always has a finding, and
so has a loss that is not scaled.
"""

import math
from collections.abc import Iterator

from kmp.advice.missing_replays import FLOAT32_TRAINING, missing_replays
from kmp.advice.wording import counted, first_few
from kmp.diagnosis import RunMetrics, soundness, thresholds
from kmp.records import Replay
from kmp.utils.float_formats import DTYPES_16_BIT, FLOAT16


def unknowns(run: RunMetrics) -> Iterator[str]:
    """Yields what the records of a run leave unknown, each as a sentence."""
    yield from _not_compared(run)
    yield from _states_in_16_bits(run)
    yield from _overflows(run)
    yield from _samples(run)
    if run.format is FLOAT16:  # others have float32's range
        yield from _zeros(run)
    yield from _updates(run)


def doubt(unknown: str, remedy: str) -> str:
    """Returns a sentence: what was not measured, and what would measure it."""
    return f"Not measured: {unknown}; to find out: {remedy}."


def lost_norm(run: RunMetrics) -> float:
    """Returns an upper bound of the norm of the elements that are too small.

    Relative to the norm of all gradients.
    """
    sample = run.finite_samples[-1]
    elements = run.underflow_share * sample.total
    if not elements:
        return 0.0
    if not sample.largest:
        return math.inf
    largest_lost = 2.0**FLOAT16.flush_exponent / run.scale
    return math.sqrt(elements) * largest_lost / sample.largest


def _not_compared(run: RunMetrics) -> Iterator[str]:
    """Yields what of outputs and gradients was not compared with float32."""
    harmful = [step for step, replay in run.comparisons if _has_harmful_errors(replay)]
    if harmful:
        of_all = f"in {len(harmful)} of {counted(len(run.comparisons), 'comparison')}"
        errors = f"the errors of outputs or gradients at step {harmful[-1]}, {of_all},"
        yield doubt(f"what {errors} did to the training", FLOAT32_TRAINING)
    elif len(run.comparisons) < thresholds.FEW_COMPARISONS or not run.is_compared_late:
        why, remedy = _why_not(run)
        what = "how far outputs and gradients are from those in float32"
        yield doubt(f"{what}, because {_compared_batches(run)} compared{why}", remedy)
    else:
        yield from _missing_in(run, [replay for _, replay in run.comparisons])


def _missing_in(run: RunMetrics, comparisons: list[Replay]) -> Iterator[str]:
    """Yields what some of the comparisons lack."""
    if any(replay.is_forward_only for replay in comparisons):
        unknown, remedy = "how far gradients are from those in float32", FLOAT32_TRAINING
        is_loop = run.settings.train_step == "keras"
        if is_loop and not _is_scaled_right(run):  # but a loop of the user's own has trained
            unknown += ", and whether the loop scales, clips and unscales them in the right order"
            remedy = f"the same step as the `train_step` of a model in `fit`; or {remedy}"
        yield doubt(
            f"{unknown}, because only the forward pass could be replayed, without the loss", remedy
        )
        return
    measured = [replay.comparison for replay in comparisons if replay.comparison]
    if any(comparison.states is None for comparison in measured):
        yield doubt(
            "what the updates of states lose that are not trainable, such as moving averages,"
            " because the replayed batch could not be halved or the replay took too long",
            FLOAT32_TRAINING,
        )


def _is_scaled_right(run: RunMetrics) -> bool:
    """Whether the graph of the step shows that all gradients are scaled as `apply` expects."""
    return run.step_facts is not None and run.step_facts.scaling == "right"


def _has_harmful_errors(replay: Replay) -> bool:
    output_error = replay.output_error or 0.0
    # With the limits of float16, which are stricter: between these and others nothing is known.
    is_harmful = soundness.is_harmful(replay, FLOAT16)
    return is_harmful or output_error > thresholds.HARMFUL_OUTPUT_ERROR


def _compared_batches(run: RunMetrics) -> str:
    if not run.comparisons:
        return "no batches of the run were"
    if len(run.comparisons) < thresholds.FEW_COMPARISONS:
        return "only 1 batch of the run was"
    return "no batch of its second half was"


def _why_not(run: RunMetrics) -> tuple[str, str]:
    """Returns why batches were not compared, in parentheses, and what would compare them."""
    missing = missing_replays(run)
    has_failed = run.run.last("replay_error") is not None
    if has_failed or not run.replays:
        return f" ({missing.reason})" if missing.reason else "", missing.remedy
    if not any(replay.is_finite for replay in run.replays):
        return " (the replayed ones were not finite)", FLOAT32_TRAINING
    if not run.comparisons:
        reason = " (the forward pass draws random numbers that differ by pass)"
        return reason, FLOAT32_TRAINING
    return "", FLOAT32_TRAINING


def _states_in_16_bits(run: RunMetrics) -> Iterator[str]:
    checks = [replay.batch for replay in run.replays]
    check = max(checks, key=lambda each: each.states_in_16_bits, default=None)
    if check and check.states_in_16_bits:
        count, names = check.states_in_16_bits, list(dict.fromkeys(check.names_of_states))
        lose = "loses" if count == 1 else "lose"
        named = f", of {first_few(names)}," if names else ""
        yield doubt(
            f"what {counted(count, 'variable')} in 16 bits{named} {lose} that the training step"
            " assigns beside the weights, such as a moving average",
            "the same run with float32 in place of 16 bits there",
        )


def _overflows(run: RunMetrics) -> Iterator[str]:
    """Yields whether it is known how many steps overflow, and why."""
    if run.complete_run.last("overflow_count") is None:
        remedy = "kmp.callbacks.defaults(), which counts them"
        yield doubt("how many steps were skipped", remedy)
    are_later = run.overflows != run.startup_overflows[0] and not _is_settling(run)
    if are_later and run.overflows > thresholds.MANY_SKIPPED * run.steps:
        remedy = "a longer run"
        if run.has_loss_scale:
            remedy += ", because a dynamic scale settles after its first steps"
        yield doubt("why steps overflow", remedy)


def _is_settling(run: RunMetrics) -> bool:
    """Whether the skipped steps are those of a scale that falls until it suits the gradients.

    Which the last one must not belong to. A scale that grows too fast has a finding.
    """
    if run.is_fixed or not run.has_loss_scale or run.consecutive_overflows:
        return False
    return run.overflows <= thresholds.SKIPPED_AT_START


def _samples(run: RunMetrics) -> Iterator[str]:
    """Yields what the samples do not show of the start, the middle and the end of a run."""
    what, samples = "the gradients of the whole run", run.finite_samples
    if len(samples) < thresholds.FEW_SAMPLES:
        taken = f"{counted(len(samples), 'finite sample')} in {counted(run.steps, 'step')}"
        yield doubt(f"{what}, because there are only {taken}", "a longer run")
    elif 2 * max(sample.step for sample in samples) < run.last_step:
        remedy = "a smaller every_n_steps in kmp.callbacks.defaults()"
        yield doubt(f"{what}, because its second half has no finite sample", remedy)


def _zeros(run: RunMetrics) -> Iterator[str]:
    """Yields what is not known of zeros in the samples, and of what a replay shows as flushed."""
    if _has_doubtful_zeros(run):
        zeros = f"the gradient elements that are exactly zero, {run.unexplained_zero_share:.1%}"
        yield doubt(
            f"whether float16 flushed {zeros}{_including_variables(run)}",
            f"a replay, or fewer zeros with {run.settings_call}(initial_scale=2.0**24)",
        )
    if run.flushed_layers:
        yield doubt(
            "what the layers lose whose gradients are mostly zero in float16, but not in float32",
            FLOAT32_TRAINING,
        )


def _including_variables(run: RunMetrics) -> str:
    """Returns which variables of only zeros are among the zeros."""
    variables = run.unexplained_zero_variables
    if not variables:
        return ""
    if len(variables) == 1:
        return f", including all of {variables[0]}"
    return f", including all of {len(variables)} variables"


def _has_doubtful_zeros(run: RunMetrics) -> bool:
    if run.curve is not None and run.curve.is_measured:
        return lost_norm(run) > thresholds.MUCH_LOST
    if run.unexplained_zero_share > thresholds.MANY_ZEROS:
        return True
    return bool(run.unexplained_zero_variables)


def _updates(run: RunMetrics) -> Iterator[str]:
    """Yields what is not known of updates: that weights in 16 bits lose, or that are too large."""
    if run.update_ratio[1]:
        return
    variables = run.settings.variable_dtypes
    in_16_bits = [dtype for dtype in variables if dtype in DTYPES_16_BIT]
    if in_16_bits:
        remedy = "kmp.callbacks.defaults(), which measures updates"
        yield doubt(f"whether updates change weights in {' and '.join(in_16_bits)}", remedy)
    if not math.isfinite(run.losses[-1]):
        remedy = "kmp.callbacks.defaults(), which records losses and updates"
        yield doubt("whether training diverges", remedy)
