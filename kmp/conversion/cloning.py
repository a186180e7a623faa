"""Clones a model with the dtype policies of a plan, or in float32, and copies its weights."""

import inspect
import random
import re
import tempfile
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import keras
from keras import ops

from kmp import layers
from kmp.backend import (
    defining_class,
    functional_outputs,
    global_policy,
    is_keras_class,
    keras_internals,
    rnn_states,
    sublayers,
    unconnected_copy,
)
from kmp.conversion.model_parts import (
    Config,
    Part,
    children_of,
    config_of,
    is_graph,
    refused_arguments,
)
from kmp.conversion.plan import Plan
from kmp.layers import Float32Operation
from kmp.utils import DTYPES_16_BIT, FLOAT32, path_and_parents

Operations = dict[str, keras.Operation]
Pair = tuple[Any, Any]  # an original and its clone

_KERAS_CLASSES = {
    layers.Softmax: keras.layers.Softmax,
    layers.BatchNormalization: keras.layers.BatchNormalization,
}
_KMP_CLASSES = {keras.layers.BatchNormalization: layers.BatchNormalization}
_WITHOUT_DESERIALIZATION = (
    keras.Operation,
    keras.Layer,
    keras.Model,
)  # their `from_config` passes on all values
_GRAPH_KEYS = ("layers", "input_layers", "output_layers")


def clone_model(
    model: keras.Model, parts: list[Part], plan: Plan | None
) -> tuple[keras.Model, Operations]:
    """Returns a new model with the same structure and weights. The given model is not changed.

    Functional and Sequential models are connected again, call by call. Every other layer is created
    from its `get_config`, in which its sublayers are replaced by their clones, and functions by
    those of the original. So no class has to be registered, shared layers stay shared, and a lambda
    keeps its closure. Everything else in a config is deserialized in safe mode: it must not run
    code that `keras.models.load_model` has not run.

    `keras.models.clone_model` does not suffice: it compiles the clone from a config, which needs
    registered functions, and it cannot clone subclassed models, custom constructors, and the layers
    in wrappers.

    Args:
        model: A built model.
        parts: Its parts.
        plan: The dtype policies; `None` for float32, with Keras' own layers in place of kmp's.

    Returns:
        The clone, and the layers and operations in it by the path of the original.
    """
    # Layers that need float32 by their class. The user may have removed some of them from the plan.
    kept: set[type] = set()
    removed: set[str] = set()
    for part in parts:
        if not (plan and part.is_layer):
            continue
        if layers.reason_for_float32(part.operation, plan.compute_dtype):
            if plan.policy_of(part.path) == FLOAT32.name:
                kept.add(type(part.operation))
            else:
                removed.add(part.path)
    cloning = _Cloning(model, parts, plan, removed)
    policy = global_policy(plan.policy if plan else FLOAT32.name)
    random_state = (
        random.getstate()
    )  # Keras draws seeds from it, but the initial values are overwritten
    try:
        # Code of custom classes may call the layers that it creates at once: their policies cannot
        # be set later.
        with layers.only_in_float32(kept), policy, model.distribute_strategy.scope():
            clone = cloning.clone_of(model)
    finally:
        random.setstate(random_state)
    pairs = list(cloning.pairs(model, clone))
    cloning.set_policies(pairs)  # of sublayers that are created in `build`
    set_normalization = layers.fuse_normalization if plan else layers.unfuse_normalization
    for layer in sublayers(clone):
        set_normalization(layer)
    _copy_state(model, clone, pairs)
    return clone, {
        cloning.path_of(original): copy for original, copy in pairs if original is not model
    }


class _Cloning:
    """The clones of the layers and operations of one model. Shared ones are cloned once."""

    def __init__(
        self, model: keras.Model, parts: list[Part], plan: Plan | None, removed: set[str]
    ) -> None:
        self._paths = {id(model): ""} | {id(part.operation): part.path for part in parts}
        self._plan = plan
        self._removed = removed
        self._clones: dict[int, keras.Operation] = {}
        self._connected: set[int] = (
            set()
        )  # the models whose layers were connected again, call by call
        self._has_failed = False

    def path_of(self, original: keras.Operation) -> str:
        """Returns the path of a part of the original; empty for the model."""
        return self._paths.get(id(original), "")

    def clone_of(self, original: keras.Operation) -> Any:
        """Returns the clone of a layer, operation or model, which is created at the first call."""
        if id(original) not in self._clones:
            try:
                self._clones[id(original)] = self._create(original)
            except Exception as error:
                if self._has_failed:  # a layer inside, which the error names
                    raise
                self._has_failed = True
                raise ValueError(_clone_error_message(original, error)) from error
        return self._clones[id(original)]

    def _create(self, original: Any) -> keras.Operation:
        policy = self._policy_of(self.path_of(original))
        if not isinstance(original, keras.Layer):
            is_kmps = isinstance(original, Float32Operation)
            clone = unconnected_copy(
                original.operation if is_kmps and self._plan is None else original
            )
            clone.name = original.name
            is_kept = self._plan is not None and policy == FLOAT32.name and not is_kmps
            return Float32Operation(clone, name=original.name) if is_kept else clone

        if isinstance(original, keras.layers.InputLayer):
            config = original.get_config()
            if (
                self._plan is None and original.dtype in DTYPES_16_BIT
            ):  # Keras creates that of a Sequential in 16 bits
                config["dtype"] = FLOAT32.name
            with global_policy(FLOAT32.name):
                return type(original).from_config(config)

        arguments = _arguments_of_graph(original)
        if arguments is None:
            clone = self._create_from_config(original, policy)
            self.set_policies(self.pairs(original, clone))
            return clone
        self._connected.add(id(original))
        if isinstance(original, keras.Sequential):  # which may have a layer twice
            inputs = [
                child
                for child in children_of(original)
                if isinstance(child, keras.layers.InputLayer)
            ]
            return type(original)(
                [self.clone_of(layer) for layer in (*inputs, *original.layers)], name=original.name
            )
        inputs = keras.tree.map_structure(
            lambda tensor: self.clone_of(keras_internals.producer_of(tensor)).output, original.input
        )
        outputs = functional_outputs(original, inputs, self.clone_of)
        return type(original)(inputs=inputs, outputs=outputs, name=original.name, **arguments)

    def _create_from_config(self, original: Any, policy: str) -> keras.Layer:
        if isinstance(original, layers.Float32 | layers.Softmax):
            policy = FLOAT32.name
        dtype = {"dtype": policy} if _has_float_dtype(original) else {}
        new_class: Any = type(original)
        if isinstance(original, layers.Float32):
            wraps_layer = isinstance(original.layer, keras.Layer)
            if wraps_layer and self._plan is None:
                clone = self.clone_of(original.layer)
                clone.name = original.name
                return clone
            # its config needs the source of a lambda, which an interactive session does not have
            if not wraps_layer:
                config = keras.Layer.get_config(original) | dtype
                calls = [call.arguments for call in keras_internals.calls_of(original)]
                has_one_argument = all(
                    len(each.args) + len(each.kwargs.keys() - {"training"}) == 1 for each in calls
                )
                if self._plan is None and has_one_argument:
                    return keras.layers.Lambda(original.layer, **config)
                return new_class(layer=original.layer, **config)
        if self._plan is None:
            new_class = _KERAS_CLASSES.get(new_class, new_class)
        elif policy not in DTYPES_16_BIT:  # "float16" and "bfloat16" keep all weights in 16 bits
            new_class = _KMP_CLASSES.get(new_class, new_class)
        config = dict(config_of(original))
        if "dtype" in config:
            config |= dtype
        if isinstance(
            original, keras.layers.TFSMLayer
        ):  # safe mode refuses its config, even that of a layer in use
            return new_class(**config)
        refused = refused_arguments(original)
        config, references = self._with_references(original, config)
        with global_policy(policy), keras.saving.custom_object_scope(references):
            clone = new_class.from_config(
                {key: value for key, value in config.items() if key not in refused}
            )
        if "name" in refused:
            clone.name = original.name
        if isinstance(original, keras.Model) and not clone.built and original.get_build_config():
            clone.build_from_config(original.get_build_config())
            clone.built = (
                True  # as Keras does: `build_from_config` does not, if the model has no `build`
            )
        return clone

    def pairs(self, original: Any, clone: Any) -> Iterator[Pair]:
        """Yields an original and its clone, then those of its sublayers: parents first, shared ones once.

        Sublayers that are not connected in a graph are matched by order: layers copy the ones that
        they get, as `Bidirectional` does, or create their own, whose names may differ.
        """
        seen: set[int] = set()

        def walk(before: Any, after: Any) -> Iterator[Pair]:
            if id(before) in seen:
                return
            seen.add(id(before))
            yield before, after
            if isinstance(before, layers.Float32) and not isinstance(after, layers.Float32):
                yield from walk(
                    before.layer, after
                )  # `to_float32` replaced it by the layer that it wraps
            elif isinstance(before, keras.Layer):
                children, copies = (
                    children_of(before),
                    children_of(after),
                )  # `build` may create some later
                if (
                    id(before) in self._connected
                ):  # others are not called; and two may have one clone
                    children = [child for child in children if id(child) in self._clones]
                    copies = [self._clones[id(child)] for child in children]
                for child, copy in zip(children, copies, strict=False):
                    yield from walk(child, copy)

        yield from walk(original, clone)

    def set_policies(self, pairs: Iterable[Pair]) -> None:
        """Sets the plan's policies on clones, which may have created sublayers themselves.

        A policy of 16 bits is set only on what the user removed from the plan: others have it, or
        their class chose another one.
        """
        for before, after in pairs:
            path = self.path_of(before)
            policy = self._policy_of(path)
            is_inside = not self._removed.isdisjoint(path_and_parents(path))
            is_planned = (
                policy == FLOAT32.name
                or path in self._removed
                or (is_inside and bool(before.weights))
            )
            if (
                is_planned
                and _has_float_dtype(after)
                and after.compute_dtype != policy.removeprefix("mixed_")
            ):
                after.dtype_policy = policy

    def _policy_of(self, path: str) -> str:
        return self._plan.policy_of(path) if self._plan else FLOAT32.name

    def _with_references(
        self, original: keras.Layer, config: Config
    ) -> tuple[Config, dict[str, SimpleNamespace]]:
        """Returns a config that refers to clones of sublayers and to functions of the original, and the references.

        Settings such as initializers, which may be unregistered too, are those of the original like
        functions.
        """
        waiting = children_of(original)
        references: dict[str, SimpleNamespace] = {}
        has_own_from_config = (
            defining_class(type(original), "from_config") not in _WITHOUT_DESERIALIZATION
        )

        def refer_to(value: Any) -> Config:
            name = f"kmp_reference_{len(references)}"
            references[name] = SimpleNamespace(
                from_config=lambda config: value
            )  # all that Keras calls
            return {"module": None, "class_name": name, "config": {}, "registered_name": name}

        def with_sublayers(value: Any) -> Any:
            if isinstance(value, keras.Operation):
                return self.clone_of(value)
            if isinstance(value, list | tuple):
                return type(value)([with_sublayers(item) for item in value])
            if not isinstance(value, dict):
                return value
            settings = value.get("config")
            if isinstance(settings, dict) and "class_name" in value:
                described = [
                    child
                    for child in waiting
                    if (type(child).__name__, child.name)
                    == (value["class_name"], settings.get("name", child.name))
                ]
                if (
                    described
                ):  # in order, if several have one name; the same again, if a config has it twice
                    if len(described) > 1:
                        waiting.remove(described[0])
                    connections = {
                        key: value[key] for key in ("name", "inbound_nodes") if key in value
                    }
                    return connections | refer_to(self.clone_of(described[0]))
            return {key: with_sublayers(item) for key, item in value.items()}

        result = {}
        for key, value in config.items():
            held = value
            if isinstance(value, str | dict):
                held = getattr(original, key, getattr(original, f"_{key}", None))
            # A function, or an object without state that is called like one, such as an
            # initializer.
            has_state = inspect.ismethod(held) or isinstance(
                held, keras.Layer | keras.Metric | type
            )
            if (
                callable(held) and not has_state
            ):  # a class with its own `from_config` deserializes it there
                result[key] = refer_to(held) if has_own_from_config else held
            else:
                result[key] = with_sublayers(value)
        return result, references


def _has_float_dtype(operation: keras.Operation) -> bool:
    """Whether it is a layer that computes in floats, unlike a look-up of strings or integers."""
    return isinstance(operation, keras.Layer) and keras.backend.is_float_dtype(
        operation.compute_dtype
    )


def _arguments_of_graph(model: keras.Operation) -> Config | None:
    """Returns the arguments of a model that Keras rebuilds from the calls of its layers, besides inputs and outputs.

    `None` for a model that the code of its class builds.
    """
    if type(model) is keras.Sequential:
        return {}
    if not is_graph(model) or not is_keras_class(defining_class(type(model), "from_config")):
        return None
    if is_keras_class(type(model)):
        return {}
    config = config_of(model)
    if not all(key in config for key in _GRAPH_KEYS):
        return None
    return {
        key: value
        for key, value in config.items()
        if key not in (*_GRAPH_KEYS, "name", "trainable")
    }


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


def _copy_state(original: keras.Model, clone: keras.Model, pairs: list[Pair]) -> None:
    """Copies what the config does not contain: `trainable` of each layer and variable, weights, and other state."""
    layer_pairs = [pair for pair in pairs if isinstance(pair[0], keras.Layer)]
    for before, after in layer_pairs:
        if before.trainable != after.trainable:
            after.trainable = before.trainable
    if [variable.shape for variable in original.variables] != [
        variable.shape for variable in clone.variables
    ]:
        raise ValueError(
            f"{type(original).__name__} {original.name!r} rebuilt from its config has different"
            " variables: its `get_config`, or that of one of its layers, does not return all"
            " arguments of its `__init__`."
        )
    for before, after in layer_pairs:
        for source, target in zip(rnn_states(before), rnn_states(after), strict=True):
            target.assign(source)
        if type(before).load_own_variables is not keras.Layer.load_own_variables:
            store: Config = {}
            before.save_own_variables(store)
            after.load_own_variables(
                {key: ops.convert_to_numpy(value) for key, value in store.items()}
            )
        if hasattr(before, "load_assets"):
            with tempfile.TemporaryDirectory() as folder:
                before.save_assets(folder)
                after.load_assets(folder)
    # Last: `save_own_variables` may return weights with LoRA's merged into them, and these must be
    # overwritten.
    for source, target in zip(original.variables, clone.variables, strict=True):
        target.assign(source)
        if target.trainable != source.trainable:
            target.trainable = source.trainable
