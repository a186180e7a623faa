"""What is wrong with the programs for bfloat16 and float32, as trainings without kmp show it."""

from typing import NamedTuple

from cases import Case
from running import Scores

from kmp.advice import ComputeInFloat32, PrepareData, SetArguments


class Truth(NamedTuple):
    """What a diagnosis of a program with a fault must find, and where this is known from.

    Attributes:
        case: The cause, the place, and the lowest score without the fault.
        predicate: The class in `kmp.diagnosis` for such a cause.
        reason: What happens, in words.
        cure: The edits that cure it; others may do so too.
        scores: The scores that were measured.
    """

    case: Case
    predicate: str
    reason: str
    cure: tuple[ComputeInFloat32 | PrepareData | SetArguments, ...]
    scores: Scores


# bfloat16 has 8 bits of precision: the numbers from 2^n to 2^(n+1) have steps of 2^(n-7).
BFLOAT16: dict[str, Truth] = {
    "fault_bfloat16_average": Truth(
        Case("precision_loss", "center", 0.89),
        "StaleState",
        "0.01 * (x - mean) is less than half a step of the mean long before the mean is near x",
        (ComputeInFloat32("center"),),
        Scores(0.924, 0.514, 0.93),
    ),
    "fault_bfloat16_counter": Truth(
        Case("precision_loss", "codes", 0.93),
        "StaleStateIn16Bits",
        "256 + 1 is 256, so the temperature never falls; the variable itself is in bfloat16",
        (ComputeInFloat32("codes"),),
        Scores(0.973, 0.767, 0.974),
    ),
    "fault_bfloat16_ids": Truth(
        Case("precision_loss", "station", 0.95),
        "WrongOutputs",
        "ids from 512 to 1000 are rounded to multiples of 4, and select other rows",
        (ComputeInFloat32("station"),),
        Scores(1.0, 0.809, 1.0),
    ),
    "fault_bfloat16_likelihood": Truth(
        Case("precision_loss", "likelihood", 0.95),
        "WrongOutputs",
        "log-likelihoods near -511 have steps of 2, and those of the classes differ by less",
        (ComputeInFloat32("likelihood"),),
        Scores(0.992, 0.492, 0.992),
    ),
    "fault_bfloat16_meter": Truth(
        Case("precision_loss", "last_week", 0.9),
        "WrongOutputs",
        "readings near 3000 have steps of 16, and a week uses 56",
        (ComputeInFloat32("last_week"),),
        Scores(0.934, 0.742, 0.936),
    ),
    "fault_bfloat16_neighbours": Truth(
        Case("rounding", "crowding", 0.88),
        "NonfiniteForward",
        "|a|^2 + |b|^2 - 2ab is negative for near points, and so is what Sqrt gets",
        (ComputeInFloat32("crowding"),),
        Scores(0.922, 0.473, 0.922),
    ),
    "fault_bfloat16_noisy_or": Truth(
        Case("forward_underflow", "any_part", 0.92),
        "NonfiniteForward",
        "1 - 1e-7 is 1, so Log gets 1 - 1; the outputs stay finite, and gradients are NaN",
        (ComputeInFloat32("any_part"),),
        Scores(0.973, 0.48, 0.975),
    ),
    "fault_bfloat16_physics": Truth(
        Case("precision_loss", "residual", 0.97),
        "WrongOutputs",
        "t + 0.001 is t, and the outputs at both are equal: the slope is 0 or noise",
        (ComputeInFloat32("residual"),),
        Scores(0.999, 0.835, 0.999),
    ),
    "fault_bfloat16_ratings": Truth(
        Case("lost_updates", "rating", 0.95),
        "LostUpdates",
        "1500 has steps of 8, and an update is 0.05; 'mixed_bfloat16' would round the outputs",
        (SetArguments("keras.layers.Embedding", {"dtype": "'float32'"}, "rating"),),
        Scores(0.993, 0.518, 0.993),
    ),
    "fault_bfloat16_rotary": Truth(
        Case("precision_loss", "attention", 0.93),
        "WrongOutputs",
        "positions near 3000 are rounded to multiples of 16, and so are their distances",
        (ComputeInFloat32("attention"),),
        Scores(0.966, 0.32, 0.966),
    ),
    "fault_bfloat16_simulation": Truth(
        Case("precision_loss", "cooling", 0.97),
        "WrongOutputs",
        "temperatures above 64 have steps of 0.5, and most losses of a step are below 0.25",
        (ComputeInFloat32("cooling"),),
        Scores(0.997, 0.546, 0.997),
    ),
    "fault_bfloat16_survival": Truth(
        Case("precision_loss", "within_year", 0.75),
        "WrongOutputs",
        "1 - hazard is 1 for hazards below 0.002, so the probability is 0",
        (ComputeInFloat32("within_year"),),
        Scores(0.827, -2.46, 0.829),
    ),
    "fault_bfloat16_trip": Truth(
        Case("precision_loss", "trip_length", 0.97),
        "WrongOutputs",
        "degrees of latitude near 40 have steps of 0.25, and a trip is shorter",
        (ComputeInFloat32("trip_length"),),
        Scores(0.997, 0.084, 0.997),
    ),
    "fault_bfloat16_variance": Truth(
        Case("precision_loss", "contrast", 0.91),
        "WrongOutputs",
        "E[x^2] near 400 has steps of 2, and the variance is below 1",
        (ComputeInFloat32("contrast"),),
        Scores(0.947, 0.504, 0.947),
    ),
    "fault_bfloat16_weekday": Truth(
        Case("precision_loss", "weekday", 0.93),
        "WrongOutputs",
        "days above 2048 are rounded to multiples of 16, and those above 256 of 2 at least",
        (ComputeInFloat32("weekday"),),
        Scores(0.958, -0.005, 0.959),
    ),
    "fault_bfloat16_weights": Truth(
        Case("lost_updates", "", 0.95),
        "LostUpdates",
        "an update is less than 2^-9 of most weights, which are in bfloat16",
        (SetArguments("keras.config.set_dtype_policy", {"policy": "'mixed_bfloat16'"}),),
        Scores(0.986, 0.605, 0.986),
    ),
}

FLOAT32: dict[str, Truth] = {
    "fault_float32_dead": Truth(
        Case("dead", "hidden", 0.95),
        "DeadVariables",
        "no hidden unit is ever above 0, so the kernel and bias of 'hidden' have no gradient",
        (SetArguments("keras.layers.Dense", {"bias_initializer": "'zeros'"}, "hidden"),),
        Scores(0.223, 0.223, 1.0),
    ),
    "fault_float32_exploding": Truth(
        Case("exploding", "learning_rate", 0.85),
        "Exploding",
        "updates grow until the hidden units are dead: the learning rate is too large",
        (SetArguments("keras.optimizers.SGD", {"learning_rate": "0.01"}),),
        Scores(-0.04, -0.04, 0.903),
    ),
    "fault_float32_log": Truth(
        Case("loss", "log_counts", 0.9),
        "NonfiniteInFloat32",
        "Log of 0 is -inf in step 22, in row 28 of its batch; all weights are NaN after it",
        (PrepareData("x = np.maximum(x, 1.0)"),),
        Scores(0.488, 0.488, 0.949),
    ),
}

TRUTHS = BFLOAT16 | FLOAT32

# These are as good as without the fault if the steps with NaN are skipped, as a
# `kmp.LossScaleOptimizer` does; the cause is there all the same.
SAVED_BY_SKIPPED_STEPS = ("fault_bfloat16_noisy_or", "fault_float32_log")

# The programs without a fault, and why they are suspicious.
SUSPICIOUS: dict[str, str] = {
    "healthy_bfloat16_average": "a state that moves by 1 % of a difference",
    "healthy_bfloat16_batch_norm": "moving statistics, and a maximum over a picture",
    "healthy_bfloat16_cubes": "activations of 1e6",
    "healthy_bfloat16_dropout": "outputs and gradients that vary from pass to pass",
    "healthy_bfloat16_embedding": "indices above 256, and a gradient that is nearly all zero",
    "healthy_bfloat16_mask": "a constant of -1e9",
    "healthy_bfloat16_noisy": "few examples, and gradients that are mostly noise",
    "healthy_bfloat16_prices": "outputs with steps of 2",
    "healthy_bfloat16_tiny_gradients": "gradients near 1e-12",
    "healthy_bfloat16_unit_norm": "a sum of 4096 squares",
    "healthy_bfloat16_vocabulary": "a softmax over 5000 words",
    "healthy_float32_padding": "many zeros, and a logarithm",
    "healthy_float32_spikes": "losses that vary a hundredfold",
}
