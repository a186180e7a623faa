"""What does loss scaling add to an optimizer's step, and to its first call?

    python benchmarks/optimizer_step.py [--quick] [--json FILE]

Relative to the unwrapped optimizer, measured alternately in five new processes: medians and ranges
over the processes.
"""

import functools
import itertools

from measuring import Step, main, modes_of, shapes_of, variants_in

from kmp_bench.measurement import alternate, comparison, in_new_process

PROCESSES, ROUNDS = 5, 5


def measure(is_quick):
    """Yields the first calls and the steps of each set of variables, optimizer and mode."""
    sets = ("8 of 512x512",) if is_quick else ("8 of 2048x2048", "ResNet-50", "600 small")
    optimizers = ("Adam",) if is_quick else ("Adam", "SGD momentum")
    rounds, processes = (2, 1) if is_quick else (ROUNDS, PROCESSES)
    for name, inner, mode in itertools.product(sets, optimizers, modes_of(is_quick)):
        case = f"{inner}, {name}"
        seconds = [in_new_process(seconds_of, name, inner, mode, rounds) for _ in range(processes)]
        first_calls, steps = {}, {}
        for variant in variants_in(mode):
            first_calls[variant] = [own[variant][0] for own in seconds]
            steps[variant] = [own[variant][1] for own in seconds]
        yield comparison("first call", case, mode, first_calls)
        yield comparison("optimizer step", case, mode, steps)


def seconds_of(name, inner, mode, rounds):
    """Returns the seconds of the first call, and the median of those of a step, of each variant."""
    shapes = shapes_of(name)
    for variant in variants_in(mode):
        Step(variant, shapes[:2], mode, inner)()  # excludes what happens once per process
    steps = {variant: Step(variant, shapes, mode, inner) for variant in variants_in(mode)}
    first_calls = {variant: step.seconds() for variant, step in steps.items()}
    seconds = alternate(
        {variant: functools.partial(step.seconds, 3) for variant, step in steps.items()}, rounds
    )
    return {
        result.variant: (first_calls[result.variant], result.value)
        for result in comparison("", "", "", seconds)
    }


if __name__ == "__main__":
    main(measure, __doc__)
