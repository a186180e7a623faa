"""Layers that compute in float32 in a pass, whatever their policy is."""

import contextlib
from collections.abc import Iterator, Sequence

import keras

from kmp.backend.keras_internals import layers_in_16_bits
from kmp.backend.thread_overrides import dtype_policies_replaced, variable_dtype_replaced
from kmp.backend.undo import Undos
from kmp.utils.float_formats import DTYPES_16_BIT, FLOAT32


@contextlib.contextmanager
def computing_in_float32(layers: Sequence[keras.Layer]) -> Iterator[dict[int, keras.DTypePolicy]]:
    """Makes layers and their sublayers compute in float32.

    Yields the policies that are replaced, by the `id` of the layer.
    """
    found = layers_in_16_bits(layers)
    own_policies = {id(layer): layer.dtype_policy for layer in found}
    policies = [(layer, _in_float32(layer)) for layer in found]
    with (
        dtype_policies_replaced(policies),
        _states_in_float32(layers),
    ):
        yield own_policies


def _in_float32(layer: keras.Layer) -> keras.DTypePolicy:
    """Returns the policy of a layer, with float32 to compute in.

    A layer reads other things from its policy too, such as how its weights are quantized. The
    variables keep their dtype: Keras casts them if the two differ.
    """
    policy = layer.dtype_policy
    # 16 bits if any variable has them: code of the user's may create one in that dtype.
    dtypes = (each.dtype for each in layer.variables if each.dtype in DTYPES_16_BIT)
    dtype_of_variables = next(dtypes, layer.variable_dtype)

    class ComputeInFloat32(type(policy)):  # type: ignore[misc]
        @property
        def compute_dtype(self) -> str:
            return FLOAT32.name

        @property
        def variable_dtype(self) -> str:
            return str(dtype_of_variables)

    result: keras.DTypePolicy = object.__new__(ComputeInFloat32)
    vars(result).update(vars(policy))
    return result


@contextlib.contextmanager
def _states_in_float32(layers: Sequence[keras.Layer]) -> Iterator[None]:
    """Does not round what a pass assigns to states in 16 bits, of layers in float32 too.

    A training step may assign the weights of a frozen layer, such as those of a target network.
    """
    states = {id(state): state for layer in layers for state in layer.non_trainable_variables}
    with Undos() as undos, undos:
        for state in states.values():
            if state.dtype in DTYPES_16_BIT:
                undos.enter(variable_dtype_replaced(state, FLOAT32.name))
        yield
