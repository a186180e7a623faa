"""Clones a model from its config: a function creates each layer and operation, then the weights are copied."""

import contextlib
import random
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
from keras import ops

from kmp import layers
from kmp.backend import functions_by_reference, instance_attribute, rnn_states, with_named_lambda
from kmp.conversion.model_parts import parts_of

Config = dict[str, Any]
LayerPair = tuple[keras.Layer, keras.Layer]
CloneFunction = Callable[[keras.Operation, Config], keras.Operation]

_TAG = "kmp_rebuild"


def clone_model(model: keras.Model, clone_function: CloneFunction, policy: str) -> keras.Model:
    """Returns a new model with the same structure and weights. The given model is not changed.

    Serializes and deserializes the model as Keras does for files, except that `clone_function`, which also gets the
    original, creates each layer and operation. So no class has to be registered, and shared layers stay shared.
    Functions are those of the original. Everything else is deserialized in safe mode: a config that came from a file
    must not run code that `keras.models.load_model` has not run.

    Args:
        model: A built model.
        clone_function: Gets an original layer or operation and its config, and returns the clone.
        policy: The global dtype policy during cloning. Sublayers that a layer creates without a `dtype` use it.

    Raises:
        ValueError: If the model or one of its layers cannot be rebuilt from its config. The message names it.
    """
    factories = {
        f"{_TAG}_{index}": _CloneFactory(original, clone_function)
        for index, original in enumerate(_all_operations(model))
    }
    try:
        originals = {name: factory.original for name, factory in factories.items()}
        with _tagged_configs(originals), functions_by_reference() as functions:
            config = _with_factories(_serialize(model), factories)
        with global_policy(policy), model.distribute_strategy.scope(), _random_state_restored():
            clone = keras.saving.deserialize_keras_object(config, custom_objects=factories | functions, safe_mode=True)
    except _CloneError as error:
        raise ValueError(str(error)) from error.__cause__
    pairs = [(factory.original, factory.clone) for factory in factories.values() if factory.clone is not None]
    _copy_state(model, clone, pairs)
    return clone


@contextlib.contextmanager
def global_policy(policy: str) -> Iterator[None]:
    """Sets Keras' global dtype policy in the context."""
    previous = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(previous)


class _CloneFactory:
    """Passed to Keras in place of a class: creates the clone of one layer or operation, only once."""

    def __init__(self, original: keras.Operation, clone_function: CloneFunction) -> None:
        self.original = original
        self.clone: keras.Operation | None = None
        self._clone_function = clone_function

    def from_config(self, config: Config) -> keras.Operation:
        """Returns the clone."""
        if self.clone is None:
            try:
                self.clone = self._clone_function(self.original, config)
            except _CloneError:
                raise
            except Exception as error:
                raise _CloneError(_clone_error_message(self.original, error)) from error
        return self.clone


class _CloneError(ValueError):
    """Names the layer that cannot be rebuilt. Its parents re-raise it unchanged."""


def _clone_error_message(operation: keras.Operation, error: Exception) -> str:
    text, _, _ = str(error).partition("\nExample:")  # drops Keras' code example
    *_, text = text.rpartition("Exception encountered:")  # drops the config that Keras quotes first
    text = re.sub(r"\x1b\[\d*m", "", text)  # drops the codes for bold text in Keras' messages
    reason = " ".join(text.split()) or type(error).__name__
    return (
        f"{type(operation).__name__} {operation.name!r} cannot be rebuilt from its config: {reason.rstrip('.')}. "
        "It needs a `get_config` that returns the arguments of its `__init__`."
    )


def _all_operations(model: keras.Model) -> list[keras.Operation]:
    return [model, *(part.operation for part in parts_of(model))]


@contextlib.contextmanager
def _random_state_restored() -> Iterator[None]:
    """Restores the generator that Keras draws seeds from: the initial values of a clone are overwritten."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


def _serialize(model: keras.Model) -> Config:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about objects that a file cannot store; no file is written here
        return keras.saving.serialize_keras_object(model)


@contextlib.contextmanager
def _tagged_configs(operations: dict[str, keras.Operation]) -> Iterator[None]:
    """Adds a tag with the given name to the config of each operation, also where a wrapper's config includes it."""
    with contextlib.ExitStack() as stack:
        for name, operation in operations.items():
            stack.enter_context(instance_attribute(operation, "get_config", _tagged_get_config(operation, name)))
            if isinstance(operation, keras.Model):  # clones are not compiled
                stack.enter_context(instance_attribute(operation, "get_compile_config", dict))
        yield


def _tagged_get_config(operation: keras.Operation, name: str) -> Callable[[], Config]:
    instance_get_config = vars(operation).get("get_config")

    def get_config() -> Config:
        # Keras checks whether `get_config` is overridden, so the original must be visible during the call.
        with instance_attribute(operation, "get_config", instance_get_config):
            return tagged_config()

    def tagged_config() -> Config:
        try:
            # Functions are copied directly: a lambda loses its closure and globals in a config.
            config = keras.Layer.get_config(operation) if _wraps_function(operation) else operation.get_config()
            return config | {_TAG: name}
        except _CloneError:
            raise
        except Exception as error:
            raise _CloneError(_clone_error_message(operation, error)) from error

    return get_config


def _wraps_function(operation: keras.Operation) -> bool:
    is_float32_function = isinstance(operation, layers.Float32) and not isinstance(operation.layer, keras.Layer)
    return is_float32_function or isinstance(operation, keras.layers.Lambda)


def _with_factories(config: Any, factories: Mapping[str, _CloneFactory]) -> Any:
    """Returns a config in which the class of each tagged layer or operation is replaced by its factory."""
    if isinstance(config, list | tuple):
        return type(config)(_pop_tag(_with_factories(item, factories))[0] for item in config)
    if not isinstance(config, dict):
        return config
    config = with_named_lambda(config)
    pairs = {key: _pop_tag(_with_factories(value, factories)) for key, value in config.items()}
    result = {key: value for key, (value, _) in pairs.items()}
    _, name = pairs.get("config", (None, None))
    if isinstance(name, str) and name in factories and "class_name" in config:
        result |= {"module": None, "class_name": name, "registered_name": name}
        if not isinstance(factories[name].original, keras.Model):
            result.pop("build_config", None)  # layers are built when they are called
    return result


def _pop_tag(config: Any) -> tuple[Any, str | None]:
    return config, config.pop(_TAG, None) if isinstance(config, dict) else None


def _copy_state(original: keras.Model, clone: keras.Model, pairs: list[LayerPair]) -> None:
    """Copies what the config does not contain: `trainable` of each layer and variable, weights, and other state."""
    pairs = _with_created_sublayers(pairs)
    for before, after in pairs:
        if before.trainable != after.trainable:
            after.trainable = before.trainable
    if [variable.shape for variable in original.variables] != [variable.shape for variable in clone.variables]:
        raise ValueError(
            f"{type(original).__name__} {original.name!r} rebuilt from its config has different variables: its "
            "`get_config`, or that of one of its layers, does not return all arguments of its `__init__`."
        )
    for before, after in pairs:
        _copy_other_state(before, after)
    # Last: `save_own_variables` may return weights with LoRA's merged into them, and these must be overwritten.
    for source, target in zip(original.variables, clone.variables, strict=True):
        target.assign(source)
        if target.trainable != source.trainable:
            target.trainable = source.trainable


def _with_created_sublayers(layer_pairs: list[LayerPair]) -> list[LayerPair]:
    """Adds the pairs of sublayers that layers create themselves, whose names may differ; parents come first."""
    pairs = {id(original): (original, clone) for original, clone in layer_pairs if isinstance(original, keras.Layer)}
    for original, clone in list(pairs.values()):
        inside = [[part.operation for part in parts_of(parent)] for parent in (original, clone)]
        if len(inside[0]) == len(inside[1]):
            pairs |= {
                id(before): (before, after)
                for before, after in zip(*inside, strict=True)
                if isinstance(before, keras.Layer) and id(before) not in pairs
            }
    return list(pairs.values())


def _copy_other_state(original: keras.Layer, clone: keras.Layer) -> None:
    """Copies the state that is not in `variables`: RNN states, and assets such as a vocabulary."""
    for source, target in zip(rnn_states(original), rnn_states(clone), strict=True):
        target.assign(source)
    if type(original).load_own_variables is not keras.Layer.load_own_variables:
        store: dict[str, Any] = {}
        original.save_own_variables(store)
        clone.load_own_variables({key: ops.convert_to_numpy(value) for key, value in store.items()})
    if hasattr(original, "load_assets"):
        with tempfile.TemporaryDirectory() as folder:
            original.save_assets(folder)
            clone.load_assets(folder)
