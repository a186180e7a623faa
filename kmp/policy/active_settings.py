"""The dtype policy and the loss-scale settings of each active call of `enable`."""

import keras

from kmp.scaling import LossScaleSettings

FLOAT16_POLICIES = ("mixed_float16", "float16")


class ActiveSettings:
    """The settings of one call of `enable`.

    Args:
        policy: Name of the global dtype policy.
        settings: Loss-scale arguments for the optimizers that `compile` and `wrap` create.
        jit_compile: Whether these optimizers compile their update step with XLA.
    """

    def __init__(self, policy: str, settings: LossScaleSettings, jit_compile: bool = False) -> None:
        self.policy = policy
        self.settings = settings
        self.jit_compile = jit_compile
        self.previous_policy = keras.config.dtype_policy()


active: list[ActiveSettings] = []  # the last call applies


def is_float16_enabled() -> bool:
    """Whether the active policy computes in float16."""
    return bool(active) and active[-1].policy in FLOAT16_POLICIES
