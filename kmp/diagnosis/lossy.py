"""What an operation does with numbers for which 16 bits are too few, in words."""

from kmp.numerics import tensorflow_function
from kmp.numerics.losses import adds
from kmp.records.replay import LossyOperation
from kmp.utils.float_formats import FORMATS_16_BIT


def too_few_bits(name: str) -> str:
    """Returns that a 16-bit format is too coarse, without a reason."""
    return f"{name} has too few bits for what it computes"


def lossy(found: LossyOperation) -> str:
    """Returns what an operation does with numbers for which 16 bits are too few."""
    dtype, largest = found.dtype, f"numbers up to {found.largest_input:.5g}"
    bits = FORMATS_16_BIT[dtype].fraction_bits + 1 if dtype in FORMATS_16_BIT else 0
    kept = f"of which {dtype} keeps {bits} bits"
    function = tensorflow_function(found.operation)
    name = function.name if function else found.operation
    if found.kind == "cancellation" and not found.typical:
        return f"subtracts {largest} that are equal in {dtype}"
    if found.kind == "cancellation":
        return f"subtracts {largest} that differ by about {found.typical:.2g}, {kept}"
    if found.kind in ("phase", "amplification"):
        return f"takes the {name} of {largest}, {kept}"
    if found.kind == "index":
        return f"casts {largest} to integers, {kept}"
    if found.kind == "saturation":
        results = f"{found.share:.0%} of the results"
        return f"takes the {name} of {largest}, and {dtype} rounds {results} to its limit"
    if adds(function):
        return f"adds terms of about {found.typical:.2g} to {largest}, {kept}"
    varying = f"that vary by about {found.typical:.2g}"
    return f"takes the {name}, whose results are {largest} {varying}, {kept}"
