"""What is switched on: the settings of each call of `enable`, and TensorFlow's graph rewrite."""

import itertools
import threading

import keras

from kmp.scaling.settings import LossScaleSettings

POLICIES = ("mixed_float16", "mixed_bfloat16", "float32", "float16")
FLOAT16_POLICIES = ("mixed_float16", "float16")

_numbers = itertools.count(1)


class ActiveSettings:
    """The arguments of one call of `enable`."""

    def __init__(self, policy: str, settings: LossScaleSettings, jit_compile: bool | str) -> None:
        self.policy = policy
        self.settings = settings
        self.jit_compile = jit_compile
        self.dtype_policy = keras.DTypePolicy(policy)
        self.state_name = f"dtype_policy_since_kmp_enable_{next(_numbers)}"
        self.thread = threading.current_thread()


active: list[ActiveSettings] = []  # in the order of the calls
lock = threading.RLock()  # of changes of `active` and of the patches
# The dtype of the graph rewrite while it is on, with the option's value before.
rewrite_dtypes: dict[str, bool] = {}


def current_settings() -> ActiveSettings | None:
    """Returns the settings of the thread's own last call of `enable`.

    If it made none, returns those of the last call in another thread; `None` if there is none.
    """
    own = [settings for settings in active if settings.thread is threading.current_thread()]
    return next(reversed(own or active), None)


def is_float16_enabled() -> bool:
    """Whether the current policy computes in float16."""
    settings = current_settings()
    return settings is not None and settings.policy in FLOAT16_POLICIES
