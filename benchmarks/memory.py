"""How much memory does the step of an optimizer take?

    python benchmarks/memory.py [--quick] [--json FILE]

Peaks of processes, on the first GPU or else on the host, each variant in its own process. "kmp,
sampled" also measures the update of every step; `GradientHistogram` does so with every tenth
sample.
"""

from measuring import SampledStep, Step, main, modes_of, shapes_of, variants_in

from kmp_bench.measurement import comparison, in_new_process, peak_memory
from kmp_bench.models import BARE, OURS

SAMPLED = "kmp, sampled"


def measure(is_quick):
    """Yields the memory of the step in each mode."""
    for name in ("8 of 512x512",) if is_quick else ("8 of 2048x2048", "ResNet-50"):
        for mode in modes_of(is_quick):
            variants = [BARE, OURS, SAMPLED] if is_quick else [*variants_in(mode), SAMPLED]
            peaks = {
                variant: [in_new_process(memory_of_step, variant, name, mode)]
                for variant in variants
            }
            yield comparison("peak memory", f"Adam, {name}", mode, peaks, "B")


def memory_of_step(variant, name, mode):
    """Returns the bytes that variables, gradients and steps add to the peak memory.

    Call it in a new process.
    """
    Step(BARE, [(2,)], mode)()  # excludes what happens once per process
    before, shapes = peak_memory(), shapes_of(name)
    step = SampledStep(shapes, mode) if variant == SAMPLED else Step(variant, shapes, mode)
    for _ in range(4):
        if variant == SAMPLED:
            step.arm()
            step.sampled()
            step.measure_update()
        else:
            step()
    return peak_memory() - before


if __name__ == "__main__":
    main(measure, __doc__)
