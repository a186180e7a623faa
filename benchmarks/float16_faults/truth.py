"""What is true of each program: its fault, or why it looks as if it had one."""

from dataclasses import dataclass

from kmp.advice import ComputeInFloat32, PrepareData, SetArguments
from kmp.diagnosis import names_of_causes

Edit = ComputeInFloat32 | PrepareData | SetArguments


@dataclass(frozen=True)
class Fault:
    """What is wrong with a program.

    Attributes:
        cause: A category of `CAUSES`.
        place: The name of the layer, output, weight or argument, or the part of the batch, that a
            good finding contains; empty if there is no single one.
        sound: The lowest score to expect of the program without the fault.
        why: What happens.
        held_out: Whether no rule of kmp was written for the program.
        only_kmp: The argument in which the fault lies and which only kmp has; empty if Keras can
            train the program.
        cure: Edits that cure it, where a test trains the program in Keras with them.
    """

    cause: str
    place: str
    sound: float
    why: str
    held_out: bool = False
    only_kmp: str = ""
    cure: tuple[Edit, ...] = ()


@dataclass(frozen=True)
class Healthy:
    """A program without a fault.

    Attributes:
        why: Why it looks as if it had one.
        only_kmp: What it uses that only kmp has; empty if Keras can train the program.
    """

    why: str
    only_kmp: str = ""


# The largest number of float16 is 65504, and the smallest is 2^-24 = 6e-8. It has 11 bits of
# precision: the numbers from 2^n to 2^(n+1) have steps of 2^(n-10).
#
# The programs that are held out are a fifth, drawn on 2026-11-25; those that were added later are
# not among them.
FLOAT16: dict[str, Fault] = {
    "fault_lost_updates_wide_dense": Fault(
        "lost_updates", "", 0.85, "an update is below half a step of most weights"
    ),
    "fault_lost_updates_embedding": Fault(
        "lost_updates", "", 0.85, "ratings near 10 have steps of 0.008, and updates are smaller"
    ),
    "fault_lost_updates_gru": Fault(
        "lost_updates", "", 0.85, "an update is below half a step of most weights"
    ),
    "fault_lost_updates_factors": Fault(
        "lost_updates", "", 0.7, "factors near 0.8 have steps of 0.0005, and an update is 0.0002"
    ),
    "fault_lost_updates_profile": Fault(
        "lost_updates", "week_profile", 0.9, "100 has steps of 0.06, and an update is 0.01"
    ),
    "fault_lost_updates_file": Fault(
        "lost_updates", "", 0.85, "the file has the layers' dtype, float16, which no policy changes"
    ),
    "fault_lost_updates_gain": Fault(
        "lost_updates", "gain", 0.94, "100 has steps of 0.06, and an update is 0.01"
    ),
    "fault_optimizer_state_adam": Fault(
        "optimizer_state", "epsilon", 0.95, "1e-8 is 0 in the float16 state: 0 / 0"
    ),
    "fault_optimizer_state_default_epsilon": Fault(
        "optimizer_state",
        "epsilon",
        0.93,
        "squares of gradients are 0 in the float16 state, so steps are gradients divided by 1e-7",
        held_out=True,
    ),
    "fault_optimizer_state_rmsprop": Fault(
        "optimizer_state", "epsilon", -0.03, "1e-9 is 0 in the float16 state: 0 / 0"
    ),
    "fault_optimizer_state_zero_epsilon": Fault(
        "optimizer_state", "epsilon", 0.93, "weights of inputs that are always 0 get 0 / 0"
    ),
    "fault_loss_overflow_activity": Fault(
        "loss_overflow",
        "activity_penalty",
        0.86,
        "a sum of 32 x 512 squares exceeds 65504 before it is multiplied by 1e-7",
        held_out=True,
    ),
    "fault_loss_overflow_compute_loss": Fault(
        "loss_overflow", "", 0.94, "a sum of 32 x 24 x 8 squares exceeds 65504"
    ),
    "fault_loss_overflow_autoencoder": Fault(
        "loss_overflow", "reconstruction_loss", 0.95, "two squares of 255 exceed 65504"
    ),
    "fault_loss_overflow_prices": Fault(
        "loss_overflow", "", 0.94, "errors near 6000 have squares above 65504"
    ),
    "fault_loss_overflow_sparsity": Fault(
        "loss_overflow",
        "sparsity",
        0.95,
        "a sum of 512 x 1024 activations exceeds 65504 before it is multiplied by 1e-8",
    ),
    "fault_targets_weighted": Fault(
        "targets", "arousal", 0.8, "a weight of 0 does not remove NaN: 0 * NaN is NaN"
    ),
    "fault_targets_binary": Fault(
        "targets", "y", 0.85, "with a target of 2 binary cross-entropy has no minimum"
    ),
    "fault_targets_unknown": Fault("targets", "", 0.93, "-1 is not the index of a class"),
    "fault_targets_one_based": Fault(
        "targets", "", 0.95, "4 is not the index of one of four classes", held_out=True
    ),
    "fault_targets_missing": Fault("targets", "humidity", -0.1, "15 % of the targets are NaN"),
    "fault_branch_underflow_churn": Fault(
        "branch_underflow", "churn", 0.87, "gradients with a weight of 1e-6 are below 6e-8"
    ),
    "fault_backward_overflow_height": Fault(
        "backward_overflow",
        "relative_height",
        0.93,
        "gradients of squared meters fit below a loss scale of 2^-9, where others are 0",
    ),
    "fault_branch_underflow_sentiment": Fault(
        "branch_underflow",
        "sentiment",
        0.88,
        "gradients with a weight of 1e-7 are below 6e-8 at a loss scale of 8",
        only_kmp="loss_scale",
    ),
    "fault_scale_too_small_autoencoder": Fault(
        "scale_too_small", "loss_scale", 0.95, "gradients of errors below 5e-4 V are below 6e-8"
    ),
    "fault_scale_too_small_lstm": Fault(
        "scale_too_small",
        "loss_scale",
        0.93,
        "sample weights near 1e-3 and a loss scale of 2^-10 leave gradients below 6e-8",
        only_kmp="loss_scale",
    ),
    "fault_scale_too_small_dose_map": Fault(
        "scale_too_small",
        "max_scale",
        0.9,
        "a mean over 16 x 256 pixels and a loss scale of 2^-14 leave gradients below 6e-8",
        only_kmp="max_scale",
    ),
    "fault_unscaled_loss_divided": Fault(
        "unscaled_loss", "unscaled", 0.85, "gradients are divided by the loss scale twice"
    ),
    "fault_scale_growth_of_wrap": Fault(
        "growth_interval_too_small",
        "growth_interval",
        0.93,
        "the scale grows by 2^12 and backs off by 2, so most steps are skipped",
        only_kmp="growth_factor",
    ),
    "fault_scale_too_large_conv": Fault(
        "scale_too_large",
        "loss_scale",
        0.93,
        "gradients times 2^24 exceed 65504",
        only_kmp="loss_scale",
    ),
    "fault_scale_too_large_regression": Fault(
        "scale_too_large",
        "loss_scale",
        0.93,
        "gradients times 2^17 exceed 65504 until the errors are small",
        only_kmp="loss_scale",
    ),
    "fault_scale_minimum": Fault(
        "scale_too_large",
        "min_scale",
        0.93,
        "gradients of squared prices times 2^12 exceed 65504",
        only_kmp="min_scale",
    ),
    "fault_exploding_sgd": Fault("exploding", "learning_rate", 0.9, "1.5 is 30 times too large"),
    "fault_exploding_warmup": Fault(
        "exploding", "learning_rate", 0.9, "3.0 is 1000 times too large", held_out=True
    ),
    "fault_exploding_lion": Fault("exploding", "learning_rate", 0.9, "0.5 is 500 times too large"),
    "fault_exploding_gru": Fault("exploding", "learning_rate", 0.9, "1.5 is 300 times too large"),
    "fault_exploding_attention": Fault(
        "exploding", "learning_rate", 0.9, "3.0 is 1000 times too large"
    ),
    "fault_data_missing": Fault("data", "x", 0.9, "160 of 1024 rows contain NaN"),
    "fault_data_raw_units": Fault("data", "x", 0.93, "numbers near 8e5 exceed 65504"),
    "fault_constant_mask": Fault(
        "constant", "masked_attention", 0.93, "-1e9 is -Inf, and 0 * -Inf is NaN", held_out=True
    ),
    "fault_constant_normalize": Fault(
        "constant", "standardize", 0.95, "1e-12 is 0: a blank image gives 0 / 0", held_out=True
    ),
    "fault_constant_empty_set": Fault(
        "constant", "parcel_mean", 0.9, "1e-8 is 0: an empty set gives 0 / 0"
    ),
    "fault_constant_average": Fault(
        "constant", "masked_average", 0.9, "1e-10 is 0: an empty text gives 0 / 0"
    ),
    "fault_forward_overflow_cube": Fault(
        "forward_overflow", "polynomial", 0.94, "the cube of 60 is 216000"
    ),
    "fault_forward_overflow_depth": Fault(
        "forward_overflow", "project_3", 0.95, "each of three layers multiplies values by 50"
    ),
    "fault_forward_overflow_attention": Fault(
        "forward_overflow", "dot_attention", 0.93, "products of inputs near 100 exceed 65504"
    ),
    "fault_rounding_siamese": Fault(
        "rounding",
        "distance",
        0.9,
        "|a|^2 + |b|^2 - 2ab is below -1e-4 for near points, and so is what Sqrt gets",
        held_out=True,
    ),
    "fault_forward_underflow_softmax": Fault(
        "forward_underflow", "log_probabilities", 0.86, "probabilities below 6e-8 are 0: Log(0)"
    ),
    "fault_forward_underflow_entropy": Fault(
        "forward_underflow",
        "attention",
        0.93,
        "the gradient of a masked Log(0) is 0 * Inf, which is NaN",
    ),
    "fault_backward_overflow_rms": Fault(
        "backward_overflow", "loudness", 0.95, "squares below 6e-8 are 0, and Sqrt has slope Inf"
    ),
    "fault_precision_loudness": Fault(
        "precision_loss",
        "loudness",
        0.95,
        "a mean of squares is Inf, and the signal divided by it 0",
        held_out=True,
    ),
    "fault_precision_hours": Fault(
        "precision_loss", "phase", 0.97, "hours above 32768 are rounded to multiples of 32"
    ),
    "fault_precision_ids": Fault(
        "precision_loss", "customer", 0.98, "ids from 4096 are rounded to multiples of 4"
    ),
    "fault_precision_total": Fault(
        "precision_loss", "total", 0.97, "totals above 2048 have steps of 2, of amounts near 7.5"
    ),
    "fault_precision_distances": Fault(
        "precision_loss",
        "distances",
        0.94,
        "squares near 20000 have steps of 16, and distances are near 2",
        held_out=True,
    ),
    "fault_precision_residual": Fault(
        "precision_loss",
        "loss",
        0.9,
        "pressures near 1013 have steps of 0.5, and differ by 0.06",
        held_out=True,
    ),
}

# bfloat16 has 8 bits of precision: the numbers from 2^n to 2^(n+1) have steps of 2^(n-7).
BFLOAT16: dict[str, Fault] = {
    "fault_bfloat16_average": Fault(
        "precision_loss",
        "center",
        0.89,
        "0.01 * (x - mean) is less than half a step of the mean long before the mean is near x",
        cure=(ComputeInFloat32("center"),),
    ),
    "fault_bfloat16_counter": Fault(
        "precision_loss",
        "codes",
        0.93,
        "256 + 1 is 256, so the temperature never falls; the variable itself is in bfloat16",
        cure=(ComputeInFloat32("codes"),),
    ),
    "fault_bfloat16_ids": Fault(
        "precision_loss",
        "station",
        0.95,
        "ids from 512 to 1000 are rounded to multiples of 4, and select other rows",
        cure=(ComputeInFloat32("station"),),
    ),
    "fault_bfloat16_likelihood": Fault(
        "precision_loss",
        "likelihood",
        0.95,
        "log-likelihoods near -511 have steps of 2, and those of the classes differ by less",
        cure=(ComputeInFloat32("likelihood"),),
    ),
    "fault_bfloat16_meter": Fault(
        "precision_loss",
        "last_week",
        0.9,
        "readings near 3000 have steps of 16, and a week uses 56",
        cure=(ComputeInFloat32("last_week"),),
    ),
    "fault_bfloat16_neighbours": Fault(
        "rounding",
        "crowding",
        0.88,
        "|a|^2 + |b|^2 - 2ab is negative for near points, and so is what Sqrt gets",
        cure=(ComputeInFloat32("crowding"),),
    ),
    # As good as without the fault if the steps with NaN are skipped, as under kmp.
    "fault_bfloat16_noisy_or": Fault(
        "forward_underflow",
        "any_part",
        0.92,
        "1 - 1e-7 is 1, so Log gets 1 - 1; the outputs stay finite, and gradients are NaN",
        cure=(ComputeInFloat32("any_part"),),
    ),
    "fault_bfloat16_physics": Fault(
        "precision_loss",
        "residual",
        0.97,
        "t + 0.001 is t, and the outputs at both are equal: the slope is 0 or noise",
        cure=(ComputeInFloat32("residual"),),
    ),
    "fault_bfloat16_ratings": Fault(
        "lost_updates",
        "rating",
        0.95,
        "1500 has steps of 8, and an update is 0.05; 'mixed_bfloat16' would round the outputs",
        cure=(SetArguments("keras.layers.Embedding", {"dtype": "'float32'"}, "rating"),),
    ),
    "fault_bfloat16_rotary": Fault(
        "precision_loss",
        "attention",
        0.93,
        "positions near 3000 are rounded to multiples of 16, and so are their distances",
        cure=(ComputeInFloat32("attention"),),
    ),
    "fault_bfloat16_simulation": Fault(
        "precision_loss",
        "cooling",
        0.97,
        "temperatures above 64 have steps of 0.5, and most losses of a step are below 0.25",
        cure=(ComputeInFloat32("cooling"),),
    ),
    "fault_bfloat16_survival": Fault(
        "precision_loss",
        "within_year",
        0.75,
        "1 - hazard is 1 for hazards below 0.002, so the probability is 0",
        cure=(ComputeInFloat32("within_year"),),
    ),
    "fault_bfloat16_trip": Fault(
        "precision_loss",
        "trip_length",
        0.97,
        "degrees of latitude near 40 have steps of 0.25, and a trip is shorter",
        cure=(ComputeInFloat32("trip_length"),),
    ),
    "fault_bfloat16_variance": Fault(
        "precision_loss",
        "contrast",
        0.91,
        "E[x^2] near 400 has steps of 2, and the variance is below 1",
        cure=(ComputeInFloat32("contrast"),),
    ),
    "fault_bfloat16_weekday": Fault(
        "precision_loss",
        "weekday",
        0.93,
        "days above 2048 are rounded to multiples of 16, and those above 256 of 2 at least",
        cure=(ComputeInFloat32("weekday"),),
    ),
    "fault_bfloat16_weights": Fault(
        "lost_updates",
        "",
        0.95,
        "an update is less than 2^-9 of most weights, which are in bfloat16",
        cure=(SetArguments("keras.config.set_dtype_policy", {"policy": "'mixed_bfloat16'"}),),
    ),
}

FLOAT32: dict[str, Fault] = {
    "fault_float32_dead": Fault(
        "dead",
        "hidden",
        0.95,
        "no hidden unit is ever above 0, so the kernel and bias of 'hidden' have no gradient",
        cure=(SetArguments("keras.layers.Dense", {"bias_initializer": "'zeros'"}, "hidden"),),
    ),
    "fault_float32_exploding": Fault(
        "exploding",
        "learning_rate",
        0.85,
        "updates grow until the hidden units are dead: the learning rate is too large",
        cure=(SetArguments("keras.optimizers.SGD", {"learning_rate": "0.01"}),),
    ),
    # As good as without the fault if the step with NaN is skipped, as under kmp.
    "fault_float32_log": Fault(
        "loss",
        "log_counts",
        0.9,
        "Log of 0 is -Inf in step 22, in row 28 of its batch; all weights are NaN after it",
        cure=(PrepareData("x = np.maximum(x, 1.0)"),),
    ),
}

FAULTS = FLOAT16 | BFLOAT16 | FLOAT32

# The causes that a program has, with what they are.
CAUSES = {
    name: meaning
    for name, meaning in names_of_causes().items()
    if any(fault.cause == name for fault in FAULTS.values())
}

HEALTHY_FLOAT16: dict[str, Healthy] = {
    "healthy_autoencoder": Healthy("an exponential and a divergence, which it casts to float32"),
    "healthy_clipped_lstm": Healthy("gradients that are clipped in most steps"),
    "healthy_custom_loop": Healthy("clipping by hand, of unscaled gradients", "unscale"),
    "healthy_dead_relu": Healthy("hidden units of which more than half are dead"),
    "healthy_distillation": Healthy("a second loss, and a moving average of weights", "unscale"),
    "healthy_dropout_gru": Healthy("many gradients that are zero, and a noisy loss"),
    "healthy_frozen_backbone": Healthy("layers without gradients"),
    "healthy_house_prices": Healthy("gradients that overflow until the loss scale fits"),
    "healthy_label_smoothing": Healthy("wrong labels, and a loss that stays high"),
    "healthy_large_initial_scale": Healthy("gradients that overflow at the start, and again"),
    "healthy_masked_attention": Healthy("a constant of -Inf"),
    "healthy_rezero_transformer": Healthy("branches with gradients of zero at the start"),
    "healthy_small_learning_rate": Healthy("updates that float16 weights would lose"),
    "healthy_sparse_inputs": Healthy("inputs of which 98 % are zero"),
    "healthy_sum_vae": Healthy("losses that are large sums, and an initial overflow"),
    "healthy_train_step": Healthy("a loss of 1e-2, and gradients to match"),
    "healthy_unused_head": Healthy("an output without a loss"),
    "healthy_unused_rows": Healthy("a table whose gradient is mostly zero"),
}

HEALTHY_BFLOAT16: dict[str, Healthy] = {
    "healthy_bfloat16": Healthy("inputs up to a million"),
    "healthy_bfloat16_average": Healthy("a state that moves by 1 % of a difference"),
    "healthy_bfloat16_batch_norm": Healthy("moving statistics, and a maximum over an image"),
    "healthy_bfloat16_cubes": Healthy("activations of 1e6"),
    "healthy_bfloat16_dropout": Healthy("outputs and gradients that vary from pass to pass"),
    "healthy_bfloat16_embedding": Healthy("indices above 256, and a gradient that is mostly zero"),
    "healthy_bfloat16_mask": Healthy("a constant of -1e9"),
    "healthy_bfloat16_noisy": Healthy("few examples, and gradients that are mostly noise"),
    "healthy_bfloat16_prices": Healthy("outputs with steps of 2"),
    "healthy_bfloat16_tiny_gradients": Healthy("gradients near 1e-12"),
    "healthy_bfloat16_unit_norm": Healthy("a sum of 4096 squares"),
    "healthy_bfloat16_vocabulary": Healthy("a softmax over 5000 words"),
}

HEALTHY_FLOAT32: dict[str, Healthy] = {
    "healthy_float32_attention": Healthy("gradients near 1e-8"),
    "healthy_float32_padding": Healthy("many zeros, and a logarithm"),
    "healthy_float32_spikes": Healthy("losses that vary a hundredfold"),
}

HEALTHY = HEALTHY_FLOAT16 | HEALTHY_BFLOAT16 | HEALTHY_FLOAT32

TOLERANCE = 0.05


def is_sound(score: float | None, sound: float) -> bool:
    """Whether a score is as good as that of a program without its fault.

    0.05 of an accuracy less is, and so is a quarter of an error more. `None` and NaN are not.
    """
    tolerance = max(TOLERANCE, -0.25 * sound)
    return score is not None and score >= sound - tolerance
