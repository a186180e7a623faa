"""Rules about what is wrong with the data themselves."""

from kmp.advice.edits import Edit, PrepareData, SetArguments
from kmp.advice.finding import ERROR, WARNING, Finding
from kmp.advice.run_metrics import RunMetrics
from kmp.advice.wording import in_float32, name_of, nonfinite_losses
from kmp.records import BATCH_X, BATCH_Y, Replay

_OVERFLOWS_FLOAT32 = 1e9  # in a few operations, such as a square and a product
_RARE = 0.01  # of all steps: these are skipped, and the others train

_NORMALIZE = PrepareData("x = (x - x.mean(axis=0)) / (x.std(axis=0) + 1e-6)")


def data(metrics: RunMetrics) -> Finding | None:
    """Reports NaN, Inf or too large values in the batch."""
    replay = metrics.forward_replay
    if not metrics.nonfinite_losses or replay is None or replay.nonfinite_part is None:
        return None
    is_too_large, part = replay.is_part_finite, replay.nonfinite_part
    if is_too_large and not (metrics.is_float16 and _is_overflow_of_inputs(replay)):
        return None
    if replay.is_finite_in_float32 and part != BATCH_X and not replay.is_forward_only:
        return None  # the loss ignores these targets
    part += replay.nonfinite_key
    name = part.partition("'s ")[2]
    condition = f"np.abs({name}) <= 65504" if part.startswith(BATCH_X) else f"np.isfinite({name})"
    edits: tuple[Edit, ...] = (_keep(name, condition, replay.has_sample_weight),)
    if is_too_large and replay.is_finite_in_float32:
        edits = in_float32(metrics, replay.float32_layers) if replay.float32_layers else (_NORMALIZE,)
    kind = "values beyond float16's maximum of 65504" if is_too_large else "NaN or Inf"
    return Finding(
        "targets" if part.startswith(BATCH_Y) else "data",
        _severity(metrics),
        f"{part[0].upper()}{part[1:]} contains {kind}.",
        f"{nonfinite_losses(metrics)}; in the last such step {part} had {kind}",
        edits,
        f"or normalize {name}, with its mean and standard deviation, in training and later" if is_too_large else "",
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
            f"The targets {y} are from {low} to {high}, but binary cross-entropy takes numbers from 0 to 1.",
            f"in a batch of the training {y} was from {low} to {high}",
            (PrepareData(f"{y} = ({y} - {low}) / ({high} - {low})"),),
            "in training, in validation and later",
            y,
        )
    outputs = metrics.setting("output_layers", [])
    layer = outputs[invalid.output] if invalid.output < len(outputs) else ""
    edits, note = _change_of_targets(replay, y, metrics.class_of(layer), name_of(layer))
    return Finding(
        "targets",
        _severity(metrics),
        f"The targets {y} have classes from {low} to {high}, but the model has the classes 0 to {invalid.classes - 1}.",
        f"{nonfinite_losses(metrics)}; in the last such step the targets were from {low} to {high} and the output "
        f"{name_of(layer) + ' ' if layer else ''}had {invalid.classes} classes",
        edits,
        note,
        layer or y,
    )


def _change_of_targets(replay: Replay, y: str, class_name: str, layer: str) -> tuple[tuple[Edit, ...], str]:
    """Returns the edits and the note against targets that are not the index of a class.

    One invalid value that is negative, or larger than the number of classes, marks targets that are missing.
    """
    invalid = replay.invalid_targets
    assert invalid is not None
    low, high, classes = int(invalid.smallest), int(invalid.largest), invalid.classes
    marker = invalid.only_invalid
    if marker is not None and 0 <= marker <= classes:
        marker = None
    loss = f"keras.losses.SparseCategoricalCrossentropy({'from_logits=True, ' * invalid.from_logits}ignore_class="
    if marker is not None and invalid.per_example > 1 and not invalid.key:
        edit = SetArguments("model.compile", {"loss": f"{loss}{marker})"})
        return (edit,), f"if {marker} means that a target is missing"
    if marker is not None or low < 0:
        condition = f"({y} >= 0) & ({y} < {classes})" if high >= classes else f"{y} >= 0"
        note = "" if marker is None else f"or loss={loss}{marker}), if {marker} means that a target is missing"
        return (_keep(y, condition, replay.has_sample_weight),), note
    note = f"or {y} = {y} - 1, also in validation, because Keras counts classes from 0" if low == 1 else ""
    argument = "units" if class_name == "Dense" else "filters" if class_name.startswith("Conv") else ""
    edits = (SetArguments(f"keras.layers.{class_name}", {argument: str(high + 1)}, layer),) if argument else ()
    return edits, note


def _severity(metrics: RunMetrics) -> str:
    is_rare = metrics.nonfinite_losses <= _RARE * metrics.steps and not metrics.ends_nonfinite
    return WARNING if is_rare else ERROR


def _keep(name: str, condition: str, has_sample_weight: bool) -> PrepareData:
    arrays = "x, y, sample_weight" if has_sample_weight or name == "sample_weight" else "x, y"
    return PrepareData(
        f"keep = ({condition}).reshape(len({name}), -1).all(axis=1)\n"
        f"{arrays} = keras.tree.map_structure(lambda a: a[keep], ({arrays}))"
    )


def _is_overflow_of_inputs(replay: Replay) -> bool:
    """Whether inputs beyond float16's range are the cause, and not a layer that fails after it computed in float32."""
    if not replay.is_finite_in_float32:
        first = next(iter(replay.nonfinite), None)
        is_overflow = first is not None and first.value == "inf" and first.largest_input > _OVERFLOWS_FLOAT32
        return is_overflow and not replay.nonfinite_variables
    return any(found.operation == "Cast" and not found.is_backward for found in replay.nonfinite)
