"""Layers and operations that compute in another dtype in a pass, whatever their policy is."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from kmp.backend import keras_internals
from kmp.backend.keras_internals import layers_in_16_bits
from kmp.backend.thread_overrides import (
    dtype_policies_replaced,
    own_method,
    variable_dtype_replaced,
)
from kmp.backend.undo import Undos
from kmp.utils.float_formats import DTYPES_16_BIT, FLOAT32


@contextlib.contextmanager
def computing_in(
    dtype: str, operations: Sequence[keras.Operation]
) -> Iterator[dict[int, keras.DTypePolicy]]:
    """Makes layers in 16 bits, with their sublayers, and operations of a graph compute in a dtype.

    Yields the policies that are replaced, by the `id` of the layer.
    """
    layers = [each for each in operations if isinstance(each, keras.Layer)]
    others = [each for each in operations if not isinstance(each, keras.Layer)]
    found = layers_in_16_bits(layers)
    own_policies = {id(layer): layer.dtype_policy for layer in found}
    policies = [(layer, _policy_in(dtype, layer)) for layer in found]
    with dtype_policies_replaced(policies), Undos() as undos, undos.first_attempt():
        if dtype == FLOAT32.name:
            undos.enter(_states_in_float32(layers))
            undos.enter(_arguments_in_float32(others))
        yield own_policies


def _policy_in(dtype: str, layer: keras.Layer) -> keras.DTypePolicy:
    """Returns the policy of a layer, with another dtype to compute in.

    A layer reads other things from its policy too, such as how its weights are quantized. The
    variables keep their dtype: Keras casts them if the two differ.
    """
    policy = layer.dtype_policy
    # 16 bits if any variable has them: code of the user's may create one in that dtype.
    dtypes = (each.dtype for each in layer.variables if each.dtype in DTYPES_16_BIT)
    dtype_of_variables = next(dtypes, layer.variable_dtype)

    class ComputesInAnother(type(policy)):  # type: ignore[misc]
        @property
        def compute_dtype(self) -> str:
            return dtype

        @property
        def variable_dtype(self) -> str:
            return str(dtype_of_variables)

    result: keras.DTypePolicy = object.__new__(ComputesInAnother)
    vars(result).update(vars(policy))
    return result


@contextlib.contextmanager
def _states_in_float32(layers: Sequence[keras.Layer]) -> Iterator[None]:
    """Does not round what a pass assigns to states in 16 bits, of layers in float32 too.

    A training step may assign the weights of a frozen layer, such as those of a target network.
    """
    states = {id(state): state for layer in layers for state in layer.non_trainable_variables}
    with Undos() as undos, undos.first_attempt():
        for state in states.values():
            if state.dtype in DTYPES_16_BIT:
                undos.enter(variable_dtype_replaced(state, FLOAT32.name))
        yield


@contextlib.contextmanager
def _arguments_in_float32(operations: Sequence[keras.Operation]) -> Iterator[None]:
    """Casts the arguments of operations, which compute in the dtype of these."""
    with Undos() as undos, undos.first_attempt():
        for operation in operations:
            undos.enter(own_method(operation, "call", _with_float32_arguments))
        yield


def _with_float32_arguments(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def float32_call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = keras_internals.in_float32((args, kwargs))
        return call(*args, **kwargs)

    return float32_call
