"""Decides from the records of a run which layers to set to float32: `cure_of`."""

from dataclasses import dataclass

from kmp.diagnosis import causes, soundness, thresholds
from kmp.diagnosis.cause import ERROR, Cause, Stage
from kmp.diagnosis.run_metrics import RunMetrics
from kmp.records import Replay, Run


@dataclass(frozen=True)
class Cure:
    """Layers that have to compute in float32.

    Args:
        layers: Their paths.
        cause: What 16 bits do in them.
        replay: The replay of the batch that is sound with these layers in float32.
    """

    layers: tuple[str, ...]
    cause: Cause
    replay: Replay


def cure_of(run: Run) -> Cure | None:
    """Returns the layers to set to float32, as the records of a run prove; `None` without a proof.

    The last replay since the last repair has found the layers, it is evidence by itself or agrees
    with the ones before, and the 16 bits are the cause: not the data, the targets, the settings or
    the updates. Whoever applies the cure replays the batch with it before.
    """
    metrics = RunMetrics(run)
    replay = metrics.replays[-1] if metrics.replays else None
    if replay is None or not replay.float32_layers:
        return None
    if not (soundness.is_evidence(replay, metrics.format) or _is_repeated(metrics)):
        return None
    if may_diverge(metrics, replay):
        return None
    cause = _cause_in_16_bits(metrics)
    if cause is None:
        return None
    return Cure(tuple(replay.float32_layers), cause, replay)


def incurable_cause_of(run: Run) -> Cause | None:
    """Returns a cause of harm that the records prove, and that no layer in float32 cures.

    The graph of the training step shows it, or its last comparison is evidence by itself.
    """
    metrics = RunMetrics(run)
    cause = min(causes.found_causes(metrics), key=_stage, default=None)
    if cause is None or cause.cured_by_float32 or cause.severity != ERROR:
        return None
    if cause.stage is Stage.LOSS_SCALING:
        return cause if cause.is_measured else None
    replay = metrics.last_comparison
    if replay is None or may_diverge(metrics, replay):
        return None
    is_proven = soundness.is_evidence(replay, metrics.format)
    return cause if is_proven and soundness.is_harmful(replay, metrics.format) else None


def _is_repeated(run: RunMetrics) -> bool:
    """Whether the last comparisons were all harmful, and one layer is in each of their cures."""
    latest = [replay for _, replay in run.comparisons[-thresholds.AGREEING_COMPARISONS :]]
    if len(latest) < thresholds.AGREEING_COMPARISONS:
        return False
    if not all(soundness.is_harmful(replay, run.format) for replay in latest):
        return False
    return bool(set.intersection(*(set(replay.float32_layers) for replay in latest)))


def may_diverge(run: RunMetrics, replay: Replay) -> bool:
    """Whether the updates are so large, or the loss so high in float32 too, as in a divergence."""
    first, highest, _ = run.losses
    loss = min(highest, abs(replay.float32_loss or 0.0))
    has_risen = loss > thresholds.EXPLODING_LOSS * max(abs(first), thresholds.SMALL_LOSS)
    if has_risen or run.update_ratio[1] > thresholds.DIVERGING_UPDATE:
        return True
    return run.estimated_update > thresholds.DIVERGING_ESTIMATE


def _cause_in_16_bits(run: RunMetrics) -> Cause | None:
    """Returns the cause that float32 layers cure; `None` if another one explains the records."""
    first = min(causes.found_causes(run), key=_stage, default=None)
    return first if first and first.cured_by_float32 else None


def _stage(cause: Cause) -> tuple[Stage, bool]:
    """Returns what orders causes by their stage, and in one stage those without a cure first."""
    return cause.stage, cause.cured_by_float32
