"""Copies what the config of a model does not contain from the model to its clone.

That is `trainable` of each layer and variable, the weights, and other state.
"""

import tempfile
from typing import Any

import keras
from keras import ops

from kmp.backend.keras_internals import rnn_states, tensorflow_variables
from kmp.utils import user_messages

Pair = tuple[Any, Any]  # an original and its clone


def copy_state(original: keras.Model, clone: keras.Model, pairs: list[Pair]) -> None:
    """Copies the state of a model to its clone.

    Args:
        original: The model.
        clone: Its clone.
        pairs: The layers and operations of both, parents before children.

    Raises:
        ValueError: If their variables differ.
    """
    layer_pairs = [(before, after) for before, after in pairs if isinstance(before, keras.Layer)]
    for before, after in layer_pairs:
        if before.trainable != after.trainable:
            after.trainable = before.trainable
    shapes = [variable.shape for variable in original.variables]
    if shapes != [variable.shape for variable in clone.variables]:
        raise ValueError(
            f"{type(original).__name__} {original.name!r} rebuilt from its config has different"
            " variables: its `get_config`, or that of one of its layers, does not return all"
            " arguments of its `__init__`."
        )
    for before, after in layer_pairs:
        _copy_other_state(before, after)
    # Last: `save_own_variables` may return weights with LoRA's merged into them, and these must be
    # overwritten.
    for source, target in zip(original.variables, clone.variables, strict=True):
        target.assign(source)
        if target.trainable != source.trainable:
            target.trainable = source.trainable


def _copy_other_state(before: keras.Layer, after: keras.Layer) -> None:
    """Copies the state of a layer that is not in its variables, or that it saves in its own way."""
    for source, target in zip(rnn_states(before), rnn_states(after), strict=True):
        target.assign(source)
    # Variables that are TensorFlow's, which Keras does not know.
    sources, targets = tensorflow_variables(before), tensorflow_variables(after)
    if [source.shape for source in sources] == [target.shape for target in targets]:
        for source, target in zip(sources, targets, strict=True):
            target.assign(source)
    else:
        user_messages.warn(
            f"The variables of TensorFlow in {type(before).__name__} {before.name!r} are not copied"
            " to the new model: the layer that its `get_config` returns has others."
        )
    # What the methods of a custom layer save.
    if type(before).load_own_variables is not keras.Layer.load_own_variables:
        store: dict[str, Any] = {}
        before.save_own_variables(store)
        values = {key: ops.convert_to_numpy(value) for key, value in store.items()}
        after.load_own_variables(values)
    if hasattr(before, "load_assets"):
        with tempfile.TemporaryDirectory() as folder:
            before.save_assets(folder)
            after.load_assets(folder)
