"""Finds what has to stay float32 so that no output is NaN or Inf with a batch."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras

from kmp.backend.keras_internals import is_passthrough
from kmp.conversion.cloning import clone_model
from kmp.conversion.measurement import inference_passes, statistics_of
from kmp.conversion.model_parts import Part
from kmp.conversion.plan import Plan
from kmp.replay import Choices, Passes, PassResult, find_float32_layers
from kmp.utils.float_formats import FLOAT32, FORMATS_16_BIT

logger = logging.getLogger("kmp")


def clone_without_overflow(
    model: keras.Model, parts: list[Part], plan: Plan, batch: Any, exact: PassResult
) -> keras.Model:
    """Clones a model by a plan, with what else has to be float32, which is logged.

    Args:
        model: A float32 model.
        parts: Its parts.
        plan: The dtype policies.
        batch: An input of the model.
        exact: A pass of the model over the batch in float32, with all values.
    """
    if "" in exact.marks.nonfinite:
        logger.warning(
            "With this batch the outputs of %r have NaN or Inf in float32 too.", model.name
        )
    # The trial has weights in float32: a pass in float32 cannot undo their rounding to 16 bits.
    trial = Plan(f"mixed_{plan.compute_dtype}", plan.float32)
    clone, operations = clone_model(model, parts, trial)
    passes = inference_passes(clone, operations, batch)
    result = passes.in_own_precision()
    additions = _additions(passes, result, exact, trial, parts)
    chosen = plan
    while additions or plan.policy != trial.policy:
        chosen = Plan(plan.policy, {**plan.float32, **additions})
        clone, operations = clone_model(model, parts, chosen)
        try:
            result = inference_passes(clone, operations, batch).in_own_precision()
            break
        except ValueError:
            # Custom code may need the layer around it in float32 too.
            planned_path = _planned_paths(parts)
            parent = {part.path: planned_path[part.parent_path] for part in parts}
            around = {parent[path] or path: reason for path, reason in additions.items()}
            if around == additions:
                raise
            additions = around
    for path, reason in additions.items():
        logger.warning("%s stays float32: it %s.", path, reason)
    if "" in _overflowed(result, exact):
        logger.warning(
            "With this batch the outputs of %r have NaN or Inf in %s.", model.name, chosen.policy
        )
    return clone


def _additions(
    passes: Passes, result: PassResult, exact: PassResult, plan: Plan, parts: list[Part]
) -> dict[str, str]:
    """Returns by path what has to be float32 besides a plan, with the reasons.

    That is all whose float32 outputs exceed the range of 16 bits, and what a search finds for NaN
    and Inf that begin inside of others.
    """
    overflowed = _overflowed(result, exact)
    if not overflowed:
        return {}
    choices = _choices(passes, plan, parts)
    planned_path = _planned_paths(parts)
    amax = {path: found.amax for path, found in statistics_of(exact).items()}
    largest = FORMATS_16_BIT[plan.compute_dtype].max
    sizes: dict[str, float] = {}  # of what overflowed
    for path in overflowed:
        planned = planned_path[path]
        sizes[planned] = max(amax[path], sizes.get(planned, 0.0))
    out_of_range = [
        path for path, size in sizes.items() if size > largest and path in choices.operations
    ]
    reasons: dict[str, str] = {}
    for path in _chosen(passes, exact, choices, out_of_range):
        size = sizes.get(path, amax.get(path, 0.0))
        if size > largest:
            verb = "overflowed"
        else:
            verb = "was NaN or Inf" if path in sizes else "avoids NaN and Inf"
        reasons[path] = f"{verb} with the batch: amax {size:.3g} in float32"
    return reasons


def _planned_paths(parts: list[Part]) -> dict[str, str]:
    """Returns by path the closest path, of itself or a parent, whose policy a plan can set.

    The model has the path "".
    """
    closest = {"": ""}
    for part in parts:
        closest[part.path] = part.path if part.is_planned else closest[part.parent_path]
    return closest


def _choices(passes: Passes, plan: Plan, parts: list[Part]) -> Choices:
    """Returns what a plan can add to its float32 layers and operations."""
    operations: Mapping[str, keras.Operation] = passes.operations or {}
    found: dict[str, keras.Operation] = {}
    for part in parts:
        operation = operations.get(part.path)
        if operation is None or not part.is_planned:  # what is never called has no clone
            continue
        computes = not (part.is_layer and is_passthrough(part.operation))
        if computes and plan.policy_of(part.path) != FLOAT32.name:
            found[part.path] = operation
    return Choices(found, most=len(found))


def _chosen(
    passes: Passes, exact: PassResult, choices: Choices, out_of_range: Sequence[str]
) -> list[str]:
    """Returns the choices with which nothing overflows; if there are none, those out of range."""

    def is_sound(result: PassResult) -> bool:
        return not _overflowed(result, exact)

    first = [choices.operations[path] for path in out_of_range]
    others = {path: each for path, each in choices.operations.items() if path not in out_of_range}
    with_first = replace(passes, float32_operations=first)
    # A search would watch each operation, which takes a few times as long.
    if is_sound(with_first.in_own_precision()):
        return list(out_of_range)
    search, _ = find_float32_layers(
        with_first, is_sound, exact, replace(choices, operations=others)
    )
    return [*out_of_range, *search.layers]


def _overflowed(result: PassResult, exact: PassResult) -> list[str]:
    """Returns the paths with NaN or Inf in the outputs of a pass, but not in float32."""
    known, nonfinite = exact.marks.outputs, exact.marks.nonfinite
    overflowed = [path for path in result.marks.nonfinite if path not in nonfinite]
    return [path for path in overflowed if known.get(path)]
