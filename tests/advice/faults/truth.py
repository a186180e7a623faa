"""What is wrong with the programs for bfloat16 and float32, as trainings without kmp show it."""

from typing import NamedTuple

from cases import Case
from running import Scores

from kmp.advice import ComputeInFloat32, SetArguments


class Truth(NamedTuple):
    """What a diagnosis of a program with a fault must find, and where this is known from.

    Attributes:
        case: The cause, the place, and the lowest score without the fault.
        predicate: The class or function in `kmp.diagnosis` for such a cause, or `"new"`.
        reason: What happens, in words.
        cure: The edits that cure it; others may do so too.
        scores: The scores that were measured.
    """

    case: Case
    predicate: str
    reason: str
    cure: tuple[ComputeInFloat32 | SetArguments, ...]
    scores: Scores


BFLOAT16: dict[str, Truth] = {
    "fault_bfloat16_average": Truth(
        Case("precision_loss", "center", 0.85),
        "StaleState",
        "0.01 * mean is less than half a step of bfloat16 at 0.99 * mean, so it adds nothing",
        (ComputeInFloat32("center"),),
        Scores(0.924, 0.514, 0.93),
    ),
    "fault_bfloat16_variance": Truth(
        Case("precision_loss", "contrast", 0.85),
        "WrongOutputs",
        "E[x^2] near 400 has steps of 2, and the variance is below 1",
        (ComputeInFloat32("contrast"),),
        Scores(0.947, 0.504, 0.947),
    ),
    "fault_bfloat16_weekday": Truth(
        Case("precision_loss", "weekday", 0.85),
        "WrongOutputs",
        "days above 2048 are rounded to multiples of 16, and those above 256 of 2 at least",
        (ComputeInFloat32("weekday"),),
        Scores(0.958, -0.005, 0.959),
    ),
    "fault_bfloat16_trip": Truth(
        Case("precision_loss", "trip_length", 0.85),
        "WrongOutputs",
        "a degree of latitude near 40 has steps of 0.25, and the trip is shorter",
        (ComputeInFloat32("trip_length"),),
        Scores(0.997, 0.084, 0.997),
    ),
}

FLOAT32: dict[str, Truth] = {}

TRUTHS = BFLOAT16 | FLOAT32

# The programs without a fault, and why they are suspicious.
SUSPICIOUS: dict[str, str] = {}
