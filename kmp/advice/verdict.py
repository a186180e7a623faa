"""The verdict of a diagnosis: what the records of a run exclude, and what they leave unknown."""

import math
from collections.abc import Iterator, Sequence

from kmp.advice import thresholds
from kmp.advice.finding import INFO, Finding
from kmp.advice.run_metrics import RunMetrics
from kmp.advice.wording import skipped
from kmp.records import HARMFUL_OUTPUT_ERROR
from kmp.utils import DTYPES_16_BIT, FLOAT16, as_power

_NOT_KNOWN = "It is not known whether float16 hurts this run."
_FLOAT32_TRAINING = "a training in float32 to compare with"


def verdict(metrics: RunMetrics, findings: Sequence[Finding]) -> str:
    """Returns the effect of float16 on a run, in a few sentences: the first finding if that is a problem."""
    if not metrics.last_step:
        return "The run is empty: nothing was recorded."
    if findings and findings[0].severity != INFO:
        return findings[0].title
    counted = skipped(metrics)
    if not metrics.is_float16:
        return (
            f"{counted.capitalize()}. The run computed in {metrics.dtypes}, where gradients need no"
            " loss scale."
        )
    if metrics.curve is None or not metrics.finite_samples:
        reason = "no sampled step was finite" if metrics.samples else "none were sampled"
        doubt = _doubt(
            f"gradients, because {reason}",
            "a run with kmp.callbacks.defaults() whose steps are finite",
        )
        return f"{_NOT_KNOWN} {doubt} Measured: {counted}."

    unknown, norm = list(_unknown(metrics)), ""
    if (
        not unknown
        and metrics.curve.is_measured
        and metrics.underflow_share > thresholds.FEW_TOO_SMALL
    ):
        norm = f" (at most {_lost_norm(metrics):.1g} of the norm)"
    count = len(metrics.finite_samples)
    numbers = (
        f"{_compared(metrics)}{counted}, and at the loss scale in use, {as_power(metrics.scale)},"
        f" {metrics.subnormal_share:.1%} of the nonzero gradient elements are subnormal in float16"
        f" and {metrics.underflow_share:.1%} are too small for float16{norm}, in {count}"
        f" sample{'s' * (count != 1)}."
    )
    # No headline reassures beside something that was not measured.
    if unknown:
        return " ".join([_NOT_KNOWN, *unknown, f"Measured: {numbers}"])
    return f"float16 does not hurt this run: {numbers}"


def _compared(metrics: RunMetrics) -> str:
    """Returns how far outputs and gradients are from those in float32."""
    replays = [replay for _, replay in metrics.comparisons]
    if not replays:
        return ""
    outputs = max(replay.output_error or 0.0 for replay in replays)
    largest, gradients = metrics.largest_gradient_error, ""
    if largest is not None:
        has_converged = any(
            error.has_converged for replay in replays for error in replay.gradient_errors
        )
        gradients = (
            ", and the gradients of a layer by at most"
            f" {largest:.1%}{' until they nearly vanish' * has_converged}"
        )
    count = len(replays)
    return (
        f"in {count} batch{'es' * (count != 1)} the outputs differ from float32 by at most"
        f" {outputs:.2%}{gradients}; "
    )


def _unknown(metrics: RunMetrics) -> Iterator[str]:
    """Yields what the records leave unknown, and what shows it. Without any, they exclude each cause of a finding.

    A NaN or Inf in a loss always has a finding, and so has a loss that is not scaled.
    """
    yield from _not_compared(metrics)

    # How many steps overflow, and why: a scale that is too large, or a layer.
    if metrics.complete_run.last("overflow_count") is None:
        yield _doubt("how many steps were skipped", "kmp.callbacks.defaults(), which counts them")
    are_later = metrics.overflows != metrics.startup_overflows[0]
    if are_later and metrics.overflows > thresholds.MANY_SKIPPED * metrics.steps:
        yield _doubt(
            "why steps overflow",
            "a longer run, because a dynamic scale settles after its first steps",
        )

    # Underflow: in the samples, in what they show as zero, and in what a replay shows as flushed.
    samples, few = metrics.finite_samples, thresholds.FEW_SAMPLES
    if len(samples) < few or 2 * max(sample.step for sample in samples) < metrics.last_step:
        yield _doubt(
            f"the gradients of the whole run, from fewer than {few} samples or none of its second"
            " half",
            "a smaller every_n_steps in kmp.callbacks.defaults()",
        )
    has_reference = metrics.curve is not None and metrics.curve.is_measured
    are_many_zeros = metrics.zero_share > thresholds.MANY_ZEROS or bool(metrics.all_zero_variables)
    if _lost_norm(metrics) > thresholds.MUCH_LOST if has_reference else are_many_zeros:
        variables = metrics.unexplained_zero_variables
        named = variables[0] if len(variables) == 1 else f"{len(variables)} variables"
        yield _doubt(
            "whether float16 flushed the gradient elements that are exactly zero,"
            f" {metrics.zero_share:.1%}{f', including all of {named}' if variables else ''}",
            f"a replay, or fewer zeros with {metrics.settings_call}(initial_scale=2.0**24)",
        )
    if metrics.flushed_layers:
        yield _doubt(
            "what the layers lose whose gradients are mostly zero in float16, but not in float32",
            _FLOAT32_TRAINING,
        )

    # Updates: those that weights in 16 bits lose, and those that are too large.
    is_16_bit = not set(DTYPES_16_BIT).isdisjoint(metrics.settings.get("variable_dtypes", []))
    if is_16_bit and not metrics.update_ratio[1]:
        yield _doubt(
            "whether updates change weights in float16",
            "kmp.callbacks.defaults(), which measures updates",
        )
    if not math.isfinite(metrics.losses[-1]) and not metrics.update_ratio[1]:
        yield _doubt(
            "whether training diverges",
            "kmp.callbacks.defaults(), which records losses and updates",
        )


def _not_compared(metrics: RunMetrics) -> Iterator[str]:
    """Yields what of outputs and gradients was not compared with float32, and what would compare it."""
    comparisons = metrics.comparisons
    harmful = [
        step
        for step, each in comparisons
        if each.is_harmful or (each.output_error or 0.0) > HARMFUL_OUTPUT_ERROR
    ]
    if harmful:
        yield _doubt(
            f"what the errors of outputs or gradients at step {harmful[-1]} did to the training",
            _FLOAT32_TRAINING,
        )
    elif len(comparisons) < thresholds.FEW_COMPARISONS or not metrics.is_compared_late:
        compared, (why, remedy) = "no batches of the run were", _why_not(metrics)
        if comparisons:
            is_only = len(comparisons) < thresholds.FEW_COMPARISONS
            compared = (
                "only 1 batch of the run was" if is_only else "no batch of its second half was"
            )
        yield _doubt(
            f"how far outputs and gradients are from those in float32, because {compared}"
            f" compared{why}",
            remedy,
        )
    elif any(replay.is_forward_only for _, replay in comparisons):
        yield _doubt(
            "how far gradients are from those in float32, because only the forward pass could be"
            " replayed",
            _FLOAT32_TRAINING,
        )
    elif any(replay.state_errors is None for _, replay in comparisons):
        yield _doubt(
            "what the updates of states lose that are not trainable, such as moving averages,"
            " because the replayed batch could not be halved or the replay took too long",
            _FLOAT32_TRAINING,
        )
    states = max((replay.float16_states for replay in metrics.replays), default=0)
    if states:
        yield _doubt(
            f"what {states} variable{'s' * (states != 1)} in float16 lose{'s' * (states == 1)} that"
            " the training step assigns beside the weights, such as a moving average",
            "the same run with float32 in place of float16 there",
        )


def _why_not(metrics: RunMetrics) -> tuple[str, str]:
    """Returns why batches were not compared, in parentheses, empty if it is not known; and what would compare them."""
    error, replicas = metrics.run.last("replay_error"), metrics.settings.get("replicas", 1)
    if error:
        return f" (none could be replayed: {error})", _FLOAT32_TRAINING
    if replicas > 1:
        return f" ({replicas} replicas)", "a run on one replica"
    if not metrics.replays:
        return (
            "",
            (
                "reference='auto' in kmp.callbacks.defaults(), and in a custom training loop"
                f" kmp.guard(optimizer, model) around the forward pass; or {_FLOAT32_TRAINING}"
            ),
        )
    why = ""
    if not any(replay.is_finite for replay in metrics.replays):
        why = " (the replayed ones were not finite)"
    elif not metrics.comparisons:
        why = " (the forward pass draws random numbers that differ by pass)"
    return why, _FLOAT32_TRAINING


def _doubt(unknown: str, remedy: str) -> str:
    return f"Not measured: {unknown}; to find out: {remedy}."


def _lost_norm(metrics: RunMetrics) -> float:
    """Returns an upper bound of the norm of the elements that are too small, relative to that of all gradients."""
    sample = metrics.finite_samples[-1]
    lost = math.sqrt(metrics.underflow_share * sample.histogram.total) * 2.0**FLOAT16.flush_exponent
    return lost / metrics.scale / sample.largest if sample.largest else math.inf
