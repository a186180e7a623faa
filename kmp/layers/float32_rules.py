"""The layers that need float32 in place of a 16-bit dtype: which, why, and when kmp decides it.

`RULES` is the only table of them. `kmp.enable` applies it when a layer is created, `kmp.convert`
and `kmp.audit` apply it to a model, and `compile` warns by it. A model that is built under `enable`
and one that is converted therefore have the same float32 layers, but for the rules whose `limit`
says why they differ. `tests/conversion/test_same_float32_layers.py` compares them.

What depends on the graph of a model, such as its output layers, or on an operation of `keras.ops`
is in `kmp.conversion`, because no class of layers has it.

`docs/hub.md` has the models that use the classes of keras-hub.
`tests/layers/test_every_keras_layer.py` tries all classes of Keras.
"""

import enum
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from kmp.backend.keras_internals import calls_of, direct_sublayers
from kmp.utils.float_formats import BFLOAT16, DTYPES_16_BIT, FLOAT16, FLOAT32

TOO_FEW_BITS = "bfloat16 has 8 significant bits, too few for this operation"

# TensorFlow's CPU kernels add up the elements of a window in float16; cuDNN and XLA do so in
# float32, as all kernels do for bfloat16. Relative errors on a CPU, of positive values, for windows
# of 256, 1024 and 4096 elements: pooling 0.002, 0.006 and 0.83, depthwise convolution 0.002, 0.012
# and 0.09. The sum of 256 elements is Inf if they exceed 255. A GPU pays for the cast of the input.
LARGEST_POOL = 256
LARGEST_DEPTHWISE_KERNEL = 1024
LONG_SUM = "float16 sums over so many elements overflow or lose small ones on a CPU"

_KERAS = "Keras' source"
_HUB = "keras-hub's source"
_PAPER = "Micikevicius et al. 2018, section 3.3"
_TORCH = "torch.amp's op reference"
_GRAPPLER = "TensorFlow's auto_mixed_precision_lists.h"
_GUIDE = "Keras' guide to mixed precision"
_CPU_KERNELS = "TensorFlow's CPU kernels"


class Moment(enum.Flag):
    """When kmp decides whether a layer computes in float32.

    Attributes:
        CREATION: At the end of its `__init__` under `kmp.enable`, before it has sublayers or calls.
        CONVERSION: In `kmp.convert` and `kmp.audit`, which have the built model.
        COMPILE: In `compile`, which warns if the layer produces an output of the model.
    """

    CREATION = enum.auto()
    CONVERSION = enum.auto()
    COMPILE = enum.auto()


@dataclass(frozen=True)
class Float32Rule:
    """One row of the table.

    Args:
        classes: The classes, as `keras.Dot`: the first name of the module, and the name of the
            class; with the folder between them if a package has several of one name. Subclasses
            match too.
        activations: The names of activation functions; a layer with one of them matches too.
        condition: Takes a layer that matches and the policy of 16 bits; whether the rule applies.
        float16: Why float16 does not do, as shown to users; empty if it does.
        bfloat16: Why bfloat16 does not do; empty if it does.
        source: Where this can be looked up.
        moments: When kmp applies the rule.
        limit: Why kmp does not apply it at creation and in a conversion alike, if it does not.
    """

    classes: frozenset[str] = frozenset()
    activations: frozenset[str] = frozenset()
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


def _averages_long_axes(layer: keras.Layer, policy: keras.DTypePolicy) -> bool:
    for call in calls_of(layer):
        shape = call.input_tensors[0].shape
        if longest_adaptive_window(shape, layer.output_size, layer.data_format) > LARGEST_POOL:
            return True
    return False


def longest_adaptive_window(
    shape: tuple[int | None, ...], output_size: tuple[int, ...], data_format: str | None
) -> int:
    """Returns how many elements adaptive average pooling adds up at most: it pools axis by axis."""
    is_last = (data_format or keras.config.image_data_format()) == "channels_last"
    axes = shape[1:-1] if is_last else shape[2:]
    known = [(size, parts) for size, parts in zip(axes, output_size, strict=True) if size]
    return max((math.ceil(size / parts) + 1 for size, parts in known), default=0)


def _adds_loss_itself(layer: keras.Layer, policy: keras.DTypePolicy) -> bool:
    """Whether the code of `call` adds a loss, and the layer has no layers in it.

    The code of a block of layers may compute much else.
    """
    code = getattr(inspect.unwrap(type(layer).call), "__code__", None)
    return "add_loss" in getattr(code, "co_names", ()) and not any(direct_sublayers(layer))


# Their products and the layers around them would be float32 too.
_ANY_PLACE = (
    "a layer does not know at its creation where it stands. Attention layers create a Softmax for"
    " their scores, and a Dense with a softmax may be a gate: in float32 they would be slower"
)
SOFTMAX = Float32Rule(
    classes=_of("keras", "Softmax"),
    # TensorFlow's own functions have the names with `_v2`.
    activations=frozenset(["softmax", "softmax_v2", "log_softmax", "log_softmax_v2", "sparsemax"]),
    float16="exp, sum and division: float16 flushes small probabilities to zero",
    bfloat16=TOO_FEW_BITS,
    source=f"{_PAPER}, {_TORCH}",
    moments=Moment.CONVERSION | Moment.COMPILE,
    limit=_ANY_PLACE,
)
SIGMOID = Float32Rule(
    activations=frozenset(["sigmoid"]),
    float16="float16 rounds probabilities near 0 and 1 to 0 and 1, where the gradient is zero",
    source=_PAPER,
    moments=Moment.COMPILE,
    limit="only an output before a cross-entropy needs it; a conversion has outputs in float32",
)

_ARANGE = (
    "it computes positions in the dtype of its input: TensorFlow has no `arange` in float16 in a"
    " graph, and bfloat16 rounds integers above 256"
)
_SQUARES = "its sum of squares is Inf or 0 in float16"

# The first rule that matches applies.
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
        classes=_of("keras", "Dot"),
        condition=lambda layer, policy: bool(getattr(layer, "normalize", False)),
        float16=_SQUARES,
    ),
    Float32Rule(classes=_of("keras", "UnitNormalization"), float16=_SQUARES),
    Float32Rule(
        classes=_of("keras", "GlobalAveragePooling1D"),
        float16="with a mask, its sum over all steps overflows float16",
    ),
    Float32Rule(
        classes=_of("keras", "AveragePooling1D AveragePooling2D AveragePooling3D"),
        condition=lambda layer, policy: math.prod(getattr(layer, "pool_size", ())) > LARGEST_POOL,
        float16=LONG_SUM,
        source=_CPU_KERNELS,
    ),
    Float32Rule(
        classes=_of(
            "keras", "AdaptiveAveragePooling1D AdaptiveAveragePooling2D AdaptiveAveragePooling3D"
        ),
        condition=_averages_long_axes,
        float16=LONG_SUM,
        source=_CPU_KERNELS,
        moments=Moment.CONVERSION,
        limit="a layer does not know the size of its inputs at its creation",
    ),
    Float32Rule(
        classes=_of("keras", "DepthwiseConv1D DepthwiseConv2D SeparableConv1D SeparableConv2D"),
        condition=lambda layer, policy: (
            math.prod(getattr(layer, "kernel_size", ())) > LARGEST_DEPTHWISE_KERNEL
        ),
        float16=LONG_SUM,
        source=_CPU_KERNELS,
    ),
    Float32Rule(
        classes=_of("keras", "Masking"),
        condition=_has_rounded_mask_value,
        **_in_both("16 bits round its mask_value, which then equals none of the inputs"),
    ),
    Float32Rule(
        classes=_of("keras", "STFTSpectrogram"),
        **_in_both("the squares of its amplitudes exceed 65504, and it refuses bfloat16"),
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
        classes=_of("keras", "Lambda"),
        **_in_both("a custom function, which kmp does not inspect"),
        source="kmp",
        moments=Moment.CONVERSION,
        limit="code that is written under `enable` gets 16 bits, as in every custom layer",
    ),
    SOFTMAX,
    SIGMOID,
    Float32Rule(
        activations=frozenset(["exponential"]),
        float16="exponentials overflow float16: exp(12) > 65504",
        bfloat16=TOO_FEW_BITS,
        source=f"{_TORCH}, {_GRAPPLER}",
        moments=Moment.CONVERSION,
        limit=_ANY_PLACE,
    ),
    Float32Rule(
        activations=frozenset(["squareplus"]),
        float16="powers overflow float16: 256 squared > 65504",
        bfloat16=TOO_FEW_BITS,
        source=f"{_TORCH}, {_GRAPPLER}",
        moments=Moment.CONVERSION,
        limit=_ANY_PLACE,
    ),
    Float32Rule(
        classes=_of("keras", "Layer"),
        condition=lambda layer, policy: layer.activity_regularizer is not None,
        float16="its activity regularizer's sum over all outputs overflows float16",
        bfloat16="its activity regularizer sums all outputs: " + TOO_FEW_BITS,
        source=_PAPER,
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
    # The names of the layer's class and of its base classes, as the table has them.
    classes = set()
    for base in type(layer).__mro__:
        package, *folders = str(getattr(base, "__module__", "")).split(".")
        classes.add(f"{package}.{base.__name__}")
        if len(folders) > 1:
            classes.add(f"{package}.{folders[-2]}.{base.__name__}")
    activations = set(_activation_names(layer, moment))
    for rule in RULES:
        is_candidate = moment in rule.moments and rule.reason(policy.compute_dtype)
        is_match = rule.classes & classes or rule.activations & activations
        if is_candidate and is_match and (not rule.condition or rule.condition(layer, policy)):
            return rule
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


def _activation_names(layer: keras.Layer, moment: Moment) -> Iterator[str]:
    """Yields the names of a layer's activation functions; in `compile`, of that of its outputs."""
    is_for_outputs = moment is Moment.COMPILE
    for name in ("activation",) if is_for_outputs else ("activation", "recurrent_activation"):
        activation = getattr(layer, name, None)
        if not isinstance(activation, keras.layers.Softmax):
            yield getattr(activation, "__name__", "")
        elif not is_for_outputs or activation.compute_dtype in DTYPES_16_BIT:
            yield "softmax"
