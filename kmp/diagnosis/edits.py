"""The edits of a program that several causes share."""

import math
from collections.abc import Iterable

from kmp.diagnosis import soundness, thresholds
from kmp.diagnosis.cause import ComputeInFloat32, Edits, PrepareData, SetArguments
from kmp.diagnosis.run_metrics import RunMetrics, name_of
from kmp.records import Replay
from kmp.utils.float_formats import DTYPES_16_BIT, FLOAT16, FLOAT32

NONE: Edits = ()
IN_FLOAT32 = SetArguments("kmp.enable", {"policy": "'float32'"})


def apply_unscaled(optimizer: str) -> Edits:
    """Returns the change of a call of `apply` that gets gradients without the loss scale."""
    return (SetArguments(f"{optimizer}.apply", {"unscaled": "True"}),)


def power(exponent: float) -> str:
    """Returns the Python source of a power of two."""
    return f"2.0**{math.floor(exponent)}"


def in_float32(run: RunMetrics, layers: Iterable[str]) -> Edits:
    """Returns the edits after which layers, by path, or the model compute in float32."""
    created = dict.fromkeys(map(run.created_layer, layers))
    if run.settings.model in created.keys() - run.layers.keys():
        return (IN_FLOAT32,)
    return tuple(ComputeInFloat32(name_of(path), run.layers.get(path, "")) for path in created)


def normalized(array: str) -> PrepareData:
    """Returns the statement that brings each feature of an array to mean 0 and deviation 1."""
    mean, deviation = f"{array}.mean(axis=0)", f"{array}.std(axis=0)"
    return PrepareData(f"{array} = ({array} - {mean}) / ({deviation} + 1e-6)")


def mixed_policy(dtype: str) -> SetArguments:
    """Returns the change of a policy that keeps weights in 16 bits."""
    # "bfloat16" is no policy of `kmp.enable`.
    call = "kmp.enable" if dtype == FLOAT16.name else "keras.config.set_dtype_policy"
    return SetArguments(call, {"policy": f"'mixed_{dtype}'"})


def states_in_float32(run: RunMetrics, paths: Iterable[str]) -> Edits:
    """Returns the edits after which variables in 16 bits that a step assigns are in float32."""
    policy = run.settings.policy
    if policy in DTYPES_16_BIT:
        return (mixed_policy(policy),)
    arguments = {"dtype": "'float32'"}
    found = {}
    for path in paths:
        layer = run.layer_of(path)
        if layer in run.layers:
            found[layer] = SetArguments(run.layers[layer], arguments, name_of(layer))
        else:  # of the model itself
            found[path] = SetArguments("self.add_weight", arguments, name_of(path))
    return tuple(found.values())


def larger_scale(run: RunMetrics, exponent: float) -> SetArguments:
    """Returns the change to a dynamic scale that starts with a power of two."""
    arguments = {"initial_scale": power(exponent)}
    if run.is_fixed:
        arguments = {"loss_scale": "'dynamic'", **arguments}
    elif (run.settings.max_scale or math.inf) < 2.0**exponent:
        arguments["max_scale"] = power(FLOAT32.max_exponent)
    return SetArguments(run.settings_call, arguments)


def needs_only_a_larger_scale(run: RunMetrics, replay: Replay) -> bool:
    """Whether a replayed batch is sound at a larger loss scale, without a change of layers.

    A smaller one is the matter of the causes of overflows.
    """
    if run.format is not FLOAT16:  # which alone needs one
        return False
    usable = replay.gradients.usable_scale or 0.0
    return soundness.needs_another_scale_only(replay) and usable > replay.loss_scale


def is_sound_in_bfloat16(replay: Replay) -> bool:
    """Whether a replayed batch that no few layers in float32 make sound is so in bfloat16."""
    return replay.search is not None and replay.search.is_sound_in_bfloat16 is True


def replayed(run: RunMetrics, replay: Replay) -> Edits:
    """Returns the change with which a replayed batch was sound; float32 for all without one."""
    if replay.float32_layers:
        return in_float32(run, replay.float32_layers)
    if is_sound_in_bfloat16(replay):
        return (SetArguments("kmp.enable", {"policy": "'mixed_bfloat16'"}),)
    if needs_only_a_larger_scale(run, replay):
        usable = replay.gradients.usable_scale
        assert usable is not None
        return (larger_scale(run, math.log2(usable)),)
    return (IN_FLOAT32,)


def optimizer_call(run: RunMetrics) -> str:
    """Returns the class of the inner optimizer as source, Keras' Adam if its name is none."""
    optimizer = run.settings.optimizer
    if not optimizer.isidentifier():  # a log may hold anything
        return "keras.optimizers.Adam"
    is_of_keras = run.settings.is_keras_optimizer
    return f"keras.optimizers.{optimizer}" if is_of_keras else optimizer


def learning_rate(run: RunMetrics) -> float | None:
    """Returns the highest learning rate known, of the first epoch and the ends of all."""
    _, recorded = run.run.metrics.get("learning_rate", ((), ()))
    rates = [*recorded, (run.settings.learning_rate or 0.0)]
    return max(filter(math.isfinite, rates), default=0.0) or None


def smaller_learning_rate(run: RunMetrics) -> SetArguments:
    """Returns a rate smaller by the measured ratio of update to weights, at most a tenth."""
    ratio, factor = _update_ratio(run), 0.1
    if ratio > 0 and math.isfinite(ratio):
        factor = min(factor, thresholds.TYPICAL_UPDATE / ratio)
    rate = learning_rate(run)
    value = f"{factor:.1g} * learning_rate" if rate is None else f"{rate * factor:.1g}"
    return SetArguments(optimizer_call(run), {"learning_rate": value})


def _update_ratio(run: RunMetrics) -> float:
    """Returns the ratio of update to weights that a smaller rate has to reduce."""
    if run.has_no_update:
        return run.estimated_update
    is_highest_at_first = learning_rate(run) == run.settings.learning_rate
    early = _first_large_update(run) if is_highest_at_first else None
    return run.update_ratio[1] if early is None else early


def _first_large_update(run: RunMetrics) -> float | None:
    """Returns the first ratio that is too large, if the weights have not grown before.

    Later ones are of weights that have diverged, and may be larger by any factor.
    """
    weighed = [sample for sample in run.samples if sample.weight_norm > 0]
    for sample in weighed:
        if sample.weight_norm > 2 * weighed[0].weight_norm:
            return None
        if sample.update_ratio > thresholds.LARGE_UPDATE:
            return sample.update_ratio
    return None
