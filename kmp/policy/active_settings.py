"""What `enable` has set: the innermost call's policy and loss-scale arguments."""

import keras

from kmp.scaling import LossScaleSettings

FLOAT16_POLICIES = ("mixed_float16", "float16")


class ActiveSettings:
    """What one call of `enable` sets.

    Args:
        policy: The name of the global dtype policy.
        settings: The loss-scale arguments that `compile` and `wrap` use.
        jit_compile: Whether the optimizers that they make compile their own step.
    """

    def __init__(self, policy: str, settings: LossScaleSettings, jit_compile: bool = False) -> None:
        self.policy = policy
        self.settings = settings
        self.jit_compile = jit_compile
        self.previous_policy = keras.config.dtype_policy()


active: list[ActiveSettings] = []  # the last one is in force


def is_float16_enabled() -> bool:
    """Whether the policy in force computes in float16."""
    return bool(active) and active[-1].policy in FLOAT16_POLICIES
