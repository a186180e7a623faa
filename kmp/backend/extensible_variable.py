"""A variable to which another version of kmp may have added elements."""

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf


class ExtensibleVariable(keras.Variable):
    """A vector that loads state with fewer elements; those that it lacks are 0.

    A new version adds elements at the end.
    """

    def extended(self, value: Any) -> tf.Tensor:
        """Returns saved elements with zeros for those that were not saved.

        Raises:
            ValueError: If more elements were saved.
        """
        saved, own = value.shape[0], self.shape[0]
        if saved > own:
            raise ValueError(
                f"The optimizer's {self.name!r} has {saved} elements in the file, but this version"
                f" of kmp knows {own} of them: the file was saved by a newer version."
            )
        return tf.pad(value, [[0, own - saved]])

    def _restore_from_tensors(self, restored_tensors: Mapping[str, tf.Tensor]) -> Any:
        # TensorFlow documents this method as the one to override for checkpoints.
        extended = {name: self.extended(value) for name, value in restored_tensors.items()}
        return super()._restore_from_tensors(extended)
