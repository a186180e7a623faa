"""Causes in the data themselves."""

from dataclasses import dataclass

from kmp.diagnosis import edits, thresholds
from kmp.diagnosis.cause import (
    ERROR,
    WARNING,
    Cause,
    Edits,
    PrepareData,
    SetArguments,
    Stage,
)
from kmp.diagnosis.run_metrics import RunMetrics, name_of
from kmp.records import Replay
from kmp.records.replay import BATCH_X, BATCH_Y, InvalidTargets, NonfinitePart
from kmp.utils.float_formats import FLOAT16


@dataclass(frozen=True, kw_only=True)
class NonfiniteData(Cause):
    """NaN, Inf or too large values in the batch.

    Args:
        largest: The magnitude beyond which values are too large, if there are only such values;
            0 if there are NaN or Inf.
        array: The array, or a part of it, as Python source.
    """

    stage = Stage.BATCH

    largest: float
    array: str

    @classmethod
    def of(cls, run: RunMetrics) -> "NonfiniteData | None":
        """Returns the cause if the run has it."""
        replay = run.forward_replay
        part = replay.batch.nonfinite if replay else None
        if replay is None or part is None or not _is_of_the_data(run, replay, part):
            return None
        location = part.part + part.key
        array = location.partition("'s ")[2]
        largest = _largest_value(run) if part.is_too_large else 0.0
        is_borne = part.is_too_large and replay.is_finite_in_float32 and replay.float32_layers
        kind = TooLargeForFloat16 if is_borne else cls
        return kind(
            name="targets" if part.part == BATCH_Y else "data",
            severity=_severity(run),
            location=location,
            edits=_edits_of_data(run, replay, part, array),
            largest=largest,
            array=array,
        )


@dataclass(frozen=True, kw_only=True)
class TooLargeForFloat16(NonfiniteData):
    """Values beyond float16's maximum that layers in float32 bear, as a replay has shown."""

    formats = (FLOAT16,)
    cured_by_float32 = True


def _is_of_the_data(run: RunMetrics, replay: Replay, part: NonfinitePart) -> bool:
    """Whether what stands in the batch makes the loss or the gradients non-finite."""
    is_ignored = part.part != BATCH_X and not replay.is_forward_only
    if replay.is_finite_in_float32 and is_ignored:
        return False  # the loss ignores these targets
    if not part.is_too_large:
        return True
    if run.format is not FLOAT16 and replay.is_finite_in_float32:
        return False  # other formats have float32's range
    return _overflows_when_it_is_read(replay)


def _largest_value(run: RunMetrics) -> float:
    """Returns the magnitude beyond which inputs overflow: others take a few operations for it."""
    return FLOAT16.max if run.format is FLOAT16 else thresholds.OVERFLOWS_FLOAT32


def _overflows_when_it_is_read(replay: Replay) -> bool:
    """Whether too large values overflow at once.

    A layer that gets them in float32 may fail later, without such a cast. Fill values, say,
    overflow float32 too; unlike NaN weights, or a root.
    """
    operations = replay.operations
    if replay.is_finite_in_float32:
        return any(each.operation == "Cast" and not each.is_backward for each in operations)
    if replay.batch.nonfinite_variables or not operations:
        return False
    first = operations[0]
    return first.value == "inf" and first.largest_input > thresholds.OVERFLOWS_FLOAT32


def _edits_of_data(run: RunMetrics, replay: Replay, part: NonfinitePart, array: str) -> Edits:
    if part.is_too_large and replay.is_finite_in_float32:
        return edits.in_float32(run, replay.float32_layers) or (edits.normalized("x"),)
    condition = f"np.isfinite({array})"
    if part.part == BATCH_X:
        condition = f"np.abs({array}) <= {_largest_value(run):g}"
    return (_keep(array, condition, replay),)


@dataclass(frozen=True, kw_only=True)
class TargetsOutOfRange(Cause):
    """Targets of a binary cross-entropy that are not all from 0 to 1.

    Args:
        targets: What was found.
        array: The targets, as Python source.
    """

    stage = Stage.BATCH

    targets: InvalidTargets
    array: str


@dataclass(frozen=True, kw_only=True)
class TargetsNotClasses(Cause):
    """Targets that are not the index of a class.

    Args:
        targets: What was found.
        array: The targets, as Python source.
        layer: The path of the output layer; empty if it is not known.
        marker: The value that marks missing targets, if a single one seems to.
        has_ignoring_loss: Whether the edit is a loss that ignores that value.
    """

    stage = Stage.BATCH

    targets: InvalidTargets
    array: str
    layer: str
    marker: int | None
    has_ignoring_loss: bool


def invalid_targets(run: RunMetrics) -> TargetsOutOfRange | TargetsNotClasses | None:
    """Returns the cause if the run has targets that its loss does not take."""
    for replay in reversed(run.replays):
        invalid = replay.batch.invalid_targets
        if invalid is not None:
            return _targets(run, replay, invalid)
    return None


def _targets(
    run: RunMetrics, replay: Replay, invalid: InvalidTargets
) -> TargetsOutOfRange | TargetsNotClasses:
    array = f"y{invalid.key}"
    if invalid.is_binary:
        return TargetsOutOfRange(
            name="targets",
            severity=WARNING,
            location=array,
            edits=_into_range(invalid, array),
            targets=invalid,
            array=array,
        )
    outputs = run.settings.output_layers
    layer = outputs[invalid.output] if invalid.output < len(outputs) else ""
    marker = _marker(invalid)
    has_ignoring_loss = marker is not None and invalid.per_example > 1 and not invalid.key
    change: Edits
    if has_ignoring_loss:
        loss = {"loss": f"{loss_that_ignores(invalid)})"}
        change = (SetArguments("model.compile", loss),)
    elif marker is not None or int(invalid.smallest) < 0:
        change = (_keep(array, _is_class(invalid, array), replay),)
    else:
        change = _more_classes(run, layer, int(invalid.largest) + 1)
    return TargetsNotClasses(
        name="targets",
        severity=_severity(run),
        location=layer or array,
        edits=change,
        targets=invalid,
        array=array,
        layer=layer,
        marker=marker,
        has_ignoring_loss=has_ignoring_loss,
    )


def _into_range(invalid: InvalidTargets, array: str) -> Edits:
    low, high = f"{invalid.smallest:g}", f"{invalid.largest:g}"
    if low == high:
        return ()
    return (PrepareData(f"{array} = ({array} - {low}) / ({high} - {low})"),)


def _marker(invalid: InvalidTargets) -> int | None:
    """Returns a single invalid value that is negative, or larger than the number of classes."""
    value = invalid.only_invalid
    if value is None or 0 <= value <= invalid.classes:
        return None
    return value


def loss_that_ignores(invalid: InvalidTargets) -> str:
    """Returns the source of a loss that ignores the only invalid value.

    Without the last bracket.
    """
    from_logits = "from_logits=True, " if invalid.from_logits else ""
    function = "keras.losses.SparseCategoricalCrossentropy"
    return f"{function}({from_logits}ignore_class={invalid.only_invalid}"


def _is_class(invalid: InvalidTargets, array: str) -> str:
    if int(invalid.largest) >= invalid.classes:
        return f"({array} >= 0) & ({array} < {invalid.classes})"
    return f"{array} >= 0"


def _more_classes(run: RunMetrics, layer: str, classes: int) -> Edits:
    """Returns the change of the output layer to a number of classes, if its class is known."""
    class_name = run.layers.get(layer, "")
    argument = "filters" if class_name.startswith("Conv") else ""
    if class_name == "Dense":
        argument = "units"
    if not argument:
        return ()
    call = f"keras.layers.{class_name}"
    return (SetArguments(call, {argument: str(classes)}, name_of(layer)),)


def _keep(array: str, condition: str, replay: Replay) -> PrepareData:
    """Returns the statements that keep the examples with a condition."""
    has_weights = replay.batch.has_sample_weight or array == "sample_weight"
    arrays = "x, y, sample_weight" if has_weights else "x, y"
    return PrepareData(
        f"keep = ({condition}).reshape(len({array}), -1).all(axis=1)\n"
        f"{arrays} = keras.tree.map_structure(lambda a: a[keep], ({arrays}))"
    )


def _severity(run: RunMetrics) -> str:
    """Returns a warning if such batches are rare: their steps are skipped, and others train."""
    count, is_stuck = run.nonfinite_losses, run.ends_nonfinite
    if not count:
        count, is_stuck = run.overflows, run.is_stuck
    return WARNING if run.is_rare(count) and not is_stuck else ERROR
