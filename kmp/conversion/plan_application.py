"""Rebuilds a model with the dtype policies of a plan, or in float32."""

from typing import Any

import keras

from kmp import layers
from kmp.backend import is_keras_class, keras_internals
from kmp.conversion.constructor_arguments import from_config
from kmp.conversion.model_cloning import Config, clone_model, global_policy
from kmp.conversion.model_parts import Part, parts_of
from kmp.conversion.precision_plan import Plan
from kmp.layers import Float32Operation
from kmp.utils import DTYPES_16_BIT, FLOAT32

_KERAS_CLASSES = {layers.Softmax: keras.layers.Softmax, layers.BatchNormalization: keras.layers.BatchNormalization}
_KMP_CLASSES = {keras.layers.BatchNormalization: layers.BatchNormalization}
# Suffixes of settings without state. Their functions are shared: a lambda or an unregistered object does not survive
# serialization.
_STATELESS = ("activation", "initializer", "regularizer", "constraint")


def apply_plan(model: keras.Model, plan: Plan) -> keras.Model:
    """Returns a new model with the same weights and the plan's dtype policies.

    Replaces `keras.layers.BatchNormalization` by kmp's, except where the policy keeps weights in 16 bits.
    """
    parts = parts_of(model)
    paths = {id(part.operation): part.path for part in parts}
    listed = _listed_in_float32(parts, plan)

    def clone_function(original: keras.Operation, config: Config) -> keras.Operation:
        path = paths.get(id(original), "")
        policy = plan.policy_of(path)
        if isinstance(original, keras.layers.InputLayer):
            with global_policy(FLOAT32.name):
                return type(original).from_config(config)
        if isinstance(original, keras.Layer):
            # kmp's BatchNormalization has float32 statistics; "float16" and "bfloat16" keep all weights in 16 bits.
            new_class = type(original) if policy in DTYPES_16_BIT else _KMP_CLASSES.get(type(original), type(original))
            # The code of a class may call the sublayers that it creates at once: their policies cannot be set later.
            operations = [original, *(part.operation for part in parts_of(original))]
            with layers.only_in_float32({type(found) for found in operations if id(found) in listed}):
                clone = _clone_layer(original, config, new_class, policy)
            _set_sublayer_policies(original, clone, path, plan)
            return clone
        clone = type(original).from_config(config)
        return Float32Operation(clone, name=original.name) if policy == FLOAT32.name else clone

    with layers.only_in_float32({type(part.operation) for part in parts if id(part.operation) in listed}):
        converted = clone_model(model, clone_function, plan.policy)
    _set_sublayer_policies(model, converted, "", plan)  # for sublayers created in `build`
    _set_edited_policies(parts, converted, plan)
    return converted


def _set_edited_policies(parts: list[Part], converted: keras.Model, plan: Plan) -> None:
    """Sets the plan's policy on listed layers that were removed from the plan.

    Those created in `build` are float32 if the plan keeps another layer of their class in float32.
    """
    edited = {
        part.path
        for part in parts
        if plan.policy_of(part.path) != FLOAT32.name and layers.reason_for_float32(part.operation, plan.compute_dtype)
    }
    for before, after in zip(parts, parts_of(converted) if edited else (), strict=False):
        is_inside = bool(after.operation.weights) and any(before.path.startswith(f"{path}/") for path in edited)
        if before.path in edited or (is_inside and plan.policy_of(before.path) != FLOAT32.name):
            after.operation.dtype_policy = plan.policy


def _listed_in_float32(parts: list[Part], plan: Plan) -> set[int]:
    """Returns the `id`s of the listed layers that the plan keeps in float32."""
    return {
        id(part.operation)
        for part in parts
        if part.path in plan.float32 and layers.reason_for_float32(part.operation, plan.compute_dtype)
    }


def convert_to_float32(model: keras.Model) -> keras.Model:
    """Returns a new model with the same weights, all in float32, with Keras' own layers in place of kmp's."""

    def clone_function(original: keras.Operation, config: Config) -> keras.Operation:
        wrapped = "layer" if isinstance(original, layers.Float32) else "operation"
        is_wrapper = isinstance(original, layers.Float32 | Float32Operation)
        if is_wrapper and isinstance(getattr(original, wrapped), keras.Operation):
            config[wrapped]["config"]["name"] = original.name
            return keras.saving.deserialize_keras_object(config[wrapped])
        if isinstance(original, layers.Float32):
            return keras.layers.Lambda(
                original.layer, name=original.name, trainable=original.trainable, dtype=FLOAT32.name
            )
        if isinstance(original, keras.layers.InputLayer):  # Keras creates the input of a Sequential in 16 bits
            dtype = {"dtype": FLOAT32.name} if original.dtype in DTYPES_16_BIT else {}
            return type(original).from_config(config | dtype)
        if isinstance(original, keras.Layer):
            new_class = _KERAS_CLASSES.get(type(original), type(original))
            return _clone_layer(original, config, new_class, FLOAT32.name)
        return type(original).from_config(config)

    converted = clone_model(model, clone_function, FLOAT32.name)
    for part in parts_of(converted):
        if part.is_layer and part.operation.compute_dtype != FLOAT32.name:
            part.operation.dtype_policy = FLOAT32.name
    return converted


def _clone_layer(original: keras.Layer, config: Config, new_class: type[keras.Layer], policy: str) -> keras.Layer:
    if "dtype" in config and keras.backend.is_float_dtype(original.compute_dtype):
        config["dtype"] = policy
    if isinstance(original, keras.layers.Lambda):
        return new_class(**config | _lambda_arguments(original))
    if isinstance(original, keras.layers.TFSMLayer):  # safe mode refuses its config, even that of a layer in use
        return new_class(**config)
    if isinstance(original, layers.Float32) and not isinstance(original.layer, keras.Layer):
        return new_class(**config | {"layer": original.layer})
    config |= {
        name: getattr(original, name) for name in config if name.endswith(_STATELESS) and _is_function(original, name)
    }
    with global_policy(policy):
        return from_config(original, new_class, config)


def _is_function(layer: keras.Layer, name: str) -> bool:
    value = getattr(layer, name, None)
    return callable(value) and not isinstance(value, keras.Layer)


def _lambda_arguments(layer: keras.layers.Lambda) -> dict[str, Any]:
    return {
        "function": layer.function,
        "output_shape": keras_internals.lambda_output_shape(layer),
        "mask": layer.mask,
        "arguments": layer.arguments,
    }


def _set_sublayer_policies(original: keras.Layer, clone: keras.Layer, path: str, plan: Plan) -> None:
    """Sets float32 on the sublayers that a custom layer creates itself and the plan keeps in float32.

    Matches sublayers by order, because their names may differ.
    """
    if is_keras_class(type(original)) and not isinstance(original, keras.Model):
        return
    for before, after in zip(parts_of(original), parts_of(clone), strict=False):  # `build` creates some only later
        policy = plan.policy_of(f"{path}/{before.path}" if path else before.path)
        if after.is_layer and policy == FLOAT32.name and after.operation.compute_dtype != FLOAT32.name:
            after.operation.dtype_policy = FLOAT32.name
