"""The dtype policy of layers that were created while kmp is enabled, which their files have too.

With it, a loaded layer computes with the same code of kmp, without `enable`. Keras without kmp
loads such a file as well: it looks a policy up by the name of the class (Keras 3.15,
`dtype_policies.deserialize`), and finds its own.
"""

from typing import Any

import keras

from kmp.backend.patching import patches


class _MarkedName(str):
    """The name of a policy that was read from a file.

    Keras 3.15 creates a layer from its config with the name of its policy, and not with the policy.
    """


@keras.saving.register_keras_serializable("kmp")
class DTypePolicy(keras.DTypePolicy):
    """A `keras.DTypePolicy` of a layer that was created while kmp is enabled.

    It is equal to that of Keras with the same name.
    """

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "DTypePolicy":
        """Returns the policy of a layer in a file, and patches the constructor of that layer."""
        policy = cls(_MarkedName(cls(**config).name))
        patches.use(policy)
        return policy

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, keras.DTypePolicy):
            return False
        return type(other) in _CLASSES and self.name == str(other.name)

    def __hash__(self) -> int:
        return hash(self.name)


_CLASSES = (DTypePolicy, keras.DTypePolicy, keras.dtype_policies.FloatDTypePolicy)


def is_marked(layer: keras.Layer) -> bool:
    """Whether a layer has a policy of this module, or is created with the name of one."""
    policy = layer.dtype_policy
    return isinstance(policy, DTypePolicy) or isinstance(policy.name, _MarkedName)


def mark(layer: keras.Layer) -> None:
    """Replaces the policy of a layer by that of this module.

    A `DTypePolicyMap` and the policy of a quantized layer have classes of their own, and stay.
    """
    if type(layer.dtype_policy) in _CLASSES:
        layer.dtype_policy = DTypePolicy(str(layer.dtype_policy.name))


def renamed(policy: keras.DTypePolicy, name: str) -> keras.DTypePolicy:
    """Returns the policy of another name, of this module if the given one is."""
    return DTypePolicy(name) if isinstance(policy, DTypePolicy) else keras.DTypePolicy(name)
