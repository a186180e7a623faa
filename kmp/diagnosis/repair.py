"""Decides from the records of a run which layers to set to float32: `cure_of`."""

from dataclasses import dataclass

from kmp.diagnosis import ladder, soundness, thresholds
from kmp.diagnosis.cause import ERROR, Cause
from kmp.diagnosis.observations import Observations
from kmp.records import Replay


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


def cure_of(run: Observations) -> Cure | None:
    """Returns the layers to set to float32, as the records of a run prove; `None` without a proof.

    The last replay since the last repair has found the layers, it is evidence by itself or agrees
    with the ones before, and the 16 bits are the cause: not the data, the targets, the settings or
    the updates. Whoever applies the cure replays the batch with it before.
    """
    replay = run.passes.all[-1] if run.passes.all else None
    if replay is None or not replay.float32_layers:
        return None
    if not (soundness.is_evidence(replay, run.format) or _is_repeated(run)):
        return None
    if run.updates.may_diverge(replay.float32_loss):
        return None
    # A forward pass that is not finite is cured whatever the step does with the loss scale.
    asked = [ladder.NONFINITE, ladder.ROUNDED if replay.is_finite else ladder.OVERFLOWS]
    if replay.is_finite_forward:
        asked = [ladder.SCALING, *asked]
    cause = ladder.gravest(run, *asked)
    if cause is None or not cause.is_cured_by_float32:
        return None
    return Cure(tuple(replay.float32_layers), cause, replay)


def incurable_cause_of(run: Observations) -> Cause | None:
    """Returns a cause of harm that the records prove, and that no layer in float32 cures.

    The graph of the training step shows it, or its last comparison is evidence by itself.
    """
    scaling = ladder.gravest(run, ladder.SCALING)
    if scaling is not None and scaling.severity == ERROR:
        return scaling if scaling.is_measured else None
    cause = ladder.gravest(run, ladder.NONFINITE, ladder.ROUNDED)
    if cause is None or cause.is_cured_by_float32 or cause.severity != ERROR:
        return None
    replay = run.passes.last_comparison
    if replay is None or run.updates.may_diverge(replay.float32_loss):
        return None
    is_proven = soundness.is_evidence(replay, run.format)
    return cause if is_proven and soundness.is_harmful(replay, run.format) else None


def _is_repeated(run: Observations) -> bool:
    """Whether the last comparisons were all harmful, and one layer is in each of their cures."""
    count = thresholds.AGREEING_COMPARISONS
    latest = [replay for _, replay in run.passes.comparisons[-count:]]
    if len(latest) < count:
        return False
    if not all(soundness.is_harmful(replay, run.format) for replay in latest):
        return False
    return bool(set.intersection(*(set(replay.float32_layers) for replay in latest)))
