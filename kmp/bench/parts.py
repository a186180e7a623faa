"""The parts of `kmp bench`, and how much each measures."""

from collections.abc import Iterator, Sequence

from kmp.bench.measurement import MODES, Measurement
from kmp.bench.networks import compare
from kmp.bench.precision import measure_operations, measure_small_models
from kmp.policy import hardware

PARTS = ("precision", "resnet", "bert")


def measure(
    only: Sequence[str] = (), is_quick: bool = False, mode: str | None = None, batch: int | None = None
) -> Iterator[list[Measurement]]:
    """Measures what each precision gains on this machine, and yields each comparison when it is done.

    Args:
        only: Names in `PARTS`; all of them on a GPU if empty, and `"precision"` on a CPU or if it has to be quick.
        is_quick: Whether to measure fewer steps and rounds, and under XLA only.
        mode: One of `MODES`, to train in this one only.
        batch: Batch size of the large networks; `None` for their defaults.
    """
    modes = [mode] if mode else ["XLA"] if is_quick else list(MODES)
    for part in only or (PARTS if hardware().gpus and not is_quick else PARTS[:1]):
        if part == "precision":
            yield from measure_operations()
            yield from measure_small_models(modes, *((20, 2) if is_quick else (250, 5)))
            continue
        for each in modes:
            yield from compare(
                "ResNet-50" if part == "resnet" else "BERT-base", each, batch, *((2, 1) if is_quick else (20, 3))
            )
