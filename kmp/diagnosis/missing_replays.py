"""Why batches of a run were not replayed, and what would show what a replay does."""

from typing import NamedTuple

from kmp.diagnosis.observations import Observations
from kmp.utils.float_formats import FLOAT32

FLOAT32_TRAINING = "a training in float32 to compare with"
_REPLAYS = (
    "kmp.callbacks.defaults() replays such a batch, and names the first layer that is not finite"
)
_GUARD = "kmp.guard(optimizer, model) around the training step, in a `tf.function`"


class MissingReplays(NamedTuple):
    """Why a run has no replays.

    Attributes:
        reason: Why, in a few words; empty if they are not known to have been asked for.
        remedy: What would show as much.
    """

    reason: str
    remedy: str


def missing_replays(run: Observations) -> MissingReplays:
    """Returns why a run has no replays."""
    error = run.records.last("replay_error")
    if error:
        return MissingReplays(f"none could be replayed: {error}", FLOAT32_TRAINING)
    replicas = run.settings.replicas
    if replicas > 1:
        return MissingReplays(f"{replicas} replicas", "a run on one replica")
    if run.settings.replay:
        if run.settings.in_fit:
            return MissingReplays("none was captured", FLOAT32_TRAINING)
        reason = "none was captured: kmp sees the training step of a loop only in a `tf.function`"
        return MissingReplays(reason, f"{_GUARD}; or {FLOAT32_TRAINING}")
    asked = "replay=True in kmp.callbacks.defaults()"
    in_loop = f"in a custom training loop {_GUARD}"
    return MissingReplays("", f"{asked}, and {in_loop}; or {FLOAT32_TRAINING}")


def how_to_find_layer(run: Observations) -> str:
    """Returns how to find the layer in which a NaN or Inf begins that no replay explains."""
    missing = missing_replays(run)
    if not run.passes.all and not missing.reason:
        return _REPLAYS
    if run.format is FLOAT32:
        return (
            "tf.debugging.enable_check_numerics(), called before the training, raises at the first"
            " operation that returns NaN or Inf"
        )
    in_float32 = f"train in float32, to know whether {run.format.name} is the cause"
    if run.passes.all:
        return f"no replay shows where: {in_float32}"
    if missing.remedy == FLOAT32_TRAINING:
        return f"no replay shows where, because {missing.reason}: {in_float32}"
    remedy = missing.remedy.partition("; or ")[0]
    return (
        f"no replay shows where ({missing.reason}); {remedy} names the first layer that is not"
        " finite"
    )
