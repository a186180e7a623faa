"""Rules about steps that were skipped because a loss or gradient was not finite."""

import math

from kmp.advice.edits import Edit, PrepareData, SetArguments
from kmp.advice.finding import ERROR, Finding
from kmp.advice.run_metrics import STUCK_AFTER, RunMetrics
from kmp.advice.wording import exploding_edits, in_float32, name_of, nonfinite_losses, of_steps
from kmp.records import BATCH_X, BATCH_Y, LOSS_FUNCTION, NonfiniteOperation, Replay
from kmp.utils import FLOAT16, as_power

# Thresholds. A dynamic scale normally skips a few steps at the start and about one in 2000 later: that is no problem.
_EXPLODING_UPDATE = 0.5  # of the weights' norm, in one step; 1e-3 is typical
_RISING_UPDATE = 0.2  # with a loss that rose and stayed high
_RISING_LOSS = 2.0  # times the first loss
_LARGE_UPDATE = 0.05  # smaller updates cannot raise the loss a hundredfold
_EXPLODING_LOSS = 100.0  # times the first loss
_SMALL_LOSS = 0.01
_SKIPPED_BY_EXPLOSION = 0.1
_SKIPPED_AT_ANY_SCALE = 0.05
_SPARE_BITS = 6.0
_LARGEST_CONSTANT_LOST = 2.0**FLOAT16.flush_exponent

_KEEP_FINITE = """keep = ({condition}).reshape(len({part}), -1).all(axis=1)
x, y = keras.tree.map_structure(lambda a: a[keep], (x, y))"""
_NORMALIZE = PrepareData("x = (x - x.mean(axis=0)) / x.std(axis=0)")
_DIVISIONS = ("RealDiv", "Rsqrt", "Reciprocal", "Inv", "Div", "Xdivy", "Pow", "RsqrtGrad", "SqrtGrad")
_BFLOAT16 = SetArguments("kmp.enable", {"policy": "'mixed_bfloat16'"})


def data(metrics: RunMetrics) -> Finding | None:
    """Reports NaN, Inf or too large values in the batch."""
    replay, tensor = metrics.forward_replay, metrics.nonfinite_tensor
    part = replay.nonfinite_part if replay else tensor if metrics.is_batch_nonfinite else None
    if not metrics.nonfinite_losses or part is None:
        return None
    if replay and replay.is_finite_in_float32 and part != BATCH_X:
        return None  # the loss ignores these targets
    part += replay.nonfinite_key if replay else ""
    is_too_large = replay is not None and replay.is_part_finite
    name = part.partition("'s ")[2]
    condition = f"np.abs({name}) <= 65504" if part.startswith(BATCH_X) else f"np.isfinite({name})"
    edits: tuple[Edit, ...] = (PrepareData(_KEEP_FINITE.format(part=name, condition=condition)),)
    if replay and is_too_large and replay.is_finite_in_float32:
        edits = in_float32(metrics, replay.float32_layers) if replay.float32_layers else (_NORMALIZE,)
    kind = "values beyond float16's maximum of 65504" if is_too_large else "NaN or Inf"
    return Finding(
        "targets" if part.startswith(BATCH_Y) else "data",
        ERROR,
        f"{part[0].upper()}{part[1:]} contains {kind}.",
        f"{nonfinite_losses(metrics)}; in the last such step {part} had {kind}",
        edits,
        f"or normalize {name}, with its mean and standard deviation, in training and later" if is_too_large else "",
    )


def targets(metrics: RunMetrics) -> Finding | None:
    """Reports targets that are not the index of a class."""
    replay = metrics.forward_replay
    if replay is None or replay.invalid_targets is None:
        return None
    invalid = replay.invalid_targets
    low, high, classes, y = invalid.smallest, invalid.largest, invalid.classes, f"y{invalid.key}"
    outputs = metrics.setting("output_layers", [])
    layer = outputs[invalid.output] if invalid.output < len(outputs) else ""
    edits: tuple[Edit, ...] = ()
    note = ""
    if low < 0:
        edits = (PrepareData(f"keep = {y} >= 0\nx, y = keras.tree.map_structure(lambda a: a[keep], (x, y))"),)
        note = "or SparseCategoricalCrossentropy(ignore_class=-1), if -1 means that a label is missing"
    elif metrics.class_of(layer) == "Dense":
        edits = (SetArguments("keras.layers.Dense", {"units": str(high + 1)}, name_of(layer)),)
        note = f"or {y} = {y} - 1, also in validation, because Keras counts classes from 0" if low == 1 else ""
    return Finding(
        "targets",
        ERROR,
        f"The targets {y} have classes from {low} to {high}, but the model has the classes 0 to {classes - 1}.",
        f"{nonfinite_losses(metrics)}; in the last such step the targets were from {low} to {high} and the output "
        f"{name_of(layer) + ' ' if layer else ''}had {classes} classes",
        edits,
        note,
    )


def optimizer_state(metrics: RunMetrics) -> Finding | None:
    """Reports weights that became NaN because the optimizer keeps its state in float16."""
    replay, epsilon = metrics.forward_replay, metrics.setting("epsilon", None)
    if FLOAT16.name not in metrics.setting("variable_dtypes", []) or epsilon is None:
        return None
    if epsilon > _LARGEST_CONSTANT_LOST or replay is None or not replay.nonfinite_variables:
        return None
    return Finding(
        "optimizer_state",
        ERROR,
        f"The optimizer divides by zero: its epsilon of {epsilon:g} is 0 in float16, the dtype of its state.",
        f"{of_steps(metrics, metrics.overflows)} were skipped, and {replay.nonfinite_variables[0]} contains NaN or Inf "
        f"since an update. float16 rounds {_LARGEST_CONSTANT_LOST:.2g} and less to zero",
        (SetArguments("kmp.enable", {"policy": "'mixed_float16'"}),),
        "keeps weights and optimizer state in float32; or epsilon=1e-4",
    )


def exploding(metrics: RunMetrics) -> Finding | None:
    """Reports updates that are too large in any number format."""
    step, ratio = metrics.update_ratio
    limit = _EXPLODING_LOSS * max(abs(metrics.first_loss), _SMALL_LOSS)
    is_large_update, is_loss_rising = ratio > _EXPLODING_UPDATE, metrics.highest_loss > limit
    are_many_skipped = metrics.overflows > _SKIPPED_BY_EXPLOSION * metrics.steps
    # With small updates, a high loss at the end comes from a different batch, not from an explosion.
    stays_high = metrics.last_loss > limit and not 0.0 < ratio < _LARGE_UPDATE
    first, highest, last = abs(metrics.first_loss), metrics.highest_loss, metrics.last_loss
    has_not_learned = (
        metrics.first_loss > 0 and ratio > _RISING_UPDATE and highest > _RISING_LOSS * first and last > first / 2
    )
    if (
        not has_not_learned
        and not (is_large_update and (are_many_skipped or is_loss_rising))
        and not (is_loss_rising and (metrics.ends_nonfinite or stays_high))
    ):
        return None
    evidence = []
    if is_large_update or has_not_learned:
        evidence.append(
            f"in step {step} the update was {ratio:.2g} times as large as the weights (L2 norms; 0.001 is typical)"
        )
    if is_loss_rising or has_not_learned:
        evidence.append(f"the loss rose from {first:.3g} to {highest:.3g}")
    if metrics.ends_nonfinite:
        evidence.append(
            f"the loss was NaN or Inf in the last {metrics.consecutive_overflows} steps, after steps with a finite loss"
        )
    if metrics.overflows:
        evidence.append(f"{of_steps(metrics, metrics.overflows)} were skipped")
    return Finding(
        "exploding",
        ERROR,
        "Training diverges: the updates are too large in any number format.",
        "; ".join(evidence),
        exploding_edits(metrics, ratio),
        "or clipnorm=1.0",
    )


def forward(metrics: RunMetrics) -> Finding | None:
    """Reports a forward pass or a loss that float16 makes NaN or Inf."""
    if not metrics.nonfinite_losses:
        return None
    replay = metrics.forward_replay
    if replay is None:
        return _not_replayed(metrics)
    if not replay.is_finite_in_float32:
        return _nonfinite_in_float32(metrics, replay)
    first = _first_cause(replay)
    if first is None:
        return _not_replayed(metrics)
    cause, title, reason = _described(first, replay)
    layers = replay.float32_layers
    edits: tuple[Edit, ...] = (_BFLOAT16,) if not layers else in_float32(metrics, layers)
    return Finding(
        cause,
        ERROR,
        title,
        f"{nonfinite_losses(metrics)}; replayed, {reason}; in float32 the loss is {replay.float32_loss:.4g}",
        edits,
        "with these layers in float32 the same batch has a finite loss and finite gradients" if layers else "",
    )


def backward(metrics: RunMetrics) -> Finding | None:
    """Reports overflows of the backward pass that a smaller loss scale does not avoid."""
    path, share = metrics.main_overflow_origin
    are_many = metrics.gradient_overflows > _SKIPPED_AT_ANY_SCALE * metrics.steps
    is_stuck = metrics.consecutive_overflows >= STUCK_AFTER and not metrics.ends_nonfinite
    if metrics.is_fixed:
        fails_at_any_scale = are_many and metrics.headroom >= _SPARE_BITS
    else:
        lowest = metrics.setting("min_scale", FLOAT16.smallest_normal)
        flushes = metrics.scale < 1.0 and bool(metrics.unexplained_zero_variables)
        fails_at_any_scale = is_stuck or flushes or (are_many and metrics.scale <= lowest * 2.0**_SPARE_BITS)
    if not fails_at_any_scale or not path or metrics.nonfinite_losses >= metrics.gradient_overflows:
        return None
    replay = metrics.backward_replay
    layers = replay.float32_layers if replay else None
    evidence = (
        f"{of_steps(metrics, metrics.gradient_overflows)} were skipped with a finite loss, down to a loss scale of "
        f"{as_power(metrics.scale)}; {path} was the overflow origin in {share:.0%} of them"
    )
    scales = f"loss scales above {as_power(metrics.scale)}"
    if is_stuck or metrics.is_fixed:
        scales = "every loss scale"
    where = f"Gradients near {path} overflow at {scales}."
    if replay and replay.largest_activation_gradient:
        layer, magnitude = replay.largest_activation_gradient
        evidence += (
            f"; replayed in float32, the gradient of the output of {layer} reaches {magnitude:.3g} without scaling"
        )
        found = next((found for found in replay.nonfinite if found.is_backward), None)
        if found:
            where = f"The backward pass of {_described_place(found.place)} overflows float16 at {scales}."
    zero = metrics.all_zero_variables
    if zero:
        evidence += f"; at this scale the gradients of {len(zero)} variables are zero, such as {zero[-1]}"
    edits = in_float32(metrics, layers or [metrics.layer_of(path)])
    note = "" if layers else f"or the layers between {path} and the loss"
    if replay and (replay.usable_scale or 1.0) < 1.0:
        note = "or a smaller loss: a mean in place of a sum, a smaller loss weight, or targets in other units"
    return Finding("backward_overflow", ERROR, where, evidence, edits, note)


def _first_cause(replay: Replay) -> NonfiniteOperation | None:
    """Returns the first NaN or Inf that matters: of a layer that has to compute in float32, or in the loss."""
    forward_pass = [found for found in replay.nonfinite if not found.is_backward]
    needed = {*(replay.float32_layers or ()), LOSS_FUNCTION}
    return next((found for found in forward_pass if found.place in needed), forward_pass[0] if forward_pass else None)


def _described_place(place: str) -> str:
    return place if place == LOSS_FUNCTION else f"layer {name_of(place)!r}"


def _described(found: NonfiniteOperation, replay: Replay) -> tuple[str, str, str]:
    """Returns the cause, a title and the evidence for an operation of the forward pass."""
    where = _described_place(found.place)
    operation = f"{found.operation} in {where}"
    if found.operation == "Cast" and found.constant is not None and abs(found.constant) > FLOAT16.max:
        title = f"The constant {found.constant:g} in {where} is infinite in float16."
        return "constant", title, f"{operation} rounds {found.constant:g} to {math.copysign(math.inf, found.constant)}"
    constants = replay.lost_constants.get(found.place, [])
    large = [value for value in constants if abs(value) > 1.0]
    small = [value for value in constants if abs(value) < 1.0]
    if found.has_infinite_constant or (found.value == "nan" and large):
        constant = f"The constant {large[0]:g}" if large else "A constant"
        title = f"{constant} in {where} is infinite in float16, whose maximum is 65504."
        return "constant", title, f"{operation} is the first to return {found.value}, for a scalar that is infinite"
    if found.operation in ("Log", "Log1p", "Xlogy"):
        title = f"{where[0].upper()}{where[1:]} takes the logarithm of a number that is 0 in float16."
        return "forward_underflow", title, f"{operation} is the first to return {found.value}, for 0"
    if found.operation in _DIVISIONS and found.smallest_input == 0.0:
        reason = f"float16 rounds the constant {small[0]:g} to 0" if small else "in float16 the divisor is 0"
        title = f"{where[0].upper()}{where[1:]} divides by 0: {reason}."
        return "constant", title, f"{operation} is the first to return {found.value}, for 0"
    is_loss = found.place == LOSS_FUNCTION or found.place not in replay.nonfinite_outputs
    largest = f"{operation} is the first to return {found.value}, for numbers up to {found.largest_input:.5g}"
    if is_loss:
        what = "The loss" if found.place == LOSS_FUNCTION else f"The loss that {where} adds"
        return "loss_overflow", f"{what} overflows float16's maximum of 65504.", largest
    return "forward_overflow", f"The output of {where} overflows float16's maximum of 65504.", largest


def _nonfinite_in_float32(metrics: RunMetrics, replay: Replay) -> Finding:
    if replay.nonfinite_variables:
        return Finding(
            "loss",
            ERROR,
            f"{replay.nonfinite_variables[0]} contains NaN or Inf, so every loss is NaN.",
            f"{nonfinite_losses(metrics)}; {len(replay.nonfinite_variables)} variables contain NaN or Inf",
            exploding_edits(metrics, metrics.update_ratio[1]),
            "an update made them so; train again from weights that are finite",
        )
    found = next(iter(replay.nonfinite), None)
    where = f": {found.operation} in {name_of(found.place)} returns {found.value}" if found else ""
    return Finding(
        "loss",
        ERROR,
        "The loss is NaN or Inf in float32 too.",
        f"{nonfinite_losses(metrics)}; replayed in float32 it is not finite either{where}",
        (),
        "not a matter of precision: look at the function above, and at what the batch contains",
    )


def _not_replayed(metrics: RunMetrics) -> Finding:
    """Returns what is known of non-finite losses without a replay that shows them."""
    tensor = metrics.nonfinite_tensor
    if tensor == LOSS_FUNCTION:
        return Finding(
            "loss",
            ERROR,
            "The loss function returns NaN or Inf for finite outputs.",
            f"{nonfinite_losses(metrics)}, although the outputs of all layers were finite",
            (),
            "compute the loss in float32, and clip the argument of a log",
        )
    if metrics.run.last("loss_dtype") == FLOAT16.name:
        return Finding(
            "loss_overflow",
            ERROR,
            "The loss is computed in float16, whose maximum is 65504.",
            f"{nonfinite_losses(metrics)}, and it is a float16 tensor",
            in_float32(metrics, metrics.setting("output_layers", [])),
            "or cast the outputs to float32 before the loss is computed",
        )
    if tensor:
        streak = f"; the last {metrics.consecutive_overflows} steps all had such a loss" * metrics.ends_nonfinite
        return Finding(
            "nonfinite_layer",
            ERROR,
            f"The forward pass becomes non-finite at {tensor}.",
            f"{nonfinite_losses(metrics)}; in the last such step the first non-finite tensor was the output of "
            f"{tensor}, although the batch was finite{streak}",
            in_float32(metrics, [tensor]),
        )
    if metrics.ends_nonfinite:
        pattern = f"among them the last {metrics.consecutive_overflows}"
    elif metrics.nonfinite_losses < metrics.steps / 2:
        pattern = "most losses are finite, which suggests corrupt examples"
    else:
        pattern = "that is most steps, which suggests a layer that fails in float16"
    return Finding(
        "loss",
        ERROR,
        "The loss is NaN or Inf before scaling, so no loss scale helps.",
        f"{nonfinite_losses(metrics)}; {pattern}",
        (),
        "callbacks=[..., kmp.callbacks.ForwardProbe()] reports the first non-finite batch or layer",
    )
