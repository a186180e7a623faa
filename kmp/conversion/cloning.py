"""Clones a model with the dtype policies of a plan, or in float32, and copies its weights."""

import random
import re
from collections.abc import Iterable, Iterator
from typing import Any

import keras

from kmp import layers
from kmp.backend import marked_policy
from kmp.backend.keras_internals import global_policy, sublayers
from kmp.conversion.config_references import References
from kmp.conversion.layer_state import Pair, copy_state
from kmp.conversion.model_parts import Part, children_of, has_float_dtype
from kmp.conversion.plan import Plan
from kmp.conversion.rebuilding import Rebuilder
from kmp.layers.float32_classes import only_in_float32
from kmp.layers.float32_rules import reason_for_float32
from kmp.layers.fused_calls import use_call_of_keras, use_fused_call
from kmp.utils.float_formats import FLOAT32
from kmp.utils.names import path_and_parents

Operations = dict[str, keras.Operation]


def clone_model(
    model: keras.Model, parts: list[Part], plan: Plan | None
) -> tuple[keras.Model, Operations]:
    """Returns a new model with the same structure and weights. The given model is not changed.

    No class has to be registered, shared layers stay shared, and a lambda keeps its closure; see
    `rebuilding`. `keras.models.clone_model` does not suffice: it compiles the clone from a config,
    which needs registered functions, and it cannot clone subclassed models, custom constructors,
    and the layers in wrappers.

    Args:
        model: A built model.
        parts: Its parts.
        plan: The dtype policies; `None` for float32, with Keras' own layers in place of kmp's.

    Returns:
        The clone, and the layers and operations in it by the path of the original.
    """
    kept, removed = _listed_layers(parts, plan) if plan else (set(), set())
    cloning = _Cloning(model, parts, plan, removed)
    policy = global_policy(plan.policy if plan else FLOAT32.name)
    # Keras draws seeds from it, but the initial values are overwritten.
    random_state = random.getstate()
    try:
        # Code of custom classes may call the layers that it creates at once: their policies cannot
        # be set later.
        with only_in_float32(kept), policy, model.distribute_strategy.scope():
            clone = cloning.clone_of_model()
    finally:
        random.setstate(random_state)
    pairs = list(cloning.pairs(model, clone))
    cloning.set_policies(pairs)  # of sublayers that are created in `build`
    for layer in sublayers(clone):
        if plan:
            use_fused_call(layer)
            marked_policy.mark(layer)
        else:
            use_call_of_keras(layer)
    copy_state(model, clone, pairs)
    return clone, {
        cloning.path_of(original): copy for original, copy in pairs if original is not model
    }


def _listed_layers(parts: list[Part], plan: Plan) -> tuple[set[type], set[str]]:
    """Returns what needs float32 by its class, as under `enable`.

    Returns:
        The classes of those that the plan has in float32, and the paths of those that the user
        removed from it.
    """
    kept: set[type] = set()
    removed: set[str] = set()
    for part in parts:
        if not part.is_layer or not reason_for_float32(part.operation, plan.compute_dtype):
            continue
        if plan.policy_of(part.path) == FLOAT32.name:
            kept.add(type(part.operation))
        else:
            removed.add(part.path)
    return kept, removed


class _Cloning:
    """The clones of the layers and operations of one model. Shared ones are cloned once."""

    def __init__(
        self, model: keras.Model, parts: list[Part], plan: Plan | None, removed: set[str]
    ) -> None:
        self._model = model
        self._paths = {id(part.operation): part.path for part in parts}
        self._plan = plan
        self._removed = removed
        self._clones: dict[int, keras.Operation] = {}
        self._references = References()
        self._rebuilder = Rebuilder(plan is None, self._references, self._clone_of)
        self._has_failed = False

    def path_of(self, original: keras.Operation) -> str:
        """Returns the path of a part of the original; empty for the model."""
        return self._paths.get(id(original), "")

    def clone_of_model(self) -> keras.Model:
        """Returns the clone of the model."""
        with self._references.scope():
            return self._clone_of(self._model)

    def _clone_of(self, original: keras.Operation) -> Any:
        """Returns the clone of a layer, operation or model, which is created at the first call."""
        if id(original) not in self._clones:
            try:
                clone = self._rebuilder.rebuilt(original, self._policy_of(original))
                if id(original) not in self._rebuilder.connected:
                    self.set_policies(self.pairs(original, clone))
            except Exception as error:
                if self._has_failed:  # a layer inside, which the error names
                    raise
                self._has_failed = True
                raise ValueError(_clone_error_message(original, error)) from error
            self._clones[id(original)] = clone
        return self._clones[id(original)]

    def pairs(self, original: Any, clone: Any) -> Iterator[Pair]:
        """Yields an original and its clone, then those of its sublayers.

        Parents come first, shared ones once. Sublayers that are not connected in a graph are
        matched by order: layers copy the ones that they get, as `Bidirectional` does, or create
        their own, whose names may differ.
        """
        seen: set[int] = set()

        def walk(before: Any, after: Any) -> Iterator[Pair]:
            if id(before) in seen:
                return
            seen.add(id(before))
            yield before, after
            for child, copy in self._children(before, after):
                yield from walk(child, copy)

        yield from walk(original, clone)

    def _children(self, before: Any, after: Any) -> Iterable[Pair]:
        """Returns the direct sublayers of an original and its clone."""
        if not isinstance(before, keras.Layer):
            return []
        # `to_float32` replaces it by the layer that it wraps.
        if isinstance(before, layers.Float32) and not isinstance(after, layers.Float32):
            return [(before.layer, after)]
        children = children_of(before)
        if id(before) not in self._rebuilder.connected:
            return zip(children, children_of(after), strict=False)  # `build` may create some later
        # A layer that is not called has no clone, and two layers may have one clone.
        called = [child for child in children if id(child) in self._clones]
        return [(child, self._clones[id(child)]) for child in called]

    def set_policies(self, pairs: Iterable[Pair]) -> None:
        """Sets the plan's policies on clones, which may have created sublayers themselves.

        A policy of 16 bits is set only on what the user removed from the plan: others have that
        policy, or their class chose another one.
        """
        for before, after in pairs:
            if not has_float_dtype(after):
                continue
            policy = self._policy_of(before)
            path = self.path_of(before)
            is_set = policy == FLOAT32.name or path in self._removed
            # A sublayer with weights is removed with the layer around it.
            if not is_set and not self._removed.isdisjoint(path_and_parents(path)):
                is_set = bool(before.weights)
            if is_set and after.compute_dtype != policy.removeprefix("mixed_"):
                after.dtype_policy = policy

    def _policy_of(self, original: keras.Operation) -> str:
        is_always_float32 = isinstance(original, layers.Float32 | layers.Softmax)
        if self._plan is None or is_always_float32:
            return FLOAT32.name
        return self._plan.policy_of(self.path_of(original))


def _clone_error_message(operation: keras.Operation, error: Exception) -> str:
    text, _, _ = str(error).partition("\nExample:")  # drops Keras' code example
    *_, text = text.rpartition("Exception encountered:")  # drops the config that Keras quotes first
    text = re.sub(r"\x1b\[\d*m", "", text)  # drops the codes for bold text in Keras' messages
    reason = " ".join(text.split()) or type(error).__name__
    return (
        f"{type(operation).__name__} {operation.name!r} cannot be rebuilt from its config:"
        f" {reason.rstrip('.')}. It needs a `get_config` that returns the arguments of its"
        " `__init__`."
    )
