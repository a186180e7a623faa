"""The changes of a program that several causes share."""

import math
from collections.abc import Iterable

from kmp.diagnosis import soundness, thresholds
from kmp.diagnosis.edits import (
    NOT_TRIED,
    Change,
    ComputeInFloat32,
    Edits,
    PrepareData,
    SetArguments,
)
from kmp.diagnosis.model_names import name_of
from kmp.diagnosis.observations import Observations
from kmp.records import Replay
from kmp.utils.float_formats import BFLOAT16, DTYPES_16_BIT, FLOAT16, FLOAT32, FloatFormat

IN_FLOAT32 = SetArguments("kmp.enable", {"policy": "'float32'"})


def power(exponent: float) -> str:
    """Returns the Python source of a power of two."""
    return f"2.0**{math.floor(exponent)}"


def in_float32(run: Observations, layers: Iterable[str]) -> Edits:
    """Returns the edits after which layers, by path, or the model compute in float32."""
    created = dict.fromkeys(map(run.model.created_layer, layers))
    classes = run.model.layers
    if run.model.name in created.keys() - classes.keys():
        return (IN_FLOAT32,)
    return tuple(ComputeInFloat32(name_of(path), classes.get(path, "")) for path in created)


def replayed(run: Observations, replay: Replay, result: str) -> Change:
    """Returns the change with which a replayed batch was sound; float32 for all without one.

    Args:
        run: What was observed.
        replay: The replay.
        result: What was sound with it, such as `"the gradients for the batch are finite"`.
    """
    if replay.float32_layers:
        edits = in_float32(run, replay.float32_layers)
        return Change(edits, f"with these layers in float32 {result}")
    if replay.search is not None and replay.search.is_sound_in_bfloat16 is True:
        edits = (SetArguments("kmp.enable", {"policy": "'mixed_bfloat16'"}),)
        tried = f"in bfloat16, which has float32's range, {result}; GPUs before the A100 are slow"
        return Change(edits, f"{tried} in it")
    usable = replay.gradients.usable_scale or 0.0
    needs_scale = run.format is FLOAT16 and soundness.needs_another_scale_only(replay)
    if needs_scale and usable > replay.loss_scale:  # a smaller one is for the causes of overflows
        edits = (larger_scale(run, math.log2(usable)),)
        return Change(edits, f"at this loss scale {result}")
    found_none = f"a search found no small set of layers with which {result}"
    return Change((IN_FLOAT32,), f"{NOT_TRIED}; {found_none}")


def normalized(array: str) -> PrepareData:
    """Returns the statement that brings each feature of an array to mean 0 and deviation 1."""
    mean, deviation = f"{array}.mean(axis=0)", f"{array}.std(axis=0)"
    return PrepareData(f"{array} = ({array} - {mean}) / ({deviation} + 1e-6)")


def mixed_policy(dtype: str) -> SetArguments:
    """Returns the change of a policy that keeps weights in 16 bits."""
    # "bfloat16" is no policy of `kmp.enable`.
    call = "kmp.enable" if dtype == FLOAT16.name else "keras.config.set_dtype_policy"
    return SetArguments(call, {"policy": f"'mixed_{dtype}'"})


def states_in_float32(run: Observations, paths: Iterable[str]) -> Edits:
    """Returns the edits after which variables in 16 bits that a step assigns are in float32."""
    policy = run.settings.policy
    if policy in DTYPES_16_BIT:
        return (mixed_policy(policy),)
    arguments = {"dtype": "'float32'"}
    found = {}
    for path in paths:
        layer = run.model.layer_of(path)
        if layer in run.model.layers:
            found[layer] = SetArguments(run.model.layers[layer], arguments, name_of(layer))
        else:  # of the model itself
            found[path] = SetArguments("self.add_weight", arguments, name_of(path))
    return tuple(found.values())


def convert_weights(number_format: FloatFormat) -> str:
    """Returns the statement that converts a model with weights in 16 bits, as one of a file."""
    return f"model = kmp.convert(kmp.to_float32(model), 'mixed_{number_format.name}')"


def weights_in_float32(
    run: Observations, variables: Iterable[str], number_format: FloatFormat
) -> Edits:
    """Returns the edits after which 16-bit variables are float32: all, or those of a layer."""
    settings, name, paths = run.settings, number_format.name, list(variables)
    is_of_model = not paths or (settings.policy or name) == name

    # The layers keep the policy with which they were created, in another program maybe.
    has_several_layers = len(set(map(run.model.layer_of, paths))) > 1
    is_of_layers = has_several_layers and settings.variable_dtypes == [name]
    is_of_all = is_of_model or (is_of_layers and not settings.own_dtype_variables)
    if settings.policy_in_force == f"mixed_{name}" and is_of_all:
        return (PrepareData(convert_weights(number_format)),)
    if is_of_model:
        return (mixed_policy(name),)

    # Code or single layers choose the dtype for themselves.
    own = [path for path in paths if path in settings.own_dtype_variables]
    others = [path for path in paths if path not in settings.own_dtype_variables]
    arguments = {"dtype": "'float32'"}
    edits = [SetArguments("self.add_weight", arguments, name_of(path)) for path in own]
    for layer in dict.fromkeys(map(run.model.layer_of, others)):
        class_name = run.model.layers.get(layer, "")
        # What an embedding returns are its weights, and 8 bits would round these again.
        is_rounded_again = class_name == "Embedding" and number_format is BFLOAT16
        dtype = FLOAT32.name if is_rounded_again else f"mixed_{name}"
        call = f"keras.layers.{class_name}"
        edits.append(SetArguments(call, {"dtype": repr(dtype)}, name_of(layer)))
    return tuple(edits)


def larger_scale(run: Observations, exponent: float) -> SetArguments:
    """Returns the change to a dynamic scale that starts with a power of two."""
    arguments = {"initial_scale": power(exponent)}
    highest = run.settings.max_scale
    if run.is_fixed:
        arguments = {"loss_scale": "'dynamic'", **arguments}
    elif highest is not None and highest < 2.0**exponent:
        arguments["max_scale"] = power(FLOAT32.max_exponent)
    return SetArguments(run.settings.settings_call, arguments)


def apply_unscaled(optimizer: str) -> Edits:
    """Returns the change of a call of `apply` that gets gradients without the loss scale."""
    return (SetArguments(f"{optimizer}.apply", {"unscaled": "True"}),)


def optimizer_call(run: Observations) -> str:
    """Returns the class of the inner optimizer as source, Keras' Adam if its name is none."""
    optimizer = run.settings.optimizer
    if not optimizer.isidentifier():  # a log may hold anything
        return "keras.optimizers.Adam"
    return f"keras.optimizers.{optimizer}" if run.settings.is_keras_optimizer else optimizer


def smaller_learning_rate(run: Observations) -> SetArguments:
    """Returns a rate smaller by the measured ratio of update to weights, at most a tenth."""
    updates = run.updates
    rate, ratio, factor = updates.learning_rate, updates.ratio, 0.1
    if updates.are_unmeasured:
        ratio = updates.estimate
    elif rate == (run.settings.learning_rate or None):
        # Later ones are of weights that have diverged, and may be larger by any factor.
        ratio = updates.first_large_ratio or ratio
    if ratio > 0 and math.isfinite(ratio):
        factor = min(factor, thresholds.TYPICAL_UPDATE / ratio)
    value = f"{factor:.1g} * learning_rate" if rate is None else f"{rate * factor:.1g}"
    return SetArguments(optimizer_call(run), {"learning_rate": value})
