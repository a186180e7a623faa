"""What a replay of one training batch showed. Needs no Keras.

Nothing here judges: `kmp.diagnosis` does, from these values.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from kmp.numerics.losses import LossKind
from kmp.records.log_types import (
    MOST_VARIABLES,
    Count,
    LossScale,
    Magnitude,
    Names,
    Number,
    Text,
    Texts,
)
from kmp.records.step_facts import CodeLine

# Names of what a replay finds outside of layers.
BATCH_X, BATCH_Y, BATCH_WEIGHTS = BATCH_PARTS = (
    "the batch's x",
    "the batch's y",
    "the batch's sample_weight",
)
LOSS_FUNCTION = "the loss function"

Format16 = Literal["float16", "bfloat16"]
Share = Annotated[float, Meta(ge=0, le=1)]
ShareByPath = Annotated[dict[Text, Share], MOST_VARIABLES]
MagnitudeByPath = Annotated[dict[Text, Magnitude], MOST_VARIABLES]


@dataclass(frozen=True)
class NonfinitePart:
    """A part of a batch with NaN or Inf, or with an input that overflows float16.

    Args:
        part: One of `"the batch's x"`, `"the batch's y"` and `"the batch's sample_weight"`.
        key: The index of the tensor in a part with several, as Python source: `"['label']"`.
        is_too_large: Whether that tensor has no NaN and no Inf, but values beyond float16's
            maximum.
    """

    part: Text
    key: Text = ""
    is_too_large: bool = False


@dataclass(frozen=True)
class InvalidTargets:
    """Targets of a classification that are not all indices of classes.

    Args:
        smallest: The smallest target.
        largest: The largest target.
        classes: The number of classes of the output.
        output: The index of the output among those of the model.
        key: The index of the targets in `y`, as Python source, if it has several, such as
            `"['label']"`.
        only_invalid: The invalid target, if all of them are the same number.
        per_example: The number of targets of each example.
        from_logits: Whether the compiled loss takes logits.
        is_binary: Whether the loss is a binary cross-entropy, which takes numbers from 0 to 1.
    """

    smallest: Number
    largest: Number
    classes: Count
    output: Count = 0
    key: Text = ""
    only_invalid: int | None = None
    per_example: Count = 1
    from_logits: bool = False
    is_binary: bool = False


@dataclass(frozen=True)
class LostWeight:
    """A weight of which float16 loses values.

    Args:
        path: Path of the variable.
        zero: The share of its nonzero values that are 0 in float16.
        infinite: The share that is Inf.
    """

    path: Text
    zero: Share
    infinite: Share


@dataclass(frozen=True)
class BatchCheck:
    """What is wrong with a batch and the weights, before any pass.

    Args:
        nonfinite: The first part of the batch with NaN, Inf or, for a model that computes in
            float16, inputs beyond its maximum.
        invalid_targets: The targets of the first output that has invalid ones: not the index of a
            class, with a loss that is not finite, or outside the range of a binary cross-entropy.
        has_sample_weight: Whether the batch has sample weights.
        nonfinite_variables: The variables with NaN or Inf.
        lost_weights: The weights with values that are 0 or Inf in float16, of layers that compute
            in it.
        states_in_16_bits: The number of variables in 16 bits that the training step assigns beside
            the weights, and that no pass compares.
        names_of_states: The names of those that the model has as attributes.
        largest_input: The largest finite magnitude among the inputs that are floats.
        largest_input_key: The index of the tensor with it in inputs with several tensors, as
            Python source: `"['area']"`.
    """

    nonfinite: NonfinitePart | None = None
    invalid_targets: InvalidTargets | None = None
    has_sample_weight: bool = False
    nonfinite_variables: Texts = field(default_factory=list)
    lost_weights: Annotated[list[LostWeight], MOST_VARIABLES] = field(default_factory=list)
    states_in_16_bits: Count = 0
    names_of_states: Texts = field(default_factory=list)
    largest_input: Magnitude = 0.0
    largest_input_key: Text = ""


@dataclass(frozen=True)
class GradientRange:
    """The range of the gradients of a batch, and what float16 flushes of them.

    Args:
        usable_scale: The largest loss scale, a power of two, at which no gradient in 16 bits comes
            near float16's maximum. If a pass at that scale overflows inside of a layer, a lower one
            at which it is finite. `None` if these gradients are not finite in float32 or all zero,
            or if there are none, or if no layer computes in float16.
        of_activations: The largest magnitude of the gradient of each layer's outputs in float32,
            without the loss scale, by layer path, in the order of the backward pass. Those that
            are not finite are omitted.
        flushed: Share of the elements of each gradient that are zero at the loss scale in use and
            not in float32, by variable path; zeros are omitted.
        zero: The variables whose gradient is zero in float32 too.
    """

    usable_scale: LossScale | None = None
    of_activations: MagnitudeByPath = field(default_factory=dict)
    flushed: ShareByPath = field(default_factory=dict)
    zero: Names = field(default_factory=list)


@dataclass(frozen=True)
class NonfiniteOperation:
    """An operation that returned NaN or Inf for finite inputs, or NaN for inputs without NaN.

    Args:
        layer: Path of the layer that ran it, or `"the loss function"`.
        operation: TensorFlow's type of the operation, such as `"Exp"`.
        dtype: The dtype of its result.
        value: `"inf"` or `"nan"`.
        largest_input: The largest finite magnitude among its inputs.
        smallest_input: The smallest magnitude in its last input, such as the divisor of a division;
            of a power with a negative exponent, in its base.
        constant: The value of a scalar input, or `None` without a finite one.
        is_backward: Whether it was in the backward pass.
        has_infinite_constant: Whether a scalar input is infinite.
        has_negative_input: Whether a number in its last input is negative.
        code: The line of the training step that made it; `None` if it is not known.
    """

    layer: Text
    operation: Text
    dtype: Text
    value: Literal["inf", "nan"]
    largest_input: Magnitude
    smallest_input: Magnitude
    constant: Number | None
    is_backward: bool
    has_infinite_constant: bool = False
    has_negative_input: bool = False
    code: CodeLine | None = None


@dataclass(frozen=True)
class RoundedConstant:
    """A constant that the training step gets in 16 bits, so that a pass in float32 has it rounded.

    Args:
        dtype: Its dtype.
        shape: Its shape.
        smallest: The smallest of its finite values; `None` if there are none.
        largest: The largest of them.
        use: The first operation that gets it.
        nonfinite: `"Inf"` or `"NaN"` if it has such values; NaN if it has both.
        name: The layer or model and its attribute that is this constant, such as
            `"diffusion.kept"`; empty if it is not known.
    """

    dtype: Format16
    shape: Annotated[list[Count], Meta(max_length=100)]
    smallest: Number | None
    largest: Number | None
    use: CodeLine
    nonfinite: Literal["", "Inf", "NaN"] = ""
    name: Text = ""


@dataclass(frozen=True)
class RoundedConstants:
    """Constants whose rounding makes a pass in float32 NaN or Inf.

    The pass is finite with other values that round to the same numbers.

    Args:
        constants: The constants, no more of them than are needed for that.
        operation: The first operation that then returns neither NaN nor Inf; `None` if none is
            known.
    """

    constants: Annotated[list[RoundedConstant], Meta(min_length=1, max_length=100)]
    operation: NonfiniteOperation | None = None


@dataclass(frozen=True)
class LossyOperation:
    """An operation of the forward pass whose finite result loses too much in 16 bits.

    Args:
        layer: Path of the layer that ran it, or `"the loss function"`.
        operation: TensorFlow's type of the operation, such as `"Sub"`.
        kind: `"cancellation"`: a difference that is small beside its operands. `"phase"`: a
            periodic function of a large number. `"amplification"`: another function that enlarges
            the relative error of its operands, such as a logarithm of numbers close to 1.
            `"saturation"`: a result at a limit of the function, which it does not reach in float32.
            `"lost_terms"`: a sum that keeps few bits of its small terms, or another result that
            varies little beside its size. `"index"`: a cast to integers of numbers between which 16
            bits have no others.
        dtype: The dtype of its result; of a cast, that of the floats.
        largest_input: The largest magnitude among its inputs; of lost terms, also among its
            results.
        typical: The root mean square of the results; of lost terms, of these, or of how the results
            vary; of saturation, the limit.
        share: The share of the results with this loss.
        error: An estimate of the error of the results, relative to how they vary.
    """

    layer: Text
    operation: Text
    kind: LossKind
    dtype: Text
    largest_input: Magnitude
    typical: Magnitude
    share: Share
    error: Magnitude


@dataclass(frozen=True)
class Overflow:
    """The operations of a pass that is not finite, or finite and far from float32.

    They are those of the pass in the precision of the model or, if loss or gradients are not finite
    in float32 either, of the pass in float32.

    Args:
        operations: The first operations that returned NaN or Inf.
        lost_constants: For each layer of these, the scalars among its operands that are zero or
            infinite in float16.
        outputs: The layers whose outputs were not finite, in the order of their calls.
        magnitudes: The largest finite magnitude of each layer's outputs in float32, by layer path,
            in the order of their calls; of large outputs, of a part of the values.
        underflows: The largest share of the results of an operation that are 0 in float16 and not
            in float32, by layer; zeros are omitted. Measured in a finite pass.
        lossy: The operation of each layer that loses most, the largest error first, in a finite
            pass.
        rounded: The constants whose rounding makes the pass in float32 NaN or Inf; `None` without
            such constants.
    """

    operations: Annotated[list[NonfiniteOperation], Meta(max_length=100)] = field(
        default_factory=list
    )
    lost_constants: Annotated[dict[Text, list[Number]], Meta(max_length=100)] = field(
        default_factory=dict
    )
    outputs: Texts = field(default_factory=list)
    magnitudes: MagnitudeByPath = field(default_factory=dict)
    underflows: ShareByPath = field(default_factory=dict)
    lossy: Annotated[list[LossyOperation], Meta(max_length=100)] = field(default_factory=list)
    rounded: RoundedConstants | None = None


@dataclass(frozen=True)
class LayerError:
    """What the precision of the model changes in the outputs of a layer.

    Relative errors are L2 norms of the difference from float32, relative to how the outputs differ
    between examples; of integers, such as indices, the share of those that differ.

    Args:
        layer: Path of the layer.
        error: The relative error of its outputs.
        new_error: The relative error of its outputs if its inputs are those of float32; `None` if
            it was not measured.
        input_error: The relative error of its outputs in float32 if only its inputs are rounded to
            the precision of the layer; `None` if `new_error` is harmless or was not measured.
    """

    layer: Text
    error: Magnitude
    new_error: Magnitude | None = None
    input_error: Magnitude | None = None


@dataclass(frozen=True)
class GradientError:
    """What the precision of the model changes in the gradients of a layer.

    Args:
        layer: Path of the layer, as in the paths of its variables.
        error: The L2 norm of the difference from the gradients in float32, relative to the norm of
            these.
        kept: The part of the float32 gradients that is left: 1 without an error, 0 if all is
            flushed to zero.
        norm: The L2 norm of the gradients in float32.
        noise: The sampling noise of these gradients, relative to their norm: how much they would
            differ for another batch of the same size. `None` if it is not known.
        largest_norm: The largest `norm` of the layer that earlier comparisons of the training have
            measured, if any.
    """

    layer: Text
    error: Magnitude
    kept: Number
    norm: Magnitude
    noise: Magnitude | None = None
    largest_norm: Magnitude = 0.0


@dataclass(frozen=True)
class StateError:
    """What the precision of the model changes in the update of a state, such as a moving average.

    Relative to the L2 norm of the update in float32, which is what a training step adds to the
    state.

    Args:
        path: Path of the variable.
        error: The L2 norm of the difference from the state after the update in float32.
        noise: At most how much the update would differ for another batch of the same size: 0 of a
            state that does not depend on the batch, such as a moving average of weights.
        next_update: The L2 norm of the update that follows on the same batch: 0 if the state is
            the batch's own, almost 1 if it moves slowly.
        dtype: The dtype of the variable.
    """

    path: Text
    error: Magnitude
    noise: Magnitude
    next_update: Magnitude
    dtype: Text = "float32"


@dataclass(frozen=True)
class Comparison:
    """How far the results of a finite pass in the precision of the model are from float32.

    Args:
        output_error: The relative error of the model's outputs, as in `LayerError`.
        layers: The errors of the outputs of layers, in the order of the calls.
        gradients: The errors of the gradients of layers, the largest first.
        states: The errors of the updates of states that are not trainable, of those above 0.25.
            `None` if they were not measured: a batch that cannot be halved to tell errors from
            noise, or too little time.
    """

    output_error: Magnitude
    layers: Annotated[list[LayerError], Meta(max_length=1000)] = field(default_factory=list)
    gradients: Annotated[list[GradientError], Meta(max_length=1000)] = field(default_factory=list)
    states: Annotated[list[StateError], MOST_VARIABLES] | None = field(default_factory=list)


@dataclass(frozen=True)
class UnscaledGradients:
    """Gradients that do not grow with the loss scale.

    Args:
        layers: The layers whose gradients have a part that does not grow with it.
        are_all: Whether hardly anything of any gradient grows, as if the step clips scaled
            gradients.
        origin: The layer with the backward pass after which they do not grow; empty if it is not
            known.
        change: What the training step does to all of them, if passes have shown it: `"clipped"`
            while they are scaled, or `"divided"` by the loss scale before the optimizer divides
            them too.
        times: By which factor they are too small when the optimizer gets them; 0 without a
            `change`.
    """

    layers: Names = field(default_factory=list)
    are_all: bool = False
    origin: Text = ""
    change: Literal["", "clipped", "divided"] = ""
    times: Magnitude = 0.0


@dataclass(frozen=True)
class LayerSearch:
    """The search for layers that have to compute in float32 for a sound pass.

    Args:
        is_found: Whether layers were found.
        layers: Their paths. Empty if none has to change at the largest usable loss scale.
        is_sound_in_bfloat16: Whether the pass is sound if the model computes in bfloat16 in place
            of float16; `None` if that was not tried: if layers were found, if the pass had neither
            NaN nor Inf, or if there was no time.
        loss_scale: The loss scale of the search, if the gradients of the `branch` are flushed at
            the largest usable one; else `None`.
        branch: The layers of a branch of the model, such as one of several towers, whose gradients
            a sound pass has to keep.
    """

    is_found: bool
    layers: Texts = field(default_factory=list)
    is_sound_in_bfloat16: bool | None = None
    loss_scale: LossScale | None = None
    branch: Names = field(default_factory=list)


@dataclass(frozen=True)
class OtherFormat:
    """What a pass in the other 16-bit format shows, bfloat16 or float16.

    The pass has the weights, batch and float32 layers of the pass in the precision of the model.

    Args:
        format: The other format.
        loss_scale: The loss scale of the pass: 1 in bfloat16. In float16 the largest power of two
            at which no gradient comes near float16's maximum, at most the default of 2^15.
        is_finite: Whether the loss and all gradients were finite, or without these the outputs.
        comparison: The differences from float32, without those of states. `None` if the pass was
            not finite.
        overflow: Where NaN and Inf begin. `None` if the pass was finite.
    """

    format: Format16
    loss_scale: LossScale
    is_finite: bool
    comparison: Comparison | None = None
    overflow: Overflow | None = None

    @property
    def own_format(self) -> Format16:
        """The 16-bit format that the model computes in."""
        return "bfloat16" if self.format == "float16" else "float16"


@dataclass(frozen=True)
class Replay:
    """A replayed batch: a pass in the precision of the model, and one in float32.

    Where the training step cannot be replayed, only the forward pass is: then `is_finite` and
    `is_finite_in_float32` are about the outputs, and there is no loss and no gradient.

    Args:
        examples: How many examples of the batch were replayed.
        loss_scale: The loss scale in use.
        loss: The loss in the precision of the model; `None` if it is not finite or not known, as in
            a training step that does not scale its loss.
        float32_loss: The loss in float32; `None` if it is not finite or not known.
        is_finite: Whether the loss and all gradients were finite in the precision of the model.
        is_finite_in_float32: Whether they were in float32.
        is_forward_only: Whether only the forward pass was replayed.
        batch: What is wrong with the batch and the weights.
        gradients: The range of the gradients.
        overflow: The operations with NaN, Inf and underflow. `None` if these were not looked for:
            in a pass that is finite and close to float32.
        comparison: The differences between the two passes. `None` if one was not finite or drew
            other random numbers.
        unscaled: The gradients that do not grow with the loss scale; `None` if that was not
            measured. It is measured for a `train_step` of the user's own, and if the gradients have
            harmful errors that no layers in float32 remove.
        search: The search for layers that need float32. `None` in a pass that needs none.
        other_format: A pass in the other 16-bit format. `None` in most replays: it is made at the
            first one and once in the second half of a training. Also `None` if the pass took too
            long, failed, or draws random numbers that differ between formats.

    Example:
    >>> from kmp.records import Replay
    >>> from kmp.records.replay import Comparison, LayerError
    >>> errors = Comparison(output_error=0.3, layers=[LayerError("norm", error=0.3)])
    >>> replay = Replay(32, 1024.0, 0.5, 0.4, True, True, comparison=errors)
    >>> replay.output_error, replay.float32_layers
    (0.3, [])
    """

    examples: Count
    loss_scale: LossScale
    loss: Number | None
    float32_loss: Number | None
    is_finite: bool
    is_finite_in_float32: bool
    is_forward_only: bool = False
    batch: BatchCheck = field(default_factory=BatchCheck)
    gradients: GradientRange = field(default_factory=GradientRange)
    overflow: Overflow | None = None
    comparison: Comparison | None = None
    unscaled: UnscaledGradients | None = None
    search: LayerSearch | None = None
    other_format: OtherFormat | None = None

    @property
    def is_finite_forward(self) -> bool:
        """Whether the loss was finite in the precision of the model."""
        return self.loss is not None

    @property
    def float32_layers(self) -> list[str]:
        """The layers that were found to need float32; none if none were, or were looked for."""
        return self.search.layers if self.search else []

    @property
    def operations(self) -> list[NonfiniteOperation]:
        """The first operations that returned NaN or Inf."""
        return self.overflow.operations if self.overflow else []

    @property
    def rounded(self) -> RoundedConstants | None:
        """The constants whose rounding makes the pass in float32 NaN or Inf."""
        return self.overflow.rounded if self.overflow else None

    @property
    def output_error(self) -> float | None:
        """The relative error of the model's outputs; `None` if it was not compared."""
        return self.comparison.output_error if self.comparison else None

    @property
    def layer_errors(self) -> list[LayerError]:
        """The errors of the outputs of layers; none if they were not compared."""
        return self.comparison.layers if self.comparison else []

    @property
    def gradient_errors(self) -> list[GradientError]:
        """The errors of the gradients of layers; none if they were not compared."""
        return self.comparison.gradients if self.comparison else []
