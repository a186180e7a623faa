"""The classes of layers that need float32 in place of a 16-bit dtype: which, why, and when.

`RULES` has those that fail in 16 bits for another reason than what they compute, such as what the
code of a class casts. Of the others, `kmp.numerics` says which need float32 whatever their inputs.
`kmp.enable` applies both when a layer is created, `kmp.convert` and `kmp.audit` apply them to a
model before they look at its graph. `tests/conversion/test_same_float32_layers.py` compares them.

`docs/hub.md` has the models that use the classes of keras-hub.
`tests/layers/test_every_keras_layer.py` tries all classes of Keras.
"""

import enum
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import keras
import numpy as np

from kmp.backend.keras_functions import function_of
from kmp.backend.keras_internals import direct_sublayers
from kmp.numerics import INFINITY, LONG_SUM, reason_for_all_data
from kmp.utils.float_formats import BFLOAT16, DTYPES_16_BIT, FLOAT16, FLOAT32, FORMATS_16_BIT

_KERAS = "Keras' source"
_HUB = "keras-hub's source"
_GUIDE = "Keras' guide to mixed precision"


class Moment(enum.Flag):
    """When kmp decides whether a layer computes in float32.

    Attributes:
        CREATION: At the end of its `__init__` under `kmp.enable`, before it has sublayers or calls.
        CONVERSION: In `kmp.convert` and `kmp.audit`, which have the built model.
    """

    CREATION = enum.auto()
    CONVERSION = enum.auto()


@dataclass(frozen=True)
class Float32Rule:
    """One row of the table.

    Args:
        classes: The classes, as `keras.Dot`: the first name of the module, and the name of the
            class; with the folder between them if a package has several of one name. Subclasses
            match too.
        condition: Takes a layer that matches and the policy of 16 bits; whether the rule applies.
        float16: Why float16 does not do, as shown to users; empty if it does.
        bfloat16: Why bfloat16 does not do; empty if it does.
        source: Where this can be looked up.
        moments: When kmp applies the rule.
        limit: Why kmp does not apply it at creation and in a conversion alike, if it does not.
    """

    classes: frozenset[str] = frozenset()
    condition: Callable[[keras.Layer, keras.DTypePolicy], bool] | None = None
    float16: str = ""
    bfloat16: str = ""
    source: str = _KERAS
    moments: Moment = Moment.CREATION | Moment.CONVERSION
    limit: str = ""

    def reason(self, dtype: str) -> str:
        """Returns why a 16-bit dtype does not do; empty if it does."""
        return self.bfloat16 if dtype == BFLOAT16.name else self.float16


def _of(package: str, names: str) -> frozenset[str]:
    return frozenset(f"{package}.{name}" for name in names.split())


def _in_both(reason: str) -> dict[str, Any]:
    return {"float16": reason, "bfloat16": reason}


def _keeps_weights_in_16_bits(layer: keras.Layer, policy: keras.DTypePolicy) -> bool:
    return policy.variable_dtype in DTYPES_16_BIT


def _rounds_normalized_weights(layer: keras.Layer, policy: keras.DTypePolicy) -> bool:
    """Whether the kernel is normalized in 16 bits: `kmp.layers` does it in float32 otherwise."""
    is_subclass = type(layer) is not keras.layers.SpectralNormalization
    return is_subclass or _keeps_weights_in_16_bits(layer, policy)


def _wraps_float32(layer: keras.Layer, policy: keras.DTypePolicy) -> bool:
    inner = getattr(layer, "layer", None)
    return getattr(inner, "compute_dtype", None) == FLOAT32.name


def _has_rounded_mask_value(layer: keras.Layer, policy: keras.DTypePolicy) -> bool:
    exact = np.asarray(getattr(layer, "mask_value", 0.0), "float64")
    with np.errstate(over="ignore"):
        rounded = exact.astype(np.dtype(policy.compute_dtype))
    return not np.array_equal(rounded.astype("float64"), exact)


def _adds_loss_itself(layer: keras.Layer, policy: keras.DTypePolicy) -> bool:
    """Whether the code of `call` adds a loss, and the layer has no layers in it.

    The code of a block of layers may compute much else.
    """
    code = getattr(inspect.unwrap(type(layer).call), "__code__", None)
    return "add_loss" in getattr(code, "co_names", ()) and not any(direct_sublayers(layer))


_ARANGE = (
    "it computes positions in the dtype of its input: TensorFlow has no `arange` in float16 in a"
    " graph, and bfloat16 rounds integers above 256"
)

# The first rule that matches applies, before what `kmp.numerics` says.
RULES = (
    Float32Rule(
        classes=_of("kmp", "Float32 Softmax"),
        **_in_both("always computes in float32, whatever the policy"),
        source="kmp.layers",
        moments=Moment.CONVERSION,
        limit="its `__init__` sets float32",
    ),
    # The base class of preprocessing and image augmentation. Some, such as MixUp, also combine two
    # dtypes and fail.
    Float32Rule(
        classes=_of("keras", "DataLayer"),
        condition=lambda layer, policy: keras.backend.is_float_dtype(layer.compute_dtype),
        **_in_both("raw data: 16 bits round ids in masks and labels, and overflow on large values"),
    ),
    Float32Rule(
        classes=_of("keras", "BatchNormalization"),
        condition=_keeps_weights_in_16_bits,
        **_in_both("its statistics are weights, and 16 bits would round their updates away"),
    ),
    Float32Rule(
        classes=_of("keras", "Masking"),
        condition=_has_rounded_mask_value,
        **_in_both("16 bits round its mask_value, which then equals none of the inputs"),
    ),
    Float32Rule(
        classes=_of("keras", "SpectralNormalization"),
        condition=_rounds_normalized_weights,
        **_in_both("it writes a kernel that it computes, and 16 bits would round the weights"),
    ),
    Float32Rule(
        classes=_of("keras", "SpectralNormalization"),
        condition=_wraps_float32,
        **_in_both("it casts what it returns to its own dtype, and the layer in it is float32"),
        moments=Moment.CREATION,
        limit="a conversion sets a layer and the layers in it to float32 together",
    ),
    Float32Rule(
        classes=_of("keras", "TFSMLayer"),
        **_in_both("an exported model takes only the dtypes with which it was exported"),
    ),
    # Of 16-bit images, the gradient fails under XLA (bilinear) or in a graph (lanczos), or there is
    # none (bicubic).
    Float32Rule(
        classes=_of("keras", "UpSampling2D"),
        condition=lambda layer, policy: getattr(layer, "interpolation", "nearest") != "nearest",
        **_in_both("TensorFlow has the gradient of an interpolation in float32 only"),
    ),
    Float32Rule(
        classes=_of("keras", "Layer"),
        condition=_adds_loss_itself,
        **_in_both("calls add_loss: losses sum many elements and must be float32"),
        source=_GUIDE,
        moments=Moment.CONVERSION,
        limit="it has no sublayers yet when it is created, and one with sublayers is a block",
    ),
    # keras-hub 0.32
    Float32Rule(
        classes=_of(
            "keras_hub",
            "DFineAnchorGenerator DFineHybridEncoder ESMRotaryEmbedding RoformrPositionalEmbedding"
            " SAM3DetrDecoder flux.TimestepEmbedding",
        ),
        **_in_both(_ARANGE),
        source=_HUB,
    ),
    Float32Rule(
        classes=_of(
            "keras_hub",
            "MaskedLMHead MixtralTransformerDecoder MoonshineDecoderBlock MoonshineEncoderBlock"
            " Qwen3SparseMoeBlock Qwen3_5MoeSparseMoeBlock QwenSparseMoeBlock SAMPromptEncoder",
        ),
        **_in_both("it combines float32 and 16-bit tensors, which TensorFlow refuses"),
        source=_HUB,
    ),
    Float32Rule(
        classes=_of(
            "keras_hub",
            "T5Gemma2DecoderLayer T5Gemma2EncoderLayer T5GemmaDecoderLayer T5GemmaEncoderLayer"
            " T5MultiHeadAttention",
        ),
        float16="its mask is multiplied by -1e9, which is -Inf in float16, and 0 * -Inf is NaN",
        source=_HUB,
    ),
    Float32Rule(
        classes=_of("keras_hub", "RWKV7_Block"),
        float16="its epsilon of 1e-12 is 0 in float16, and it divides by zero",
        source=_HUB,
    ),
)


def float32_rule(
    layer: keras.Layer, policy: keras.DTypePolicy, moment: Moment
) -> Float32Rule | None:
    """Returns the first rule by which a layer needs float32 in place of a policy; `None` if none.

    Args:
        layer: The layer, whatever its own policy.
        policy: A policy that computes in 16 bits.
        moment: When this is asked.
    """
    for rule in _rules_of(layer.__class__):
        is_candidate = moment in rule.moments and rule.reason(policy.compute_dtype)
        if is_candidate and (not rule.condition or rule.condition(layer, policy)):
            return rule
    return _rule_by_function(layer, policy)


_rules_by_class: WeakKeyDictionary[type, list[Float32Rule]] = WeakKeyDictionary()


def _rules_of(cls: type) -> list[Float32Rule]:
    """Returns the rules that have a class, or a base class of it."""
    if cls in _rules_by_class:
        return _rules_by_class[cls]
    names = set()
    for base in cls.__mro__:
        package, *folders = str(getattr(base, "__module__", "")).split(".")
        names.add(f"{package}.{base.__name__}")
        if len(folders) > 1:
            names.add(f"{package}.{folders[-2]}.{base.__name__}")
    found = _rules_by_class[cls] = [rule for rule in RULES if rule.classes & names]
    return found


def _rule_by_function(layer: keras.Layer, policy: keras.DTypePolicy) -> Float32Rule | None:
    """Returns the rule for what a layer computes, if it needs float32 whatever its inputs."""
    computed = []
    function = function_of(layer)
    # A softmax only flushes. Whether that matters depends on what gets its results.
    if function is not None and "flushes" not in function.traits:
        window: Any = getattr(layer, "pool_size", None) or getattr(layer, "kernel_size", ())
        computed.append((function, math.prod(window), ""))
    if layer.activity_regularizer is not None:
        computed.append((LONG_SUM, INFINITY, "its activity regularizer: "))
    for function, terms, subject in computed:
        reason = reason_for_all_data(function, FORMATS_16_BIT[policy.compute_dtype], terms)
        if reason:
            return Float32Rule(**_in_both(subject + reason), source=function.source)
    return None


def reason_for_float32(layer: keras.Layer, dtype: str = FLOAT16.name) -> str | None:
    """Returns why a layer needs float32 at its creation in place of a 16-bit dtype.

    Returns `None` if it does not. Whether its weights are in 16 bits too is a matter of its own
    policy.
    """
    has_weights_in_16_bits = layer.dtype_policy.variable_dtype == dtype
    policy = keras.DTypePolicy(dtype if has_weights_in_16_bits else f"mixed_{dtype}")
    rule = float32_rule(layer, policy, Moment.CREATION)
    return rule.reason(dtype) if rule else None
