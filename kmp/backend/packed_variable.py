"""A variable of several scalars. Keras' and TensorFlow's own classes save a variable as a whole only.

One variable is read and written by one operation, several by one each.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf


class PackedElement(tf.__internal__.tracking.Trackable):
    """One scalar of a packed variable. As an attribute of a trackable object, a checkpoint saves it by its name there.

    Args:
        variable: Variable of shape `(elements,)`.
        index: The index of the scalar.
    """

    def __init__(self, variable: keras.Variable, index: int) -> None:
        self._variable, self._index = variable, index

    @property
    def value(self) -> tf.Tensor:
        """The scalar, a tensor."""
        return self._variable.value[self._index]

    def assign(self, value: Any) -> None:
        """Writes the scalar. Not for a compiled step, which should write the whole variable at once."""
        self._variable.assign(tf.tensor_scatter_nd_update(self._variable.value, [[self._index]], [value]))

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {"VARIABLE_VALUE": self.value}

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> None:
        self.assign(restored_tensors["VARIABLE_VALUE"])


class PackedVariable:
    """A variable of several named scalars. Not trackable itself: a checkpoint has the elements, by their names.

    Args:
        variable: Variable of shape `(elements,)`.
        names: The name of each element.
    """

    def __init__(self, variable: keras.Variable, names: Sequence[str]) -> None:
        self.variable = variable
        self.names = tuple(names)
        self.elements = {name: PackedElement(variable, index) for index, name in enumerate(names)}

    def read(self) -> dict[str, Any]:
        """Copies the elements to the host."""
        return dict(zip(self.names, self.variable.numpy().tolist(), strict=True))
