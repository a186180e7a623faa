"""What the records of a run leave unknown, and what shows it.

Without any, they exclude each cause of a finding. A NaN or Inf in a loss always has a finding, and
so has a loss that is not scaled.
"""

import math
from collections.abc import Iterator

from kmp.diagnosis import soundness, thresholds
from kmp.diagnosis.missing_replays import FLOAT32_TRAINING, missing_replays
from kmp.diagnosis.observations import Observations
from kmp.diagnosis.wording import counted, first_few
from kmp.records import Replay
from kmp.utils.float_formats import DTYPES_16_BIT, FLOAT16


def unknowns(run: Observations) -> Iterator[str]:
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


def _not_compared(run: Observations) -> Iterator[str]:
    """Yields what of outputs and gradients was not compared with float32."""
    comparisons, harmful = run.passes.comparisons, []
    for step, replay in comparisons:
        # By the limits of float16, which are stricter: between these and others nothing is known.
        is_large = (replay.output_error or 0.0) > thresholds.HARMFUL_OUTPUT_ERROR
        if is_large or soundness.is_harmful(replay, FLOAT16):
            harmful.append(step)
    if harmful:
        of_all = f"in {len(harmful)} of {counted(len(comparisons), 'comparison')}"
        errors = f"the errors of outputs or gradients at step {harmful[-1]}, {of_all},"
        yield doubt(f"what {errors} did to the training", FLOAT32_TRAINING)
    elif len(comparisons) < thresholds.FEW_COMPARISONS or not run.passes.are_late:
        compared = "no batch of its second half was"
        if len(comparisons) < thresholds.FEW_COMPARISONS:
            compared = "only 1 batch of the run was"
        if not comparisons:
            compared = "no batches of the run were"
        why, remedy = _why_not_compared(run)
        what = "how far outputs and gradients are from those in float32"
        yield doubt(f"{what}, because {compared} compared{why}", remedy)
    else:
        yield from _missing_in(run, [replay for _, replay in comparisons])


def _why_not_compared(run: Observations) -> tuple[str, str]:
    """Returns why batches were not compared, in parentheses, and what would compare them."""
    missing, replays = missing_replays(run), run.passes.all
    if run.records.last("replay_error") is not None or not replays:
        return f" ({missing.reason})" if missing.reason else "", missing.remedy
    reason = ""
    if not any(replay.is_finite for replay in replays):
        reason = " (the replayed ones were not finite)"
    elif not run.passes.comparisons:
        reason = " (the forward pass draws random numbers that differ by pass)"
    return reason, FLOAT32_TRAINING


def _missing_in(run: Observations, comparisons: list[Replay]) -> Iterator[str]:
    """Yields what some of the comparisons lack."""
    if any(replay.is_forward_only for replay in comparisons):
        unknown, remedy = "how far gradients are from those in float32", FLOAT32_TRAINING
        facts = run.settings.step_facts
        is_scaled_right = facts is not None and facts.scaling == "right"
        if run.settings.train_step == "keras" and not is_scaled_right:  # but a loop has trained
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


def _states_in_16_bits(run: Observations) -> Iterator[str]:
    checks = [replay.batch for replay in run.passes.all]
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


def _overflows(run: Observations) -> Iterator[str]:
    """Yields whether it is known how many steps overflow, and why."""
    skipped, has_loss_scale = run.skipped, run.records.has_loss_scale
    if run.skipped_steps is None:
        remedy = "kmp.callbacks.defaults(), which counts them"
        yield doubt("how many steps were skipped", remedy)
    # The scale may fall until it suits the gradients, which the last step must not belong to. One
    # that grows too fast has a finding.
    is_dynamic = has_loss_scale and not run.is_fixed
    is_at_start = skipped.count == skipped.start.overflows
    if is_dynamic and not skipped.in_a_row:
        is_at_start |= skipped.count <= thresholds.SKIPPED_AT_START
    if not is_at_start and skipped.count > thresholds.MANY_SKIPPED * skipped.steps:
        remedy = "a longer run"
        if has_loss_scale:
            remedy += ", because a dynamic scale settles after its first steps"
        yield doubt("why steps overflow", remedy)


def _samples(run: Observations) -> Iterator[str]:
    """Yields what the samples do not show of the start, the middle and the end of a run."""
    what, samples = "the gradients of the whole run", run.gradients.finite
    if len(samples) < thresholds.FEW_SAMPLES:
        steps = counted(run.skipped.steps, "step")
        taken = f"{counted(len(samples), 'finite sample')} in {steps}"
        yield doubt(f"{what}, because there are only {taken}", "a longer run")
    elif 2 * max(sample.step for sample in samples) < run.last_step:
        remedy = "a smaller every_n_steps in kmp.callbacks.defaults()"
        yield doubt(f"{what}, because its second half has no finite sample", remedy)


def _zeros(run: Observations) -> Iterator[str]:
    """Yields what is not known of zeros in the samples, and of what a replay shows as flushed."""
    gradients = run.gradients
    variables, share = gradients.unexplained_zero_variables, gradients.unexplained_zero_share
    are_doubtful = share > thresholds.MANY_FLUSHED or bool(variables)
    if gradients.curve is not None and gradients.curve.is_measured:
        are_doubtful = gradients.lost_norm > thresholds.NEGLIGIBLE
    if are_doubtful:
        including = ""
        if variables:
            count = f"{len(variables)} variables"
            including = f", including all of {variables[0] if len(variables) == 1 else count}"
        yield doubt(
            "whether float16 flushed the gradient elements that are exactly zero,"
            f" {share:.1%}{including}",
            f"a replay, or fewer zeros with {run.settings.settings_call}(initial_scale=2.0**24)",
        )
    if gradients.flushed_layers:
        yield doubt(
            "what the layers lose whose gradients are mostly zero in float16, but not in float32",
            FLOAT32_TRAINING,
        )


def _updates(run: Observations) -> Iterator[str]:
    """Yields what is not known of updates: that weights in 16 bits lose, or that are too large."""
    if not run.updates.are_unmeasured:
        return
    in_16_bits = [dtype for dtype in run.settings.variable_dtypes if dtype in DTYPES_16_BIT]
    if in_16_bits:
        remedy = "kmp.callbacks.defaults(), which measures updates"
        yield doubt(f"whether updates change weights in {' and '.join(in_16_bits)}", remedy)
    if not math.isfinite(run.updates.losses.last):
        remedy = "kmp.callbacks.defaults(), which records losses and updates"
        yield doubt("whether training diverges", remedy)
