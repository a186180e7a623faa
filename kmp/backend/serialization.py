"""Registration of kmp's classes with Keras, for saving and loading."""

from typing import TypeVar

import keras

Class = TypeVar("Class", bound=type)


def register(cls: Class) -> Class:
    """Registers a class with Keras as `kmp>Name`, and as `import kmp>Name`, the name in older files."""
    keras.saving.get_custom_objects()[f"import kmp>{cls.__name__}"] = cls
    return keras.saving.register_keras_serializable(package="kmp")(cls)
