"""Causes in what float16 flushes to zero."""

import math
from collections import Counter
from dataclasses import dataclass

from kmp.diagnosis import edits, thresholds
from kmp.diagnosis.branches import Gap, kept_variables
from kmp.diagnosis.cause import (
    ERROR,
    INFO,
    LOSS_SCALES,
    WARNING,
    Cause,
    Edits,
    SetArguments,
    Stage,
)
from kmp.diagnosis.loss_scale_sweep import usable_scale
from kmp.diagnosis.run_metrics import RunMetrics
from kmp.records.gradient_sample import layer_of
from kmp.scaling import DynamicScale
from kmp.utils.float_formats import FLOAT32


@dataclass(frozen=True, kw_only=True)
class FlushedBranch(Cause):
    """A part of the model whose gradients are flushed, while those of the rest are not.

    Args:
        loss_scale: The loss scale of the replay that shows it.
        layers: The paths of the layers.
        flushed: The number of variables in them.
        alive: The number of variables that lose little.
        has_headroom: Whether a larger loss scale would not overflow.
        gap: How far their gradients are from those of the others in float32; `None` if that was
            not recorded.
    """

    formats = LOSS_SCALES
    stage = Stage.MAGNITUDES

    loss_scale: float
    layers: list[str]
    flushed: int
    alive: int
    has_headroom: bool
    gap: Gap | None

    @classmethod
    def of(cls, run: RunMetrics) -> "FlushedBranch | None":
        """Returns the cause if the run has it."""
        replay, layers = run.clean_replay, run.flushed_branch
        if replay is None or not layers or run.needs_float32_layers:
            return None
        flushed = [name for name in run.flushed if run.layer_of(name) in layers]
        if _converged_variables(run).issuperset(flushed):
            return None
        alive = kept_variables(run.flushed)
        has_headroom = run.headroom >= thresholds.SPARE_BITS
        return cls(
            name="branch_underflow",
            location=layers[0],
            edits=_larger_scale(run) if has_headroom else (),
            loss_scale=replay.loss_scale,
            layers=layers,
            flushed=len(flushed),
            alive=len(alive),
            has_headroom=has_headroom,
            gap=run.gap_of(layers, replay),
        )


def _converged_variables(run: RunMetrics) -> set[str]:
    """Returns the variables whose gradients are nothing beside those of earlier replays."""
    largest: dict[str, float] = {}
    newest: dict[str, float] = {}
    for sample in run.run.references:
        newest = dict(zip(sample.names, sample.norm.tolist(), strict=True))
        for name, norm in newest.items():
            largest[name] = max(largest.get(name, 0.0), norm)
    limit = thresholds.CONVERGED
    return {name for name, norm in newest.items() if norm < limit * largest[name]}


@dataclass(frozen=True, kw_only=True)
class ScaleTooSmall(Cause):
    """A loss scale at which gradients underflow, although a larger one would not overflow.

    Args:
        are_many_subnormal: Whether many sampled elements are subnormal.
        flushed_share: The mean share of a gradient that is zero in float16 but not in float32.
        are_many_flushed: Whether that is much.
    """

    formats = LOSS_SCALES
    stage = Stage.MAGNITUDES

    are_many_subnormal: bool
    flushed_share: float
    are_many_flushed: bool

    @classmethod
    def of(cls, run: RunMetrics) -> "ScaleTooSmall | None":
        """Returns the cause if the run has it."""
        if not _can_underflow(run) or run.headroom < thresholds.SPARE_BITS:
            return None
        if run.gradient_overflows > thresholds.FEW_SKIPPED * run.steps:
            return None
        are_many_subnormal = run.subnormal_share > thresholds.MANY_SUBNORMAL
        variables = max(1, len(run.finite_samples[-1].names))
        flushed_share = sum(run.flushed.values()) / variables
        are_many_flushed = flushed_share > thresholds.MANY_FLUSHED
        if not (are_many_subnormal or are_many_flushed):
            return None
        agrees = run.agrees_late and _are_compared(run, list(run.underflows))
        return cls(
            name="scale_too_small",
            severity=INFO if agrees and not are_many_flushed else ERROR,
            location="loss_scale" if run.is_fixed else "initial_scale",
            edits=_larger_scale(run),
            are_many_subnormal=are_many_subnormal,
            flushed_share=flushed_share,
            are_many_flushed=are_many_flushed,
        )


@dataclass(frozen=True, kw_only=True)
class WideRange(Cause):
    """A variable whose large gradients keep the loss scale too low for those of the others.

    Args:
        largest: The path of the variable with the largest gradients.
        smallest: The path of the variable that underflows most.
    """

    formats = LOSS_SCALES

    largest: str
    smallest: str

    @classmethod
    def of(cls, run: RunMetrics) -> "WideRange | None":
        """Returns the cause if the run has it."""
        if not _can_underflow(run) or run.headroom >= thresholds.SPARE_BITS:
            return None
        if run.subnormal_share <= thresholds.MOSTLY_SUBNORMAL:
            return None
        newest = run.finite_samples[-1]
        largest = newest.names[int(newest.amax.argmax())]
        smallest = newest.names[int(newest.small_shares.argmax())]
        # Gradients that nearly vanish are not compared.
        if run.agrees_late and layer_of(smallest) in _compared_layers(run):
            return None
        return cls(
            name="range",
            severity=WARNING,
            location=largest,
            largest=largest,
            smallest=smallest,
        )


def _can_underflow(run: RunMetrics) -> bool:
    return bool(run.finite_samples) and not run.needs_float32_layers


def _are_compared(run: RunMetrics, variables: list[str]) -> bool:
    """Whether comparisons show what variables lose: gradients that nearly vanish are left out."""
    compared = _compared_layers(run)
    return all(layer_of(name) in compared for name in variables)


def _compared_layers(run: RunMetrics) -> set[str]:
    return {each.layer for _, replay in run.comparisons for each in replay.gradient_errors}


def _larger_scale(run: RunMetrics) -> Edits:
    """Returns the largest scale that the samples or a replay allow, or a dynamic one."""
    curve, highest = run.curve, usable_scale(run.run)
    best = round(math.log2(DynamicScale.initial_scale))
    if curve and curve.recommended:
        best = curve.recommended[1]
    elif 0.0 < highest < math.inf:  # all samples are zero, so only a replay shows the gradients
        best = math.floor(math.log2(highest))
    elif run.is_fixed:
        return (SetArguments(run.settings_call, {"loss_scale": "'dynamic'"}),)
    if 2.0**best <= run.scale:
        return ()  # it is in use already
    return (edits.larger_scale(run, best),)


@dataclass(frozen=True, kw_only=True)
class DeadVariables(Cause):
    """Variables whose gradient is zero in float32 too.

    Args:
        variables: Their paths.
        samples: The number of samples in which their gradients are zero.
        examples: The number of examples of the replay in float32; 0 without one.
    """

    variables: list[str]
    samples: int
    examples: int

    @classmethod
    def of(cls, run: RunMetrics) -> "DeadVariables | None":
        """Returns the cause if the run has it."""
        zero, examples = run.all_zero_variables, 0
        if run.format is not FLOAT32:  # of float32, the samples show it
            replay = run.clean_replay
            if replay is None:
                return None
            zero = [name for name in replay.gradients.zero if name in zero]
            examples = replay.examples
        if not zero:
            return None
        # In 16 bits, the question is what these do; and they do nothing here.
        is_about_run = run.format is FLOAT32
        are_most = 2 * len(zero) > len(run.finite_samples[-1].names)
        return cls(
            name="dead",
            severity=WARNING if is_about_run and are_most else INFO,
            location=zero[0],
            variables=zero,
            samples=len(run.usable_samples),
            examples=examples,
        )


@dataclass(frozen=True, kw_only=True)
class UnusedVariables(Cause):
    """Variables without a gradient.

    Args:
        variables: Their paths.
    """

    variables: list[str]

    @classmethod
    def of(cls, run: RunMetrics) -> "UnusedVariables | None":
        """Returns the cause if the run has it."""
        if not run.finite_samples:
            return None
        used: Counter[str] = Counter()
        for sample in run.finite_samples:
            used.update(sample.named(sample.totals > 0))
        names = [name for name in run.finite_samples[-1].names if name not in used]
        if not names:
            return None
        return cls(name="unused", severity=INFO, location=names[0], variables=names)


@dataclass(frozen=True, kw_only=True)
class UntrainedVariables(Cause):
    """Trainable variables that no optimizer of the model gets.

    Args:
        variables: Their paths.
    """

    variables: list[str]

    @classmethod
    def of(cls, run: RunMetrics) -> "UntrainedVariables | None":
        """Returns the cause if the run has it."""
        names = run.settings.untrained_variables
        if not names:
            return None
        return cls(name="untrained", severity=INFO, location=names[0], variables=names)
