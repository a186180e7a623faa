"""What the steps of one model take in each precision, displayed in terminals and notebooks."""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kmp.conversion.step_traffic import OUTSIDE
from kmp.traffic import Cost, Traffic
from kmp.utils.displayed import Displayed
from kmp.utils.names import printable
from kmp_bench.measurement import Measurement, comparison

GRAPH, XLA = "graph", "XLA"
_MOST_CLASSES = 6


@dataclass(frozen=True)
class Step:
    """The training step of a model in one precision and mode.

    Args:
        policy: The dtype policy.
        mode: `"graph"` or `"XLA"`.
        seconds: The seconds of a step, for each round; empty if it failed.
        memory: On a GPU: the bytes of the weights and of the optimizer, and the peak of what a step
            needs in addition. `None` on a CPU, where it is not measured.
        traffic: What the step in graph mode would cost on a GPU, counted. `None` under XLA, and if
            the step cannot be traced.
        error: Why there are no times.

    Example:
    >>> from kmp_bench import Step
    >>> Step("float32", "graph", seconds=(0.5, 0.25, 0.75)).median
    0.5
    """

    policy: str
    mode: str
    seconds: tuple[float, ...] = ()
    memory: int | None = None
    traffic: Traffic | None = None
    error: str = ""

    @property
    def median(self) -> float:
        """The median of the seconds."""
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Device:
    """What the steps run on, and how long a GPU takes to launch a kernel and to move bytes.

    Args:
        gpu: The name of the GPU; empty for the CPU.
        has_tensor_cores: Whether the GPU has Tensor Cores for float16; true for the CPU.
        launch_seconds: The seconds of a kernel that moves almost nothing, in graph mode.
        bytes_per_second: The memory bandwidth. Both are measured on a GPU, else assumed.

    Example:
    >>> from kmp_bench import Device
    >>> Device("T4", launch_seconds=8e-6, bytes_per_second=2.5e11)
    Device(gpu='T4', has_tensor_cores=True, launch_seconds=8e-06, bytes_per_second=250000000000.0)
    """

    gpu: str = ""
    has_tensor_cores: bool = True
    # Of a current GPU. TensorFlow's executor takes a few microseconds for an operation, and the
    # data sheets say 0.3 TB/s for a T4, 2.0 for an A100 of 80 GB and 3.4 for an H100.
    launch_seconds: float = 5e-6
    bytes_per_second: float = 1e12

    def __str__(self) -> str:
        source = "measured here" if self.gpu else "assumed"
        speed = f"{self.launch_seconds * 1e6:.1f} µs a launch, {self.bytes_per_second / 1e12:.2g}"
        return f"{source}: {speed} TB/s"


@dataclass(frozen=True, repr=False)
class StepComparison(Displayed):
    """The result of `kmp_bench.compare`, which displays as tables in terminals and notebooks.

    Args:
        model: The model's name.
        batch: The shapes and dtypes of the batch.
        steps: The steps, that of float32 in graph mode first.
        device: What they ran on.
        xla_off: Why Keras trains the model without XLA; empty if it compiles it, or would on a GPU.
        runs_eagerly: Whether the model is compiled with `run_eagerly=True`. The times are those
            without it.
        tensor_core_layers: The number of layers with matrix products or convolutions.
        unaligned: Their dimensions that are not divisible by 8, by the name of the layer.
        data_seconds: The seconds that the data set takes for a batch. `None` without a data set.
        notes: Sentences on what was assumed.
        limit: One sentence: what limits the gain of 16 bits.

    Example:
    >>> from kmp_bench import Step, StepComparison
    >>> steps = Step("float32", "graph", (0.5,)), Step("mixed_float16", "graph", (0.25,))
    >>> compared = StepComparison("network", "32 x 8 float32", steps)
    >>> [(result.variant, result.ratio) for result in compared.measurements()]
    [('float32', None), ('mixed_float16', 0.5)]
    """

    model: str
    batch: str
    steps: tuple[Step, ...]
    device: Device = Device()
    xla_off: str = ""
    runs_eagerly: bool = False
    tensor_core_layers: int = 0
    unaligned: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    data_seconds: float | None = None
    notes: tuple[str, ...] = ()
    limit: str = ""

    def step(self, policy: str, mode: str) -> Step | None:
        """Returns the step of a policy and mode, if it was measured."""
        found = (each for each in self.steps if (each.policy, each.mode) == (policy, mode))
        return next((each for each in found if each.seconds), None)

    @property
    def traffic(self) -> dict[str, Traffic]:
        """What a step in graph mode costs, by policy."""
        return {step.policy: step.traffic for step in self.steps if step.traffic}

    def measurements(self) -> list[Measurement]:
        """Returns all numbers, each with its ratio to float32, for `kmp_bench.run`.

        The seconds of a step have their ratio to those of float32 in graph mode.
        """
        timed = [step for step in self.steps if step.seconds]
        times = {str(number): step.seconds for number, step in enumerate(timed)}
        results = [
            replace(result, mode=step.mode, variant=step.policy)
            for step, result in zip(timed, comparison("step", self.model, "", times), strict=True)
        ]
        peaks = [step for step in timed if step.memory is not None]
        for mode in dict.fromkeys(step.mode for step in peaks):
            by_policy = {step.policy: [step.memory or 0] for step in peaks if step.mode == mode}
            results += comparison("memory", self.model, mode, by_policy, "B")
        results += self._counted("kernels", {k: v.kernels for k, v in self.traffic.items()}, "")
        results += self._counted("bytes", {k: v.bytes for k, v in self.traffic.items()})
        kept = {policy: traffic.kept_bytes for policy, traffic in self.traffic.items()}
        results += self._counted("bytes kept for the backward pass", kept)
        for name in self._classes:
            costs = {k: v.by_owner.get(name, Cost()) for k, v in self.traffic.items()}
            label = name or OUTSIDE
            results += self._counted("bytes", {k: v.bytes for k, v in costs.items()}, "B", label)
            in_float32 = {policy: cost.float32_bytes for policy, cost in costs.items()}
            results += self._counted("float32 bytes", in_float32, "B", label)
        if self.data_seconds is not None:
            results.append(
                Measurement("data", self.model, "", "batch", self.data_seconds, "s", None)
            )
        return results

    def _counted(
        self, section: str, values: Mapping[str, int], unit: str = "B", case: str = ""
    ) -> list[Measurement]:
        by_policy = {policy: [value] for policy, value in values.items()}
        if not by_policy:
            return []
        return comparison(section, case or self.model, GRAPH, by_policy, unit or "operations")

    @property
    def _classes(self) -> list[str]:
        """The classes of layers, that with the most bytes in any precision first."""
        largest: dict[str, int] = {}
        for traffic in self.traffic.values():
            for name, cost in traffic.by_owner.items():
                largest[name] = max(largest.get(name, 0), cost.bytes)
        return sorted(largest, key=lambda name: -largest[name])

    def to_dict(self) -> dict[str, Any]:
        """Returns what was measured and counted as a dict for JSON."""
        return {
            "model": self.model,
            "batch": self.batch,
            "limit": self.limit,
            "notes": list(self.notes),
            "errors": {f"{step.policy}, {step.mode}": step.error for step in self._failed},
            "results": [asdict(result) for result in self.measurements()],
        }

    @property
    def _failed(self) -> list[Step]:
        return [step for step in self.steps if step.error]

    def __rich__(self) -> RenderableType:
        failed: dict[tuple[str, str], list[str]] = {}
        for step in self._failed:
            failed.setdefault((step.mode, step.error), []).append(step.policy)
        lines = [f"{mode} ({', '.join(by)}): {error}" for (mode, error), by in failed.items()]
        if self.data_seconds is not None:
            lines.append(f"The data set takes {milliseconds(self.data_seconds)} for a batch.")
        lines += self.notes
        title = _text(f"{self.model}: a training step, batch {self.batch}")
        tables: list[RenderableType] = [title, self._step_table(), ""]
        if self.traffic:
            title = _text("Counted in the graph of a step on a GPU, in MB (of these float32)")
            tables += [title, self._traffic_table(), ""]
        return Group(*tables, *map(_text, lines), "", _text(self.limit))

    def _step_table(self) -> Table:
        has_memory = any(step.memory is not None for step in self.steps)
        table = Table("policy", "mode", box=None, pad_edge=False)
        for name in ("step", "x float32 graph", *(["MB of memory"] if has_memory else [])):
            table.add_column(name, justify="right", no_wrap=True)
        results = iter(self.measurements())
        for step in self.steps:
            cells = [step.policy, step.mode, "failed" if step.error else "", ""]
            if step.seconds:
                cells[2:] = milliseconds(step.median), _ratio(next(results))
            if has_memory:
                cells.append("" if step.memory is None else megabytes(step.memory))
            table.add_row(*map(_text, cells))
        return table

    def _traffic_table(self) -> Table:
        """Returns what was counted: in all, and of the largest classes of layers."""
        table = Table(box=None, pad_edge=False)
        table.add_column("in graph mode", overflow="fold")
        counted = self.traffic.values()
        for policy in self.traffic:
            table.add_column(policy, justify="right", no_wrap=True)
        table.add_row("kernels", *(f"{each.kernels:,}" for each in counted))
        kept = [megabytes(each.kept_bytes) for each in counted]
        table.add_row("kept for the backward pass", *kept)
        classes = self._classes
        rows = {"moved": classes}
        rows |= {f"  {name or OUTSIDE}": [name] for name in classes[:_MOST_CLASSES]}
        if classes[_MOST_CLASSES:]:
            rows["  others"] = classes[_MOST_CLASSES:]
        for label, names in rows.items():
            costs = [_sum(traffic, names) for traffic in counted]
            cells = [f"{megabytes(cost.bytes)} ({megabytes(cost.float32_bytes)})" for cost in costs]
            table.add_row(*map(_text, (label, *cells)))
        return table


def milliseconds(seconds: float) -> str:
    """Returns a time as text: in milliseconds, with three digits."""
    return f"{seconds * 1e3:,.{0 if seconds >= 0.1 else 1 if seconds >= 0.01 else 2}f} ms"


def megabytes(count: float) -> str:
    """Returns a number of bytes as text: in MB, with three digits."""
    value = count / 1e6
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def _sum(traffic: Traffic, names: Iterable[str]) -> Cost:
    total = Cost()
    for name in names:
        total = total.plus(traffic.by_owner.get(name, Cost()))
    return total


def _ratio(result: Measurement) -> str:
    if result.ratio is None:
        return "1"
    low, high = result.ratio_range or (result.ratio, result.ratio)
    return f"{result.ratio:.2f} ({low:.2f}-{high:.2f})"


def _text(text: str) -> Text:
    return Text(printable(text))  # a model from a file may have any names
