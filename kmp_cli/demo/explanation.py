"""What the demo's results show, in sentences: each follows from what was measured."""

import math
import statistics
from collections.abc import Iterator, Sequence

from kmp.utils.float_formats import BFLOAT16, FLOAT16
from kmp_cli.demo.experiment import MASK, Result, Results, Setup


def explanation(results: Results) -> Iterator[str]:
    """Yields paragraphs: the fault of the network, and what Keras and kmp make of it."""
    (_, in_float32), *others = results.items()
    yield " ".join(_fault([setup.policy for setup, _ in others]))
    for setup, trained in others:
        if setup.with_kmp:
            yield " ".join(_outcome_of_kmp(setup, trained, in_float32))
        else:
            yield " ".join(_outcome_of_keras(setup, trained))


def _fault(policies: Sequence[str]) -> Iterator[str]:
    yield (
        "The network classifies images of digits by attention over their columns. Its mask adds"
        f" {MASK:g} to the scores of blank columns, a constant of many published models."
    )
    formats = {policy.removeprefix("mixed_") for policy in policies}
    if FLOAT16.name in formats:
        yield (
            f"float16 ends at {FLOAT16.max:g}: there the constant is infinite, and 0 times infinity"
            " is NaN."
        )
    if BFLOAT16.name in formats:
        yield "It is finite in bfloat16, which has the exponent range of float32."


def _outcome_of_keras(setup: Setup, trained: Sequence[Result]) -> Iterator[str]:
    accuracy = f"{mean_accuracy(trained):.2f}"
    losses = [loss for result in trained for loss in result.losses]
    if not all(map(math.isnan, losses)):
        yield f"{setup.name}: the accuracy is {accuracy}."
        return
    is_any_updated = any(result.updates for result in trained)
    skipped = "" if is_any_updated else ", and Keras skips every step"
    yield f"{setup.name}: the loss is NaN{skipped}."
    if all(result.accuracy == result.accuracies[0] for result in trained):
        yield f"The accuracy stays at {accuracy}: all outputs are NaN, and count as the digit 0."
    printed = dict.fromkeys(text for result in trained for text in result.warnings)
    yield f"All that warns of it: {'; '.join(printed)}." if printed else "Nothing warns of it."


def _outcome_of_kmp(
    setup: Setup, trained: Sequence[Result], in_float32: Sequence[Result]
) -> Iterator[str]:
    repairs = [repair for result in trained for repair in result.repairs]
    outcome = "kmp repairs nothing"
    if repairs:
        layers = ", ".join(dict.fromkeys(repair.names for repair in repairs))
        repaired = sum(bool(result.repairs) for result in trained)
        runs = "each run" if repaired == len(trained) else f"{repaired} of {len(trained)} runs"
        outcome = f"in {runs} kmp sets {layers} to float32, and trains on"
    yield f"{setup.name}: {outcome}."
    yield (
        f"The accuracy is {mean_accuracy(trained):.2f}, and {mean_accuracy(in_float32):.2f} in"
        " float32."
    )


def warnings_of_repairs(results: Results) -> list[str]:
    """Returns the different warnings of kmp that report a repair, as Python prints them."""
    found: dict[str, None] = {}
    for trained in results.values():
        for result in trained:
            layers = {repr(path) for repair in result.repairs for path in repair.layers}
            for text in result.warnings:
                if any(layer in text for layer in layers):
                    found[text] = None
    return list(found)


def mean_accuracy(trained: Sequence[Result]) -> float:
    """Returns the mean of the validation accuracies of several seeds."""
    return statistics.fmean(result.accuracy for result in trained)
