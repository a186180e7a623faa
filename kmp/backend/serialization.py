"""How kmp's classes are named in saved files."""

from typing import TypeVar

import keras

Class = TypeVar("Class", bound=type)


def register(cls: Class) -> Class:
    """Registers a class with Keras as `kmp>Name`, and as `import kmp>Name`, its name in older files."""
    keras.saving.get_custom_objects()[f"import kmp>{cls.__name__}"] = cls
    return keras.saving.register_keras_serializable(package="kmp")(cls)
