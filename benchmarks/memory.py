"""How much memory does the step of an optimizer take, and the training of small models in each precision?

    python benchmarks/memory.py [--quick] [--json FILE]

Peaks of processes, on the first GPU or else on the host, each variant in its own process. "kmp, sampled" also measures
the update of every step; `GradientHistogram` does so with every tenth sample.
"""

from measuring import SampledStep, Step, main, modes_of, shapes_of, variants_in

from kmp.bench.measurement import comparison, in_new_process, peak_memory
from kmp.bench.models import BARE, OURS, compiled_model, convolutional, mlp, timed_training, transformer

SAMPLED = "kmp, sampled"
POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")
MODELS = {"MLP": (mlp, 512), "conv net": (convolutional, 32), "transformer block": (transformer, 128)}


def measure(is_quick):
    """Yields the memory of the step in each mode, then that of the trainings under XLA."""
    for name in ("8 of 512x512",) if is_quick else ("8 of 2048x2048", "ResNet-50"):
        for mode in modes_of(is_quick):
            variants = [BARE, OURS, SAMPLED] if is_quick else [*variants_in(mode), SAMPLED]
            peaks = {variant: [in_new_process(memory_of_step, variant, name, mode)] for variant in variants}
            yield comparison("peak memory", f"Adam, {name}", mode, peaks, "B")
    for name in () if is_quick else MODELS:
        peaks = {policy: [in_new_process(memory_of_training, policy, name)] for policy in POLICIES}
        yield comparison("training memory", name, "XLA", peaks, "B")


def memory_of_step(variant, name, mode):
    """Returns the bytes that variables, gradients and steps add to the peak memory of this process, a new one."""
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


def memory_of_training(policy, name):
    """Returns the bytes that a training adds to the peak memory of this process, a new one."""
    train("float32", mlp(256))  # excludes what happens once per process
    before = peak_memory()
    make_task, width = MODELS[name]
    train(policy, make_task(width))
    return peak_memory() - before


def train(policy, task):
    """Trains a model under XLA for two steps and one more."""
    model = compiled_model(task, policy, OURS if policy == "mixed_float16" else BARE, "XLA")
    timed_training(model, task, 2)()


if __name__ == "__main__":
    main(measure, __doc__)
