"""Building a model anew by a plan: each part with the dtype policy that the plan has for it."""

from typing import Any

import keras

from kmp import layers
from kmp.backend import global_policy, is_keras_class, keras_internals
from kmp.conversion.model_cloning import Config, clone_model
from kmp.conversion.model_parts import parts_of
from kmp.conversion.precision_plan import Plan
from kmp.layers import Float32Operation
from kmp.utils import FLOAT32, HALF

_STOCK = {layers.Softmax: keras.layers.Softmax, layers.BatchNormalization: keras.layers.BatchNormalization}
# Settings that hold no state: a lambda, or an object that nobody registered, stays the one it is.
_STATELESS = ("activation", "initializer", "regularizer", "constraint")
_OURS = {keras.layers.BatchNormalization: layers.BatchNormalization}


def apply_plan(model: keras.Model, plan: Plan) -> keras.Model:
    """Returns a new model with the same weights, its parts as the plan says, its BatchNormalization kmp's."""
    path_of = {id(part.operation): part.path for part in parts_of(model)}

    def renew(old: keras.Operation, config: Config) -> keras.Operation:
        path = path_of.get(id(old), "")
        policy = plan.policy_of(path)
        if isinstance(old, keras.layers.InputLayer):
            with global_policy(FLOAT32.name):
                return type(old).from_config(config)
        if isinstance(old, keras.Layer):
            ours = type(old) if policy in HALF else _OURS.get(type(old), type(old))  # kmp's has float32 statistics
            new = _made(old, config, ours, policy)
            _tell_inside(old, new, path, plan)
            return new
        new = type(old).from_config(config)
        return Float32Operation(new, name=old.name) if policy == FLOAT32.name else new

    made = clone_model(model, renew, plan.policy)
    _tell_inside(model, made, "", plan)  # what layers made when they were built
    return made


def convert_to_float32(model: keras.Model) -> keras.Model:
    """Returns a new model with the same weights, all in float32, and made of Keras' own layers where kmp's stood."""

    def renew(old: keras.Operation, config: Config) -> keras.Operation:
        inside = "layer" if isinstance(old, layers.Float32) else "operation"
        if isinstance(old, layers.Float32 | Float32Operation) and isinstance(getattr(old, inside), keras.Operation):
            config[inside]["config"]["name"] = old.name
            return keras.saving.deserialize_keras_object(config[inside])
        if isinstance(old, layers.Float32):
            return keras.layers.Lambda(old.layer, name=old.name, trainable=old.trainable, dtype=FLOAT32.name)
        if isinstance(old, keras.Layer) and not isinstance(old, keras.layers.InputLayer):
            return _made(old, config, _STOCK.get(type(old), type(old)), FLOAT32.name)
        return type(old).from_config(config)

    made = clone_model(model, renew, FLOAT32.name)
    for part in parts_of(made):
        if part.is_layer and part.operation.compute_dtype != FLOAT32.name:
            part.operation.dtype_policy = FLOAT32.name
    return made


def _made(old: keras.Layer, config: Config, kind: type[keras.Layer], policy: str) -> keras.Layer:
    if "dtype" in config and keras.backend.is_float_dtype(old.compute_dtype):
        config["dtype"] = policy
    if isinstance(old, keras.layers.Lambda):
        return kind(**config | _functions_of(old))
    if isinstance(old, layers.Float32) and not isinstance(old.layer, keras.Layer):
        return kind(**config | {"layer": old.layer})
    config |= {name: getattr(old, name) for name in config if name.endswith(_STATELESS) and _is_function(old, name)}
    with global_policy(policy):
        return kind.from_config(config)


def _is_function(layer: keras.Layer, name: str) -> bool:
    found = getattr(layer, name, None)
    return callable(found) and not isinstance(found, keras.Layer)


def _functions_of(old: keras.layers.Lambda) -> dict[str, Any]:
    return {
        "function": old.function,
        "output_shape": keras_internals.lambda_output_shape(old),
        "mask": old.mask,
        "arguments": old.arguments,
    }


def _tell_inside(old: keras.Layer, new: keras.Layer, path: str, plan: Plan) -> None:
    """Sets what a layer made itself and the plan wants in float32. It comes in the old order; its names may differ."""
    if is_keras_class(type(old)) and not isinstance(old, keras.Model):
        return
    for part, made in zip(parts_of(old), parts_of(new), strict=False):  # some are made only when it is built
        wanted = plan.policy_of(f"{path}/{part.path}" if path else part.path)
        if made.is_layer and wanted == FLOAT32.name and made.operation.compute_dtype != FLOAT32.name:
            made.operation.dtype_policy = FLOAT32.name
