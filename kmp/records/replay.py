"""What a replay of one training batch showed. Needs no Keras."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from kmp.records.log_schema import MOST_VARIABLES, Count, LossScale, Magnitude, Number, Text, Texts

# Names of what a replay finds outside of layers.
BATCH_X, BATCH_Y, BATCH_WEIGHTS = BATCH_PARTS = (
    "the batch's x",
    "the batch's y",
    "the batch's sample_weight",
)
LOSS_FUNCTION = "the loss function"

Share = Annotated[float, Meta(ge=0, le=1)]

# Above these errors, float16 hurts. Sound programs stay below 0.004 and 0.12 in float16, and 0.02
# in bfloat16; programs that float16 ruins are at 0.25 and more. An error of the outputs alone does
# no harm: that of a constant that all examples share, such as the mean of a regression, can be
# large beside how they vary, and the loss not notice it.
HARMFUL_OUTPUT_ERROR = 0.05
HARMFUL_GRADIENT_ERROR = 0.25
_NOTICED_GRADIENT_ERROR = 0.1
_CONVERGED = 1e-3  # gradients that are smaller, relative to the largest ones of the layer
_SLOW_UPDATE = 0.5  # of a state: it moves half the way to the value of a batch, or less
HARMFUL_OUTPUT_ERROR_ALONE = 0.25  # where there are no gradients, or no layer adds to it


@dataclass(frozen=True)
class NonfiniteOperation:
    """An operation that returned NaN or Inf for finite inputs, or NaN for inputs without NaN.

    Args:
        layer: Path of the layer that ran it, or `"the loss function"`.
        operation: TensorFlow's type of the operation, such as `"Exp"`.
        dtype: The dtype of its result.
        value: `"inf"` or `"nan"`.
        largest_input: The largest finite magnitude among its inputs.
        smallest_input: The smallest magnitude in its last input: of a division, in the divisor. In
            the base of a power whose exponent is negative.
        constant: The value of a scalar input, or `None` without a finite one.
        is_backward: Whether it was in the backward pass.
        has_infinite_constant: Whether a scalar input is infinite.
        has_negative_input: Whether a number in its last input is negative.
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
class LayerError:
    """What the precision of the model changes in the outputs of a layer.

    Relative errors are L2 norms of the difference from float32, relative to how the outputs differ
    between examples.

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
class StateError:
    """What the precision of the model changes in the update of a state that is not trainable, such as a moving average.

    Relative to the L2 norm of the update in float32, which is what a training step adds to the
    state.

    Args:
        path: Path of the variable.
        error: The L2 norm of the difference from the state after the update in float32.
        noise: At most how much the update would differ for another batch of the same size.
        next_update: The L2 norm of the update that follows on the same batch: 0 if the state is the
            batch's own, almost 1 if it moves slowly.
    """

    path: Text
    error: Magnitude
    noise: Magnitude
    next_update: Magnitude

    @property
    def is_harmful(self) -> bool:
        """Whether a state that moves slowly stays far from where the batches move it."""
        lags = self.noise < HARMFUL_GRADIENT_ERROR and self.next_update > _SLOW_UPDATE
        return lags and self.error > HARMFUL_GRADIENT_ERROR


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

    @property
    def has_converged(self) -> bool:
        """Whether the gradients are nothing beside those of earlier steps: their errors do no harm then."""
        return self.norm < _CONVERGED * self.largest_norm

    @property
    def is_harmful(self) -> bool:
        """Whether the error is large, and above the sampling noise: as a whole, or the part that is lost."""
        if self.has_converged:
            return False
        noise = self.noise or 0.0
        lost = 1.0 - self.kept
        return self.error > HARMFUL_GRADIENT_ERROR and (
            self.error > noise or lost > max(noise, HARMFUL_GRADIENT_ERROR)
        )


@dataclass(frozen=True)
class Replay:
    """A batch that the training saw, in the precision of the model and in float32.

    Where the training step cannot be replayed, only the forward pass is: then `is_finite` and
    `is_finite_in_float32` are about the outputs, and there is no loss and no gradient.

    Args:
        examples: How many examples of the batch were replayed.
        loss_scale: The loss scale in use.
        loss: The loss in the precision of the model; `None` if it is not finite.
        float32_loss: The loss in float32; `None` if it is not finite.
        is_finite: Whether the loss and all gradients were finite in the precision of the model.
        is_finite_in_float32: Whether they were in float32.
        usable_scale: The largest loss scale, a power of two, at which no gradient in 16 bits comes
            near float16's maximum; `None` if these gradients are not finite in float32 or all zero,
            or if there are none.
        nonfinite: The first operations that returned NaN or Inf in the precision of the model, also
            in a pass that is finite but harmful; if loss or gradients are not finite in float32
            either, those in float32.
        lost_constants: For each layer of `nonfinite`, the scalars among its operands that are zero
            or infinite in float16.
        nonfinite_outputs: The layers whose outputs were not finite in that pass, in the order of
            their calls.
        nonfinite_variables: The variables with NaN or Inf.
        nonfinite_part: The part of the batch with NaN or Inf, or with an input beyond float16's
            maximum; or `None`.
        nonfinite_key: The index of that tensor in a part with several, as Python source, such as
            `"['label']"`.
        has_sample_weight: Whether the batch has sample weights.
        is_part_finite: Whether that tensor has no NaN and no Inf, but values beyond float16's
            maximum.
        invalid_targets: The targets of the first output for which a target is not the index of a
            class and the loss is not finite, or that are beyond the range of a binary
            cross-entropy; or `None`.
        float32_layers: The layers that have to compute in float32 for a finite loss and finite
            gradients without a harmful error; `None` if no set of layers was found.
        activation_gradients: The largest magnitude of the gradient of each layer's outputs in
            float32, without the loss scale, by layer path, in the order of the backward pass. Those
            that are not finite are omitted.
        flushed: Share of the elements of each gradient that are zero at the loss scale in use and
            not in float32, by variable path; zeros are omitted.
        zero: The variables whose gradient is zero in float32 too.
        is_forward_only: Whether only the forward pass was replayed.
        output_error: The relative error of the model's outputs, as in `LayerError`; `None` if a
            pass was not finite. If that of the replay was not, but the training step was, the
            harmful error of a compiled forward pass.
        is_finite_compiled: Whether the outputs of a compiled forward pass were those of float32,
            though the loss of the replay, which runs operation by operation, was not finite.
        layer_errors: What the precision of the model changes in the outputs of the layers, in the
            order of the calls.
        gradient_errors: What it changes in the gradients of the layers. Empty if a pass was not
            finite.
        state_errors: What it changes in the updates of states that are not trainable, of those
            above 0.25. `None` if it was not measured: a batch that cannot be halved to tell errors
            from noise, or too little time.
        underflows: The largest share of the results of an operation that are 0 in float16 though
            its operands are not, by layer, in a pass that is finite but harmful; zeros are omitted.
        unscaled_layers: The layers whose gradients have a part that does not grow with the loss
            scale. Measured for a `train_step` of the user's own, and where errors of gradients are
            harmful and no layers remove them.
        is_unscaled: Whether hardly anything of any gradient grows with it, as if the step clips
            scaled gradients.
        unscaled_by: The layer with the backward pass after which they do not grow; empty if it is
            not known.
        lost_weights: The weights with values that are 0 or Inf in float16, of layers that compute
            in it.
        float16_states: The number of float16 variables that the training step assigns beside the
            weights.
    """

    examples: Count
    loss_scale: LossScale
    loss: Number | None
    float32_loss: Number | None
    is_finite: bool
    is_finite_in_float32: bool
    usable_scale: LossScale | None = None
    nonfinite: Annotated[list[NonfiniteOperation], Meta(max_length=100)] = field(
        default_factory=list
    )
    lost_constants: Annotated[dict[Text, list[Number]], Meta(max_length=100)] = field(
        default_factory=dict
    )
    nonfinite_outputs: Texts = field(default_factory=list)
    nonfinite_variables: Texts = field(default_factory=list)
    nonfinite_part: Text | None = None
    nonfinite_key: Text = ""
    is_part_finite: bool = False
    has_sample_weight: bool = False
    invalid_targets: InvalidTargets | None = None
    float32_layers: Texts | None = None
    activation_gradients: Annotated[dict[Text, Magnitude], MOST_VARIABLES] = field(
        default_factory=dict
    )
    flushed: Annotated[dict[Text, Share], MOST_VARIABLES] = field(default_factory=dict)
    zero: Annotated[list[Text], MOST_VARIABLES] = field(default_factory=list)
    is_forward_only: bool = False
    output_error: Magnitude | None = None
    is_finite_compiled: bool = False
    layer_errors: Annotated[list[LayerError], Meta(max_length=1000)] = field(default_factory=list)
    gradient_errors: Annotated[list[GradientError], Meta(max_length=1000)] = field(
        default_factory=list
    )
    state_errors: Annotated[list[StateError], MOST_VARIABLES] | None = field(default_factory=list)
    underflows: Annotated[dict[Text, Share], MOST_VARIABLES] = field(default_factory=dict)
    unscaled_layers: Annotated[list[Text], MOST_VARIABLES] = field(default_factory=list)
    is_unscaled: bool = False
    unscaled_by: Text = ""
    lost_weights: Annotated[list[LostWeight], MOST_VARIABLES] = field(default_factory=list)
    float16_states: Count = 0

    @property
    def is_compared(self) -> bool:
        """Whether both passes were finite, so that their results could be compared."""
        return self.output_error is not None

    @property
    def is_harmful(self) -> bool:
        """Whether the results differ so much that float16 hurts the training."""
        return is_harmful(self.output_error or 0.0, self.gradient_errors) or bool(self.lost_states)

    @property
    def loss_difference(self) -> float:
        """The magnitude of the difference of the loss from float32; 0 if a loss is not known."""
        return (
            0.0
            if self.loss is None or self.float32_loss is None
            else abs(self.loss - self.float32_loss)
        )

    @property
    def lost_states(self) -> list[str]:
        """The paths of the states that float16 keeps far from where the batches move them."""
        return [each.path for each in self.state_errors or () if each.is_harmful]

    @property
    def overflow_inside(self) -> NonfiniteOperation | None:
        """The first forward operation with NaN or Inf in the loss or one of `float32_layers`; others may be masks."""
        suspects = (LOSS_FUNCTION, *(self.float32_layers or ()))
        return next(
            (each for each in self.nonfinite if each.layer in suspects and not each.is_backward),
            None,
        )

    @property
    def error_origin(self) -> LayerError | None:
        """The layer where a harmful error of the outputs begins: it adds most to it on inputs of float32.

        One of `float32_layers` if they add to it. A layer with a weight that float16 loses may add
        little to it, which the next layers amplify. `None` without a harmful error, or if no layer
        adds to it.
        """
        if (self.output_error or 0.0) <= HARMFUL_OUTPUT_ERROR:
            return None
        errors = [
            each for each in self.layer_errors if (each.new_error or 0.0) > HARMFUL_OUTPUT_ERROR
        ]
        suspects = errors or [
            each for each in self.layer_errors if self.lost_weights_of(each.layer)
        ]
        cured = [each for each in suspects if each.layer in (self.float32_layers or ())]
        return max(cured or errors, key=lambda each: each.new_error or 0.0, default=None)

    def lost_weights_of(self, layer: str) -> list[LostWeight]:
        """Returns the `lost_weights` of a layer and its sublayers."""
        return [weight for weight in self.lost_weights if weight.path.startswith(f"{layer}/")]


def is_harmful(output_error: float, gradient_errors: Sequence[GradientError]) -> bool:
    """Returns whether the errors of outputs and gradients are so large that float16 hurts the training."""
    if not gradient_errors:
        return output_error > HARMFUL_OUTPUT_ERROR_ALONE
    largest = max(error.error for error in gradient_errors)
    is_noticed = output_error > HARMFUL_OUTPUT_ERROR and largest > _NOTICED_GRADIENT_ERROR
    return is_noticed or any(error.is_harmful for error in gradient_errors)
