"""One sentence: what limits the gain of 16 bits for a model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kmp.conversion.step_traffic import OUTSIDE
from kmp.traffic import Traffic
from kmp.utils.float_formats import FLOAT32
from kmp_bench.step_comparison import GRAPH, XLA, Step, StepComparison, megabytes, milliseconds

# Tensor Cores are 8 to 16 times as fast as float32, TF32 half of that, and bytes halve: with this
# gain, no single cause is left that is worth a search.
_FAST = 1.5
_FASTER = 1.1  # a smaller gain may be noise
# Of the bytes of a 16-bit step. The networks of docs/speed.md have at most 0.11 under `enable`.
_MUCH_FLOAT32 = 0.3
_MANY_UNALIGNED = 0.5  # of the layers with matrix products; the input and the classes often are
_LAUNCHES = 1 / 3  # of the time of a step


@dataclass(frozen=True)
class _Facts:
    """What the sentences are made from.

    Args:
        comparison: What was measured and counted.
        step: The step in 16 bits that is judged: as Keras trains the model, the fastest on a GPU.
        reference: The step in float32 in the same mode.
    """

    comparison: StepComparison
    step: Step
    reference: Step

    @property
    def is_on_gpu(self) -> bool:
        return bool(self.comparison.device.gpu)

    @property
    def speedup(self) -> float:
        return self.reference.median / self.step.median

    @property
    def traffic(self) -> Traffic | None:
        """What the step costs in graph mode."""
        return self.comparison.traffic.get(self.step.policy)


class _Limit(NamedTuple):
    """What limits a step: the beginning of the sentence, the evidence, and whether it is counts."""

    cause: str
    evidence: str
    is_counted: bool = True


def limit_of(comparison: StepComparison) -> str:
    """Returns one sentence: what limits the gain of 16 bits for a model, or that nothing does.

    On a GPU it is about times that were measured there. A CPU emulates float16, so there it is
    about what was counted in the graph of the step.
    """
    in_16_bits = [each for each in comparison.steps if each.policy != FLOAT32.name]
    trained = [each for each in in_16_bits if each.seconds]
    if not trained:
        reason = in_16_bits[0].error if in_16_bits else "not measured"
        return f"16 bits do not train this model: {reason}"
    mode = GRAPH if comparison.xla_off else XLA
    candidates = [each for each in trained if each.mode == mode] or trained
    is_on_gpu = bool(comparison.device.gpu)
    # On a CPU the formats move the same bytes, and the times say nothing about a GPU.
    step = min(candidates, key=_median) if is_on_gpu else candidates[0]
    reference = comparison.step(FLOAT32.name, step.mode) or comparison.steps[0]
    facts = _Facts(comparison, step, reference)
    limits = (find(facts) for find in _LIMITS)
    limit = next(limit for limit in limits if limit)
    is_judged_by_counts = limit.is_counted and not is_on_gpu
    source = " (by counts, as TensorFlow sees no GPU)" if is_judged_by_counts else ""
    return f"{limit.cause}{source}: {limit.evidence}."


def _median(step: Step) -> float:
    return step.median


def _runs_eagerly(facts: _Facts) -> _Limit | None:
    if not facts.comparison.runs_eagerly:
        return None
    return _Limit(
        "The model is compiled with run_eagerly=True",
        "Python starts each of its operations, and the times above are without that",
        is_counted=False,
    )


def _waits_for_data(facts: _Facts) -> _Limit | None:
    seconds, step = facts.comparison.data_seconds, facts.step
    if not facts.is_on_gpu:  # where even the CPU waits, a GPU does
        step = min((each for each in facts.comparison.steps if each.seconds), key=_median)
    if seconds is None or seconds <= step.median:
        return None
    where = "" if facts.is_on_gpu else " on this CPU"
    return _Limit(
        "Waiting for data",
        f"the data set takes {milliseconds(seconds)} for a batch, a step of {step.policy} only"
        f" {milliseconds(step.median)}{where}",
        is_counted=False,
    )


def _is_slower_without_xla(facts: _Facts) -> _Limit | None:
    comparison, step = facts.comparison, facts.step
    compiled = comparison.step(step.policy, XLA)
    if not facts.is_on_gpu or not comparison.xla_off or compiled is None:
        return None
    if step.median < _FASTER * compiled.median:
        return None
    return _Limit(
        f"XLA is off ({comparison.xla_off})",
        f"a step of {step.policy} takes {milliseconds(step.median)} in graph mode, and"
        f" {milliseconds(compiled.median)} with jit_compile=True",
    )


def _is_fast(facts: _Facts) -> _Limit | None:
    if not facts.is_on_gpu or facts.speedup < _FAST:
        return None
    return _Limit("Nothing", _speedup(facts))


def _has_no_tensor_cores(facts: _Facts) -> _Limit | None:
    device = facts.comparison.device
    if device.has_tensor_cores:
        return None
    return _Limit("The GPU", f"{device.gpu} has no Tensor Cores, so 16 bits save memory, not time")


def _waits_for_launches(facts: _Facts) -> _Limit | None:
    traffic, device = facts.traffic, facts.comparison.device
    if traffic is None:
        return None
    launches = traffic.kernels * device.launch_seconds
    moves = traffic.bytes / device.bytes_per_second
    # On a GPU the time of the step shows how much it waits; the rest may be arithmetic.
    if launches <= moves or (facts.is_on_gpu and launches < _LAUNCHES * facts.step.median):
        return None
    off = facts.comparison.xla_off
    remedy = "" if off else "; XLA fuses some of them, and a larger batch has as many"
    return _Limit(
        f"XLA is off ({off}), and the batch is small" if off else "Small batch",
        f"launching the {traffic.kernels:,} kernels of a step of {facts.step.policy} in graph mode"
        f" takes about {milliseconds(launches)}, moving its {megabytes(traffic.bytes)} MB"
        f" {milliseconds(moves)} ({device}){remedy}",
    )


def _moves_float32(facts: _Facts) -> _Limit | None:
    traffic = facts.traffic
    if traffic is None or traffic.float32_bytes < _MUCH_FLOAT32 * traffic.bytes:
        return None
    name, cost = max(traffic.by_owner.items(), key=lambda item: item[1].float32_bytes)
    return _Limit(
        "Float32 bytes",
        f"{traffic.float32_bytes / traffic.bytes:.0%} of the bytes of a step of"
        f" {facts.step.policy} in graph mode are float32, most of them in {name or OUTSIDE}"
        f" ({cost.float32_bytes / traffic.bytes:.0%})",
    )


def _has_odd_dimensions(facts: _Facts) -> _Limit | None:
    count, unaligned = facts.comparison.tensor_core_layers, facts.comparison.unaligned
    if not unaligned or len(unaligned) < _MANY_UNALIGNED * count:
        return None
    name, dimensions = next(iter(unaligned.items()))
    return _Limit(
        "Dimensions",
        f"{len(unaligned)} of {count} layers with matrix products or convolutions have some that"
        f" are not divisible by 8, such as {name} ({', '.join(dimensions)}), so Tensor Cores are"
        " slow or not used",
    )


def _is_unknown(facts: _Facts) -> _Limit:
    if facts.is_on_gpu:
        is_faster = facts.speedup >= _FASTER
        return _Limit("Nothing" if is_faster else "Nothing that was looked for", _speedup(facts))
    traffic = facts.comparison.traffic
    here, before = traffic.get(facts.step.policy), traffic.get(facts.reference.policy)
    if here is None or before is None or not here.bytes:
        return _Limit("Unknown", "the step cannot be traced to count what it moves")
    return _Limit(
        "Nothing that can be counted",
        f"{facts.step.policy} moves {megabytes(here.bytes)} MB in a step in graph mode, float32"
        f" {before.bytes / here.bytes:.1f} times as many, and only a GPU shows how much faster that"
        " is",
    )


def _speedup(facts: _Facts) -> str:
    how = "under XLA" if facts.step.mode == XLA else "in graph mode"
    return f"{facts.step.policy} is {facts.speedup:.2f} times as fast as float32 {how}"


# The first that applies, in the order in which they hide each other: the gain of 16 bits does not
# show while a step waits, and what Tensor Cores gain does not while it moves float32.
_LIMITS: tuple[Callable[[_Facts], _Limit | None], ...] = (
    _runs_eagerly,
    _waits_for_data,
    _is_slower_without_xla,
    _is_fast,
    _has_no_tensor_cores,
    _waits_for_launches,
    _moves_float32,
    _has_odd_dimensions,
    _is_unknown,
)
