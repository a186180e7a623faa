"""Builds the runs, records, replays and samples of tests, as a log has them.

A run is a list of records and the settings:

    training(skipped(12, nonfinite=12, replay=failed(operation("Exp", "inf"))), layers=LAYERS)
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from kmp.diagnosis import INFO, SEVERITIES, Cause, Observations, causes_of
from kmp.records import (
    BIN_COUNT,
    GradientSample,
    Header,
    Record,
    Replay,
    Run,
    Settings,
)
from kmp.records.exponent_histogram import FIRST_EXPONENT, INF_BIN, NAN_BIN, ZERO_BIN
from kmp.records.gradient_sample import COLUMNS
from kmp.records.replay import (
    BatchCheck,
    Comparison,
    GradientError,
    GradientRange,
    LayerSearch,
    NonfiniteOperation,
    Overflow,
)

DEFAULT_SCALE = 2.0**15
# Settings of trainings in each format, with the layers of the records below.
FLOAT16 = {
    "rule": "DynamicScale",
    "initial_scale": DEFAULT_SCALE,
    "growth_interval": 2000,
    "compute_dtypes": ["float16"],
}
WITHOUT_SCALE = {"rule": "FixedScale", "initial_scale": 1.0}
BFLOAT16 = WITHOUT_SCALE | {"compute_dtypes": ["bfloat16", "float32"]}
FLOAT32 = WITHOUT_SCALE | {"compute_dtypes": ["float32"]}
LAYERS = {"net/conv": "Conv2D", "net/a": "Dense"}


# Runs and their records.


def run_of(*records: Record, **settings: Any) -> Run:
    """Returns a run of these records, with these settings and the defaults of the others."""
    return Run(list(records), Header(settings=Settings(**settings)))


def training(*records: Record, **settings: Any) -> Run:
    """Returns a run in float16 with a dynamic loss scale, unless the settings say otherwise.

    Its first step was sound.
    """
    first = Record(step=1, overflow_count=0, last_loss=1.0, highest_loss=1.0)
    return run_of(first, *records, **{"layers": LAYERS} | FLOAT16 | settings)


def skipped(
    count: int,
    steps: int = 100,
    *,
    nonfinite: int = 0,
    in_a_row: int = 0,
    scale: float = DEFAULT_SCALE,
    origin: str = "",
    **values: Any,
) -> Record:
    """Returns the record after some steps, of which some were skipped.

    Args:
        count: The number of skipped steps.
        steps: The number of steps.
        nonfinite: How many of them had a loss that was not finite.
        in_a_row: How many of them are the last steps.
        scale: The loss scale of the next step.
        origin: The variable in which those with a finite loss originated.
        values: Other values of the record.
    """
    if origin:
        values["overflow_origins_by_variable"] = {origin: count - nonfinite}
    return Record(
        step=steps,
        loss_scale=scale,
        overflow_count=count,
        nonfinite_loss_count=nonfinite,
        overflows_in_a_row=in_a_row,
        **values,
    )


def stuck(scale: float = 2.0**3, steps: int = 40, **values: Any) -> Record:
    """Returns the record of a run that has skipped all steps with a finite loss."""
    values = {"origin": "net/conv/kernel", "in_a_row": steps} | values
    return skipped(steps, steps, scale=scale, **values)


def sampled(
    step: int,
    variables: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    scale: float = DEFAULT_SCALE,
    **values: Any,
) -> Record:
    """Returns the record of a step with a sample of these variables, or of a small gradient."""
    sample = sample_from(step, scale, variables or {"net/kernel": gradient(-6)})
    return Record(step=step, loss_scale=scale, sample=sample, **values)


def healthy(step: int, variables: Mapping[str, Any] | None = None, **values: Any) -> Record:
    """Returns the record of a step of a sound run, with a sample."""
    return sampled(step, variables, **{"overflow_count": 0, "last_loss": 1.0} | values)


# Samples.


def bin_counts(exponents: Any = (), zero: int = 0, inf: int = 0, nan: int = 0) -> np.ndarray:
    """Returns the counts of a histogram; `exponents` is a dictionary of counts by exponent."""
    counts = np.zeros(BIN_COUNT, np.int64)
    counts[[ZERO_BIN, INF_BIN, NAN_BIN]] = zero, inf, nan
    for exponent, count in dict(exponents).items():
        counts[exponent - FIRST_EXPONENT + 1] = count
    return counts


def gradient(exponent: int, count: int = 100, **columns: Any) -> dict[str, Any]:
    """Returns a gradient for `sample_from` whose elements have an exponent, with the scale."""
    amax = 2.0**exponent
    return {"first": exponent, "counts": [count], "amax": amax, "norm": 1.0} | columns


ALL_ZERO = {"zero": 100, "amax": 0.0, "norm": 0.0}


def sample_from(
    step: int, loss_scale: float, variables: Mapping[str, Mapping[str, Any]]
) -> GradientSample:
    """Returns a sample of variables, given by path.

    Each is a dictionary with any of `zero`, `inf`, `nan`, `counts` (by exponent, starting with
    `first`), `amax` and the other columns of a sample.
    """
    counts = np.zeros((len(variables), BIN_COUNT), np.int64)
    columns: dict[str, list[Any]] = {key: [] for key in COLUMNS}
    for row, values in zip(counts, variables.values(), strict=True):
        row[[ZERO_BIN, INF_BIN, NAN_BIN]] = [values.get(key, 0) for key in ("zero", "inf", "nan")]
        first = values.get("first", FIRST_EXPONENT) - FIRST_EXPONENT + 1
        row[first : first + len(values.get("counts", ()))] = values.get("counts", ())
        for key, column in columns.items():
            column.append(values.get(key, 0 if COLUMNS[key] == "count" else math.nan))
    arrays = {key: np.array(column) for key, column in columns.items()}
    return GradientSample(step, loss_scale, tuple(variables), counts, **arrays)


def updated(step: int, update_norm: float, **columns: Any) -> Record:
    """Returns the record of a sample with the update of four weights, whose norm is 1."""
    measured = {"weight_norm": 1.0, "updates": 4, "norm": 0.4, "update_norm": update_norm}
    return Record(
        step=step,
        sample=sample_from(step, 1.0, {"net/kernel": gradient(-3, 4, **measured | columns)}),
    )


# Replays.

_PARTS = {"batch": BatchCheck, "gradients": GradientRange, "overflow": Overflow}


def make_replay(
    examples: int = 8,
    loss_scale: float = DEFAULT_SCALE,
    loss: float | None = 1.0,
    float32_loss: float | None = 1.0,
    is_finite: bool = True,
    is_finite_in_float32: bool = True,
    *,
    float32_layers: Iterable[str] | None = (),
    output_error: float | None = None,
    layer_errors: Sequence[Any] = (),
    gradient_errors: Sequence[Any] = (),
    state_errors: Sequence[Any] | None = (),
    **values: Any,
) -> Replay:
    """Returns a replay.

    Args:
        examples: The first six arguments are those of `Replay`.
        loss_scale: As there.
        loss: As there.
        float32_loss: As there.
        is_finite: As there.
        is_finite_in_float32: As there.
        float32_layers: The layers that a search has found to need float32; none if the loss scale
            is enough, and `None` if it found no layers.
        output_error: That of a comparison, with the three errors of layers, gradients and states.
        layer_errors: As there.
        gradient_errors: As there.
        state_errors: As there.
        values: Arguments of `Replay`, and those of its `batch`, its `gradients` and its
            `overflow` by their own names.
    """
    for key, part in _PARTS.items():
        names = {each.name for each in fields(part)}
        of_part = {name: values.pop(name) for name in names & values.keys()}
        if of_part:
            values[key] = part(**of_part)
    if output_error is not None:
        states = None if state_errors is None else list(state_errors)
        values["comparison"] = Comparison(
            output_error, list(layer_errors), list(gradient_errors), states
        )
    search = LayerSearch(float32_layers is not None, list(float32_layers or ()))
    return Replay(
        examples,
        loss_scale,
        loss,
        float32_loss,
        is_finite,
        is_finite_in_float32,
        **{"search": search} | values,
    )


def compared(output_error: float = 0.001, *, examples: int = 32, **values: Any) -> Replay:
    """Returns a replay that was finite and compared with float32."""
    return make_replay(examples, output_error=output_error, **values)


def failed(*operations: NonfiniteOperation, **values: Any) -> Replay:
    """Returns a replay whose loss was not finite, but with a layer in float32, or all.

    The operations are the first that returned NaN or Inf.
    """
    of_forward = {"loss": None, "loss_scale": 1.0, "is_finite": False, "float32_layers": ["net/a"]}
    if operations:
        of_forward["operations"] = list(operations)
    return make_replay(**of_forward | values)


def failed_in_float32(*operations: NonfiniteOperation, **values: Any) -> Replay:
    """Returns a replay whose loss was not finite, in float32 too."""
    in_float32 = {"float32_loss": None, "is_finite_in_float32": False, "float32_layers": ()}
    return failed(*operations, **in_float32 | values)


def failed_backward(*operations: NonfiniteOperation, **values: Any) -> Replay:
    """Returns a replay with a finite loss, and gradients that were finite in float32 only."""
    return failed(*operations, **{"loss": 1.0} | values)


def operation(
    name: str, value: str = "nan", layer: str = "net/a", **values: Any
) -> NonfiniteOperation:
    """Returns an operation of the forward pass that returned NaN or Inf in float16."""
    found = NonfiniteOperation(layer, name, "float16", value, 1.0, 0.5, None, False)
    return replace(found, **values)


def backward(name: str, value: str = "inf", **values: Any) -> NonfiniteOperation:
    """Returns an operation of the backward pass."""
    return operation(name, value, **{"is_backward": True} | values)


def wrong(
    layer: str = "net/a", error: float = 0.6, kept: float = 0.5, noise: float | None = 0.1
) -> GradientError:
    """Returns an error of the gradients of a layer."""
    return GradientError(layer, error, kept, 1.0, noise)


# What a diagnosis finds.


def problems(run: Run) -> list[Cause]:
    """Returns the causes of a run's problems, the gravest first."""
    causes = [cause for cause in causes_of(Observations(run)) if cause.severity != INFO]
    return sorted(causes, key=lambda cause: SEVERITIES.index(cause.severity))


def problem(run: Run) -> Cause:
    """Returns the cause of the only problem of a run."""
    (cause,) = problems(run)
    return cause


def names(run: Run) -> list[str]:
    """Returns the names of the causes of a run's problems, the gravest first."""
    return [cause.name for cause in problems(run)]


def edits_of(cause: Cause) -> list[str]:
    """Returns the edits of a cause as source."""
    return list(map(str, cause.change.edits))
