"""Rules about what is wrong with the data themselves."""

from collections.abc import Sequence

from kmp.advice import thresholds
from kmp.advice.finding import ERROR, WARNING, Edit, Finding, PrepareData, SetArguments
from kmp.advice.run_metrics import RunMetrics, name_of
from kmp.advice.wording import failed_steps, in_float32
from kmp.records import BATCH_X, BATCH_Y, Replay

_NORMALIZE = PrepareData("x = (x - x.mean(axis=0)) / (x.std(axis=0) + 1e-6)")


def data(metrics: RunMetrics) -> Finding | None:
    """Reports NaN, Inf or too large values in the batch."""
    replay = metrics.forward_replay
    if replay is None or replay.nonfinite_part is None:
        return None
    is_too_large, part = replay.is_part_finite, replay.nonfinite_part
    if is_too_large:
        if (
            replay.is_finite_in_float32
        ):  # a layer that gets them in float32 may fail later, without such a cast
            is_cause = any(
                found.operation == "Cast" and not found.is_backward for found in replay.nonfinite
            )
        else:  # fill values, say, that overflow float32 too; not NaN weights, nor a root
            is_cause = not replay.nonfinite_variables and any(
                found.value == "inf" and found.largest_input > thresholds.OVERFLOWS_FLOAT32
                for found in replay.nonfinite[:1]
            )
        if not is_cause or not metrics.is_float16:
            return None
    if replay.is_finite_in_float32 and part != BATCH_X and not replay.is_forward_only:
        return None  # the loss ignores these targets
    part += replay.nonfinite_key
    name = part.partition("'s ")[2]
    kind = "values beyond float16's maximum of 65504" if is_too_large else "NaN or Inf"
    condition = f"np.abs({name}) <= 65504" if part.startswith(BATCH_X) else f"np.isfinite({name})"
    edits: Sequence[Edit] = [_keep(name, condition, replay.has_sample_weight)]
    if is_too_large and replay.is_finite_in_float32:
        edits = in_float32(metrics, replay.float32_layers or ()) or [_NORMALIZE]
    return Finding(
        "targets" if part.startswith(BATCH_Y) else "data",
        _severity(metrics),
        f"{part[0].upper()}{part[1:]} contains {kind}.",
        f"{failed_steps(metrics)}; in the last such step {part} had {kind}",
        edits,
        (
            f"or normalize {name}, with its mean and standard deviation, in training and later"
            if is_too_large
            else ""
        ),
        part,
    )


def targets(metrics: RunMetrics) -> Finding | None:
    """Reports targets that are not the index of a class, or beyond the range of a binary cross-entropy."""
    replay = next((replay for replay in reversed(metrics.replays) if replay.invalid_targets), None)
    if replay is None or replay.invalid_targets is None:
        return None
    invalid = replay.invalid_targets
    low, high, y = f"{invalid.smallest:g}", f"{invalid.largest:g}", f"y{invalid.key}"
    if invalid.is_binary:
        return Finding(
            "targets",
            WARNING,
            f"The targets {y} are from {low} to {high}, but binary cross-entropy takes numbers from"
            " 0 to 1.",
            f"in a batch of the training {y} was from {low} to {high}",
            [PrepareData(f"{y} = ({y} - {low}) / ({high} - {low})")] if low != high else (),
            "in training, in validation and later",
            y,
        )
    outputs = metrics.settings.get("output_layers", [])
    layer = outputs[invalid.output] if invalid.output < len(outputs) else ""
    edits, note = _change_of_targets(replay, y, metrics.layers.get(layer, ""), name_of(layer))
    return Finding(
        "targets",
        _severity(metrics),
        f"The targets {y} have classes from {low} to {high}, but the model has the classes 0 to"
        f" {invalid.classes - 1}.",
        f"{failed_steps(metrics)}; in the last such step the targets were from {low} to {high} and"
        f" the output {name_of(layer) + ' ' if layer else ''}had {invalid.classes} classes",
        edits,
        note,
        layer or y,
    )


def _change_of_targets(
    replay: Replay, y: str, class_name: str, layer: str
) -> tuple[Sequence[Edit], str]:
    """Returns the edits and the note against targets that are not the index of a class."""
    invalid = replay.invalid_targets
    assert invalid is not None
    low, high, classes, marker = (
        int(invalid.smallest),
        int(invalid.largest),
        invalid.classes,
        invalid.only_invalid,
    )
    loss = f"keras.losses.SparseCategoricalCrossentropy({'from_logits=True, ' * invalid.from_logits}ignore_class="
    # A single invalid value that is negative, or larger than the number of classes, marks targets
    # that are missing.
    is_marker = marker is not None and not 0 <= marker <= classes
    if is_marker and invalid.per_example > 1 and not invalid.key:
        edit = SetArguments("model.compile", {"loss": f"{loss}{marker})"})
        return [edit], f"if {marker} means that a target is missing"
    if is_marker or low < 0:
        condition = f"({y} >= 0) & ({y} < {classes})" if high >= classes else f"{y} >= 0"
        note = (
            f"or loss={loss}{marker}), if {marker} means that a target is missing"
            if is_marker
            else ""
        )
        return [_keep(y, condition, replay.has_sample_weight)], note
    note = (
        f"or {y} = {y} - 1, also in validation, because Keras counts classes from 0"
        if low == 1
        else ""
    )
    argument = (
        "units" if class_name == "Dense" else "filters" if class_name.startswith("Conv") else ""
    )
    return (
        [SetArguments(f"keras.layers.{class_name}", {argument: str(high + 1)}, layer)]
        if argument
        else []
    ), note


def _keep(name: str, condition: str, has_sample_weight: bool) -> PrepareData:
    """Returns the statements that keep the examples with a condition."""
    arrays = "x, y, sample_weight" if has_sample_weight or name == "sample_weight" else "x, y"
    return PrepareData(
        f"keep = ({condition}).reshape(len({name}), -1).all(axis=1)\n"
        f"{arrays} = keras.tree.map_structure(lambda a: a[keep], ({arrays}))"
    )


def _severity(metrics: RunMetrics) -> str:
    """Returns a warning if such batches are rare: their steps are skipped, and the others train."""
    count, is_stuck = metrics.nonfinite_losses, metrics.ends_nonfinite
    if not count:
        count, is_stuck = metrics.overflows, metrics.is_stuck
    return WARNING if count <= thresholds.FEW_SKIPPED * metrics.steps and not is_stuck else ERROR
