"""The dtype policy and the loss-scale settings of each active call of `enable`."""

import itertools
import threading

import keras

from kmp.scaling import LossScaleSettings

FLOAT16_POLICIES = ("mixed_float16", "float16")

_numbers = itertools.count(1)


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
        self.dtype_policy = keras.DTypePolicy(policy)
        self.state_name = f"dtype_policy_since_kmp_enable_{next(_numbers)}"
        self.thread = threading.current_thread()


active: list[ActiveSettings] = []  # in the order of the calls
lock = threading.RLock()  # of changes of `active` and of the patches


def current_settings() -> ActiveSettings | None:
    """Returns the settings that apply to this thread; `None` if kmp is not enabled.

    Those of the thread's own last call or, without any, those of the last call in another thread.
    """
    own = [settings for settings in active if settings.thread is threading.current_thread()]
    return next(reversed(own or active), None)


def is_float16_enabled() -> bool:
    """Whether the current policy computes in float16."""
    settings = current_settings()
    return settings is not None and settings.policy in FLOAT16_POLICIES
