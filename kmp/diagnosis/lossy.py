"""What an operation does with numbers for which 16 bits are too few, in words."""

from kmp.records.replay import LossyOperation
from kmp.utils.float_formats import FORMATS_16_BIT

_FUNCTIONS = {
    "Cos": "cosine",
    "Sigmoid": "sigmoid",
    "Sin": "sine",
    "Tan": "tangent",
    "Tanh": "hyperbolic tangent",
}


def too_few_bits(name: str) -> str:
    """Returns that a 16-bit format is too coarse, without a reason."""
    return f"{name} has too few bits for what it computes"


def lossy(found: LossyOperation) -> str:
    """Returns what an operation does with numbers for which 16 bits are too few."""
    dtype, largest = found.dtype, f"numbers up to {found.largest_input:.5g}"
    bits = FORMATS_16_BIT[dtype].fraction_bits + 1 if dtype in FORMATS_16_BIT else 0
    kept = f"of which {dtype} keeps {bits} bits"
    function = _FUNCTIONS.get(found.operation, found.operation)
    if found.kind == "cancellation" and not found.typical:
        return f"subtracts {largest} that are equal in {dtype}"
    if found.kind == "cancellation":
        return f"subtracts {largest} that differ by about {found.typical:.2g}, {kept}"
    if found.kind == "phase":
        return f"takes the {function} of {largest}, {kept}"
    if found.kind == "index":
        return f"casts {largest} to integers, {kept}"
    if found.kind == "saturation":
        return (
            f"takes a {function} that is exactly 1 in {dtype}, for {found.share:.0%} of its values"
        )
    return f"adds terms of about {found.typical:.2g} to {largest}, {kept}"
