"""Rules about what float16 changes in finite passes, as measured by a comparison with float32."""

from kmp.advice import thresholds
from kmp.advice.finding import ERROR, INFO, WARNING, Finding
from kmp.advice.run_metrics import RunMetrics, name_of
from kmp.advice.wording import in_float32, replayed_change
from kmp.records import (
    HARMFUL_OUTPUT_ERROR,
    HARMFUL_OUTPUT_ERROR_ALONE,
    LOSS_FUNCTION,
    LayerError,
    Replay,
)


def unscaled_loss(metrics: RunMetrics) -> Finding | None:
    """Reports gradients that do not grow with the loss scale."""
    replay = metrics.last_comparison
    if replay is None or not replay.unscaled_layers:
        return None
    layers = [metrics.created_layer(layer) for layer in replay.unscaled_layers]
    location, named = layers[0], ", ".join(map(metrics.describe, dict.fromkeys(layers[:3])))
    note = "add up all losses, and pass the sum to self.optimizer.scale_loss"
    if metrics.settings.get("train_step") == "keras":  # which scales its loss
        what, where = f"The gradients of {named} do", "between the loss and their outputs"
        if replay.unscaled_by:
            location = metrics.created_layer(replay.unscaled_by)
            what, where = f"The backward pass of {metrics.describe(location)} does", "in it"
        title = (
            f"{what} not grow with the loss scale: a gradient function {where} clips, normalizes or"
            " adds."
        )
        note = (
            "clip in the optimizer, with its clipnorm or clipvalue: it gets gradients without the"
            " loss scale"
        )
    elif replay.is_unscaled:  # though `scale_loss` was called
        title = (
            "Hardly anything of the gradients grows with the loss scale: most of the loss is not"
            " scaled, or the training step clips or normalizes scaled gradients."
        )
        note += (
            "; clip what self.optimizer.unscale(gradients) returns, then pass that to"
            " self.optimizer.apply"
        )
    else:
        title = (
            f"A part of the loss is not multiplied by the loss scale: the gradients of {named} do"
            " not grow with it."
        )
    return Finding(
        "unscaled_loss",
        ERROR,
        title,
        f"on {_examples(replay)} of a batch, in float32, the gradients at two loss scales differ by"
        " another factor than the scales; the optimizer divides all of them by the scale",
        note=note,
        location=location,
    )


def outputs(metrics: RunMetrics) -> Finding | None:
    """Reports a model whose outputs differ from those in float32."""
    replay = metrics.last_comparison
    if replay is None or replay.output_error is None or not replay.is_harmful:
        return None
    if replay.float32_layers == [] and any(each.is_harmful for each in replay.gradient_errors):
        return None  # at another loss scale nothing is harmful
    origin, layers = replay.error_origin, replay.float32_layers or []
    if origin is not None:
        location, where = origin.layer, metrics.describe(origin.layer)
        share = f"; in {where} alone, given float32 inputs, by {_percent(origin.new_error or 0.0)}"
        reason, detail = _reason(replay, origin)
        title = f"The outputs of {where} are not those of float32: {reason}."
    elif (
        layers and replay.output_error > HARMFUL_OUTPUT_ERROR_ALONE and metrics.needs_float32_layers
    ):
        # An operation between layers computes in the dtype of the one before it.
        location, share, detail = layers[-1], "", "; no layer adds to this"
        title = (
            "The outputs of the model are not those of float32: float16 has too few bits for an"
            f" operation outside of its layers, after {metrics.describe(location)}."
        )
    else:
        return None  # only a constant differs, or it is a consequence of gradients that underflow
    agree = f"the outputs{' and gradients' * (not replay.is_forward_only)} for the batch agree"
    return Finding(
        "precision_loss",
        ERROR,
        title,
        f"on {_examples(replay)} of a batch the outputs of the model differ from float32 by "
        f"{_percent(replay.output_error)} of how they vary{share}{detail}",
        *replayed_change(metrics, replay, agree),
        location,
    )


def _reason(replay: Replay, origin: LayerError) -> tuple[str, str]:
    """Returns why the outputs of a layer differ, as it was measured, and a detail for the evidence."""
    weights = replay.lost_weights_of(origin.layer)
    if weights:
        worst = max(weights, key=lambda each: max(each.zero, each.infinite))
        share, value = max((worst.zero, "0"), (worst.infinite, "infinite"))
        if share > thresholds.MANY_LOST_VALUES:
            return (
                f"its weight {name_of(worst.path)!r} is {value} in float16",
                f"; that is {share:.0%} of {worst.path}",
            )

    def is_inside(layer: str) -> bool:
        return f"{layer}/".startswith(f"{origin.layer}/")

    found = next(
        (each for each in replay.nonfinite if is_inside(each.layer) and not each.is_backward), None
    )
    if found is not None:
        operands = f"numbers up to {found.largest_input:.5g}"
        return (
            "it overflows inside",
            f"; {found.operation} in it returns {found.value} for {operands}",
        )
    of_inputs = origin.input_error or 0.0
    if of_inputs > thresholds.MAIN_PART * (origin.new_error or 0.0):
        return (
            "float16 rounds its inputs too much",
            f"; in float32 on rounded inputs by {_percent(of_inputs)}",
        )
    underflow = max(
        (share for layer, share in replay.underflows.items() if is_inside(layer)), default=0.0
    )
    if underflow > thresholds.MAIN_PART:
        return (
            "it underflows",
            f"; float16 rounds {underflow:.0%} of what an operation in it, or a cast, returns to 0",
        )
    return "float16 has too few bits for what it computes", "; nothing in it is NaN or Inf"


def states(metrics: RunMetrics) -> Finding | None:
    """Reports states, such as moving averages, whose updates float16 loses."""
    replay = metrics.last_comparison
    if replay is None or not replay.lost_states:
        return None
    worst = max(
        (each for each in replay.state_errors or () if each.is_harmful), key=lambda each: each.error
    )
    layer = metrics.layer_of(worst.path)
    edits, note = replayed_change(metrics, replay, "the updates for the batch agree")
    return Finding(
        "precision_loss",
        ERROR,
        f"The state {name_of(worst.path)!r} of {metrics.describe(layer)} stays behind: float16 has"
        " too few bits for its updates.",
        f"on {_examples(replay)} of a batch what a step adds to {worst.path} differs from float32"
        f" by {_percent(worst.error)}; for another batch it would differ by"
        f" {_percent(worst.noise)}",
        edits,
        f"{note}; or create the weight in float32, with autocast=False",
        layer,
    )


def gradients(metrics: RunMetrics) -> Finding | None:
    """Reports layers whose gradients differ from those in float32, though the outputs agree."""
    last = metrics.last_comparison
    if last is None or not any(each.is_harmful for each in last.gradient_errors):
        return None
    # Late in a training that the loss misleads, the outputs may hardly vary, and differ too.
    replay = next(filter(_is_born_in_loss, reversed(metrics.with_harmful_gradients)), last)
    worst = max(
        (each for each in replay.gradient_errors if each.is_harmful), key=lambda each: each.error
    )
    location = metrics.created_layer(worst.layer)
    edits, note = replayed_change(metrics, replay, "the gradients for the batch agree")
    noise = "" if worst.noise is None else f"; the sampling noise is {_percent(worst.noise)}"
    severity, title = (
        WARNING,
        f"The gradients of {metrics.describe(location)} are not those of float32.",
    )
    evidence = f"on {_examples(replay)} of a batch they differ"
    if _is_born_in_loss(replay):
        severity, location = ERROR, LOSS_FUNCTION
        title = (
            "The loss is not that of float32, though the outputs are: float16 has too few bits for"
            " what it computes."
        )
        found = replay.overflow_inside
        if found is not None:
            added = (
                ""
                if found.layer == LOSS_FUNCTION
                else f" that {metrics.describe(found.layer)} adds"
            )
            location = found.layer
            title = (
                f"The loss{added} is not that of float32: {found.operation} in it returns"
                f" {found.value} in float16."
            )
        evidence = (
            f"on {_examples(replay)} of a batch the loss is {replay.loss:.4g}, in float32"
            f" {replay.float32_loss:.4g}, and the outputs differ by"
            f" {_percent(replay.output_error or 0.0)}; the gradients of"
            f" {metrics.describe(metrics.created_layer(worst.layer))} differ"
        )
    return Finding(
        "precision_loss",
        severity,
        title,
        f"{evidence} by {_percent(worst.error)} of their norm, and keep"
        f" {_percent(max(0.0, worst.kept))} of it{noise}",
        edits,
        note,
        location,
    )


def _is_born_in_loss(replay: Replay) -> bool:
    """Whether the loss differs from float32, while the outputs that it is computed from do not."""
    if (replay.output_error or 0.0) > HARMFUL_OUTPUT_ERROR:
        return False
    return replay.loss_difference > HARMFUL_OUTPUT_ERROR * abs(replay.float32_loss or 0.0)


def fallback(metrics: RunMetrics) -> Finding | None:
    """Reports the layers that were set to float32 while the training ran."""
    record = metrics.fallback
    if record is None:
        return None
    layers = [path for row in metrics.complete_run.rows for path in row.get("fallback", ())]
    model = metrics.settings.get("model")
    named = ", ".join(
        f"model {path!r}" if path == model else metrics.describe(path) for path in layers
    )
    return Finding(
        "float32_fallback",
        INFO,
        f"Since step {record['step']}, {named} compute{'s' * (len(layers) == 1)} in float32, and"
        " the training continued.",
        record.get("fallback_reason", ""),
        in_float32(metrics, layers),
        "with this change the run needs no fallback",
        layers[-1],
    )


def _examples(replay: Replay) -> str:
    return f"{replay.examples} example{'s' * (replay.examples != 1)}"


def _percent(share: float) -> str:
    return "more than 1000 %" if share > 10 else f"{100 * share:.{0 if share > 0.095 else 2}f} %"
