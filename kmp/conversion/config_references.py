"""Configs that refer to objects that exist: clones of sublayers, and the functions of the original.

A class then needs no registration to be rebuilt, shared layers stay shared, and a lambda keeps its
closure.
"""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import keras

from kmp.backend.keras_internals import defining_class
from kmp.conversion.model_parts import Config, children_of

# The `from_config` of these passes all values to `__init__`, without deserialization.
_WITHOUT_DESERIALIZATION = (keras.Operation, keras.Layer, keras.Model)


class References:
    """Objects that a config refers to. Keras deserializes a reference to the object itself.

    In `scope`, Keras finds this under a name as if it were a class, and calls its `from_config`.
    """

    NAME = "kmp_reference"

    def __init__(self) -> None:
        self._objects: list[Any] = []

    def scope(self) -> AbstractContextManager[None]:
        """Returns a context, of this thread, in which Keras deserializes the references."""
        return keras.saving.custom_object_scope({self.NAME: self})

    def to(self, value: Any) -> Config:
        """Returns a reference to an object, in the form of a config."""
        self._objects.append(value)
        index = len(self._objects) - 1
        return {
            "module": None,
            "class_name": self.NAME,
            "config": {"index": index},
            "registered_name": self.NAME,
        }

    def from_config(self, config: Config) -> Any:
        """Returns the object that a reference refers to."""
        return self._objects[config["index"]]


def referring_config(
    layer: keras.Layer,
    config: Config,
    references: References,
    clone_of: Callable[[keras.Operation], Any],
) -> Config:
    """Returns the config of a layer with references in it.

    Functions, and objects without state that are called like functions, such as initializers, are
    those of the layer. A class with its own `from_config` deserializes references there; another
    one gets the objects.

    Args:
        layer: The layer.
        config: Its config.
        references: Gets the objects.
        clone_of: Returns the clone of a sublayer.
    """
    sublayers = _Sublayers(layer, references, clone_of)
    deserializes = defining_class(type(layer), "from_config") not in _WITHOUT_DESERIALIZATION
    result: Config = {}
    for key, value in config.items():
        held = value
        if isinstance(value, str | dict):
            held = getattr(layer, key, getattr(layer, f"_{key}", None))
        has_state = inspect.ismethod(held) or isinstance(held, keras.Layer | keras.Metric | type)
        if not callable(held) or has_state:
            result[key] = sublayers.replaced_in(value)
        else:
            result[key] = references.to(held) if deserializes else held
    return result


class _Sublayers:
    """The sublayers of a layer, whose configs in that of the layer are replaced by references."""

    def __init__(
        self,
        layer: keras.Layer,
        references: References,
        clone_of: Callable[[keras.Operation], Any],
    ) -> None:
        self._waiting = children_of(layer)
        self._references = references
        self._clone_of = clone_of

    def replaced_in(self, value: Any) -> Any:
        """Returns a value of a config in which sublayers and their configs are replaced."""
        if isinstance(value, keras.Operation):
            return self._clone_of(value)
        if isinstance(value, list | tuple):
            return type(value)([self.replaced_in(item) for item in value])
        if not isinstance(value, dict):
            return value
        described = self._described_by(value)
        if described is None:
            return {key: self.replaced_in(item) for key, item in value.items()}
        # A model connects the layers of its graph with these.
        connections = {key: value[key] for key in ("name", "inbound_nodes") if key in value}
        return connections | self._references.to(self._clone_of(described))

    def _described_by(self, config: Config) -> keras.Operation | None:
        """Returns the sublayer that a config describes; `None` if it describes none.

        If several have one name, they are taken in order. One that a config has twice is found
        twice.
        """
        settings = config.get("config")
        if "class_name" not in config or not isinstance(settings, dict):
            return None
        found = [
            child
            for child in self._waiting
            if type(child).__name__ == config["class_name"]
            and child.name == settings.get("name", child.name)
        ]
        if not found:
            return None
        if len(found) > 1:
            self._waiting.remove(found[0])
        return found[0]
