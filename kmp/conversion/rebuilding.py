"""Rebuilds a layer, operation or model, with another dtype policy.

Functional and Sequential models are connected again, call by call. Every other layer is created
from its `get_config`, in which its sublayers are replaced by their clones, and functions by those
of the original. Everything else in a config is deserialized in safe mode: it must not run code that
`keras.models.load_model` has not run.
"""

from collections.abc import Callable
from typing import Any

import keras

from kmp import layers
from kmp.backend import keras_internals
from kmp.backend.keras_internals import (
    defining_class,
    functional_outputs,
    global_policy,
    is_keras_class,
    unconnected_copy,
)
from kmp.conversion.config_references import References, referring_config
from kmp.conversion.model_parts import (
    Config,
    children_of,
    config_of,
    has_float_dtype,
    is_graph,
    refused_arguments,
)
from kmp.layers.float32 import Float32Operation
from kmp.utils.float_formats import DTYPES_16_BIT, FLOAT32

_KERAS_CLASSES = {
    layers.Softmax: keras.layers.Softmax,
    layers.BatchNormalization: keras.layers.BatchNormalization,
}
_KMP_CLASSES = {keras.layers.BatchNormalization: layers.BatchNormalization}
_GRAPH_KEYS = ("layers", "input_layers", "output_layers")


class Rebuilder:
    """Rebuilds the layers, operations and models of one model.

    Args:
        is_to_float32: Whether all is float32, with Keras' own layers in place of kmp's.
        references: The objects to which configs may refer.
        clone_of: Returns the clone of a layer, operation or model, which is created at the first
            call.

    Attributes:
        connected: The ids of the models whose clones have the clones of their layers, connected
            call by call. The code of every other class may create sublayers.
    """

    def __init__(
        self,
        is_to_float32: bool,
        references: References,
        clone_of: Callable[[keras.Operation], Any],
    ) -> None:
        self._is_to_float32 = is_to_float32
        self._references = references
        self._clone_of = clone_of
        self.connected: set[int] = set()

    def rebuilt(self, original: Any, policy: str) -> Any:
        """Returns a layer, operation or model like the original, with a dtype policy."""
        if not isinstance(original, keras.Layer):
            return self._operation(original, policy)
        if isinstance(original, keras.layers.InputLayer):
            return self._input(original)
        if type(original) is keras.Sequential:
            return self._sequential(original)
        arguments = _arguments_of_graph(original)
        if arguments is not None:
            return self._functional(original, arguments)
        if isinstance(original, layers.Float32):
            return self._float32(original, policy)
        return self._from_config(original, policy)

    def _operation(self, original: Any, policy: str) -> keras.Operation:
        """Copies an operation; wraps it in kmp's operation if it is to compute in float32."""
        is_of_kmp = isinstance(original, Float32Operation)
        is_unwrapped = is_of_kmp and self._is_to_float32
        clone = unconnected_copy(original.operation if is_unwrapped else original)
        clone.name = original.name
        if is_of_kmp or self._is_to_float32 or policy != FLOAT32.name:
            return clone
        return Float32Operation(clone, name=original.name)

    def _input(self, original: keras.layers.InputLayer) -> keras.Layer:
        config = original.get_config()
        # Keras creates the input layer of a Sequential in 16 bits.
        if self._is_to_float32 and original.dtype in DTYPES_16_BIT:
            config["dtype"] = FLOAT32.name
        with global_policy(FLOAT32.name):
            return type(original).from_config(config)

    def _sequential(self, original: keras.Sequential) -> keras.Model:
        self.connected.add(id(original))
        children = children_of(original)
        inputs = [child for child in children if isinstance(child, keras.layers.InputLayer)]
        # `layers` may have a layer twice.
        clones = [self._clone_of(layer) for layer in (*inputs, *original.layers)]
        return keras.Sequential(clones, name=original.name)

    def _functional(self, original: keras.Model, arguments: Config) -> keras.Model:
        self.connected.add(id(original))

        def clone_of_input(tensor: keras.KerasTensor) -> keras.KerasTensor:
            return self._clone_of(keras_internals.producer_of(tensor)).output

        inputs = keras.tree.map_structure(clone_of_input, original.input)
        outputs = functional_outputs(original, inputs, self._clone_of)
        return type(original)(inputs=inputs, outputs=outputs, name=original.name, **arguments)

    def _float32(self, original: layers.Float32, policy: str) -> keras.Layer:
        """Rebuilds kmp's wrapper of a layer or function, or returns Keras' layer in its place."""
        inner = original.layer
        if isinstance(inner, keras.Layer):
            if not self._is_to_float32:
                return self._from_config(original, policy)
            clone = self._clone_of(inner)
            clone.name = original.name
            return clone
        # Without the function: `get_config` needs the source of a lambda, which an interactive
        # session does not have.
        config = keras.Layer.get_config(original) | {"dtype": policy}
        arguments = [call.arguments for call in keras_internals.calls_of(original)]
        counts = {len(each.args) + len(each.kwargs.keys() - {"training"}) for each in arguments}
        # A `Lambda` takes one argument.
        if self._is_to_float32 and counts <= {1}:
            return keras.layers.Lambda(inner, **config)
        return type(original)(layer=inner, **config)

    def _from_config(self, original: keras.Layer, policy: str) -> keras.Layer:
        """Creates a layer from its config, under the policy that its code may ask for."""
        config = dict(config_of(original))
        if "dtype" in config and has_float_dtype(original):
            config["dtype"] = policy
        # Safe mode refuses the config of such a layer, even of one in use.
        if isinstance(original, keras.layers.TFSMLayer):
            return type(original)(**config)
        config = referring_config(original, config, self._references, self._clone_of)
        refused = refused_arguments(original)
        for name in refused:
            config.pop(name, None)
        cls: Any = type(original)
        if self._is_to_float32:
            cls = _KERAS_CLASSES.get(cls, cls)
        # "float16" and "bfloat16" keep all weights in 16 bits, which kmp's layer does not.
        elif policy not in DTYPES_16_BIT:
            cls = _KMP_CLASSES.get(cls, cls)
        with global_policy(policy):
            clone = cls.from_config(config)
        if "name" in refused:
            clone.name = original.name
        if isinstance(original, keras.Model) and not clone.built and original.get_build_config():
            clone.build_from_config(original.get_build_config())
            # Keras sets this too: `build_from_config` does not, if the model has no `build`.
            clone.built = True
        return clone


def _arguments_of_graph(model: keras.Layer) -> Config | None:
    """Returns the arguments of a functional model besides its inputs and outputs.

    Returns `None` for a model that the code of its class builds.
    """
    if not is_graph(model) or not is_keras_class(defining_class(type(model), "from_config")):
        return None
    if is_keras_class(type(model)):
        return {}
    config = config_of(model)
    if not all(key in config for key in _GRAPH_KEYS):
        return None
    known = {*_GRAPH_KEYS, "name", "trainable"}
    return {key: value for key, value in config.items() if key not in known}
