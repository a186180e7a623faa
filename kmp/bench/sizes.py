"""How much `kmp bench` measures: the full and the quick size."""

from dataclasses import dataclass

from kmp.bench import fit_time
from kmp.bench.optimizer_step import INNER, MODES


@dataclass(frozen=True)
class Size:
    """What to measure, and how often.

    Args:
        sets: Names in `optimizer_step.SETS`: the sets of variables whose step is timed.
        inner: Names in `optimizer_step.INNER`: the inner optimizers whose step is timed.
        memory_sets: Names in `optimizer_step.SETS`: the sets whose memory is measured, each variant in its own process.
        modes: Modes of the slow parts: memory, fit and the two networks.
        processes: Number of new processes in which the optimizer step is timed. With 1 it is timed in this process.
        repeats: Rounds of optimizer steps, which the processes share.
        fit_tasks: Names in `fit_time.TASKS`: the models whose epochs are timed.
        fit_steps: Steps of these epochs. The callbacks read once in 250 steps.
        model_size: Factor for the width of the models that are trained in each precision, at least 1.
        steps: Training steps per round, in each precision.
        turns: Rounds of training, and of a log's analysis.
        has_model_memory: Whether to measure the memory of each small model in each precision.
        sampled: A name in `optimizer_step.SETS`: the set whose gradients are sampled.
        side: As in `sampling_cost.measure_cost`.
        first_calls: As in `sampling_cost.measure_cost`.
        counts: `counts` of `growth.measure_variables`.
        replicas: `replicas` of `growth.measure_replicas`.
        has_networks: Whether ResNet-50 and BERT are among the default parts on a GPU.
        network_steps: `steps` of `resnet_bert.compare`.
        network_turns: `turns` of `resnet_bert.compare`.
        batch: `batch` of `resnet_bert.compare`; `resnet_bert.default_batch` if `None`.
    """

    sets: tuple[str, ...]
    inner: tuple[str, ...]
    memory_sets: tuple[str, ...]
    modes: tuple[str, ...]
    processes: int
    repeats: int
    fit_tasks: tuple[str, ...]
    fit_steps: int
    model_size: int
    steps: int
    turns: int
    has_model_memory: bool
    sampled: str
    side: int
    first_calls: int
    counts: tuple[int, ...]
    replicas: tuple[int, ...]
    has_networks: bool
    network_steps: int
    network_turns: int
    batch: int | None = None


FULL = Size(
    sets=("8 of 2048x2048", "ResNet-50", "600 small"),
    inner=tuple(INNER),
    memory_sets=("8 of 2048x2048", "ResNet-50"),
    modes=tuple(MODES),
    processes=5,
    repeats=25,
    fit_tasks=tuple(fit_time.TASKS),
    fit_steps=250,
    model_size=2,
    steps=250,
    turns=5,
    has_model_memory=True,
    sampled="ResNet-50",
    side=2048,
    first_calls=5,
    counts=(50, 500, 2000, 5000),
    replicas=(1, 2, 4),
    has_networks=True,
    network_steps=20,
    network_turns=3,
)
QUICK = Size(
    sets=("8 of 512x512", "60 small"),
    inner=("Adam",),
    memory_sets=("8 of 2048x2048",),
    modes=("XLA",),
    processes=1,
    repeats=9,
    fit_tasks=("MLP of width 128",),
    fit_steps=250,
    model_size=1,
    steps=20,
    turns=2,
    has_model_memory=False,
    sampled="8 of 512x512",
    side=512,
    first_calls=1,
    counts=(10, 40),
    replicas=(1, 2),
    has_networks=False,
    network_steps=2,
    network_turns=1,
)
