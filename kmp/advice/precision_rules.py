"""Rules about what float16 changes in finite passes, as measured by a comparison with float32."""

import math
from collections.abc import Sequence

from kmp.advice.finding import ERROR, INFO, WARNING, Edit, Finding, SetArguments
from kmp.advice.run_metrics import RunMetrics
from kmp.advice.wording import in_float32, power
from kmp.records import Replay


def outputs(metrics: RunMetrics) -> Finding | None:
    """Reports a model whose outputs differ from those in float32."""
    replay = metrics.last_comparison
    origin = replay.error_origin if replay else None
    if replay is None or origin is None or not replay.is_harmful:
        return None  # where no layer adds an error, only gradients or a constant differ
    where = metrics.describe(origin.layer)
    share = f"; in {where} alone, given float32 inputs, by {_percent(origin.new_error or 0.0)}"
    return Finding(
        "precision_loss",
        ERROR,
        f"The outputs of {where} are not those of float32: it overflows inside, or has too few bits.",
        f"on {_examples(replay)} of a batch the outputs of the model differ from float32 by "
        f"{_percent(replay.output_error or 0.0)} of how they vary{share}",
        _edits(metrics, replay),
        "with these layers in float32 the outputs and gradients for the batch agree" if replay.float32_layers else "",
        origin.layer,
    )


def gradients(metrics: RunMetrics) -> Finding | None:
    """Reports layers whose gradients differ from those in float32, though the outputs agree."""
    replay = metrics.last_comparison
    harmful = [each for each in replay.gradient_errors if each.is_harmful] if replay else []
    if replay is None or not harmful:
        return None
    worst = max(harmful, key=lambda each: each.error)
    scale = replay.usable_scale
    edits = _edits(metrics, replay)
    note = "with these layers in float32 the gradients for the batch agree" if replay.float32_layers else ""
    if replay.float32_layers == [] and scale is not None:
        edits = [SetArguments(metrics.settings_call, {"initial_scale": power(math.log2(scale))})]
        note = "at this loss scale the gradients for the batch agree"
    noise = "" if worst.noise is None else f"; the sampling noise is {_percent(worst.noise)}"
    return Finding(
        "precision_loss",
        WARNING,
        f"The gradients of {metrics.describe(metrics.created_layer(worst.layer))} are not those of float32.",
        f"on {_examples(replay)} of a batch they differ by {_percent(worst.error)} of their norm, and keep "
        f"{_percent(max(0.0, worst.kept))} of it{noise}",
        edits,
        note,
        metrics.created_layer(worst.layer),
    )


def fallback(metrics: RunMetrics) -> Finding | None:
    """Reports the layers that were set to float32 while the training ran."""
    record = metrics.fallback
    if record is None:
        return None
    layers = [path for row in metrics.complete_run.rows for path in row.get("fallback", ())]
    return Finding(
        "float32_fallback",
        INFO,
        f"Since step {record['step']}, {', '.join(map(metrics.describe, layers))} compute{'s' * (len(layers) == 1)} in "
        "float32, and the training continued.",
        record.get("fallback_reason", ""),
        in_float32(metrics, layers),
        "with this change the run needs no fallback",
        layers[-1],
    )


def _edits(metrics: RunMetrics, replay: Replay) -> Sequence[Edit]:
    if replay.float32_layers:
        return in_float32(metrics, replay.float32_layers)
    return [SetArguments("kmp.enable", {"policy": "'float32'"})]


def _examples(replay: Replay) -> str:
    return f"{replay.examples} example{'s' * (replay.examples != 1)}"


def _percent(share: float) -> str:
    return "more than 1000 %" if share > 10 else f"{100 * share:.{0 if share > 0.095 else 2}f} %"
