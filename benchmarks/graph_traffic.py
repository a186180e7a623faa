"""How many kernels does a training step run in graph mode, and how many bytes do they move?

    python benchmarks/graph_traffic.py [MODEL ...] [--policy POLICY ...] [--scaling SCALING ...]
    python benchmarks/graph_traffic.py resnet50 bert --policy float32 mixed_float16 --types 10

Counted in TensorFlow's graph, so it needs no GPU, and the numbers are the same in each run: compare
them with each other. `kmp/traffic/graph_traffic.py` has the rules. The part "XLA" is an estimate;
`compiled` is kmp with `jit_compile=True`. "Transposes" are those that TensorFlow adds on a GPU.
"""

import argparse
import gc
import itertools
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf
from rich.console import Console
from rich.progress import track
from rich.table import Table
from step_models import DEFAULT_BATCH, MODELS, SCALINGS, compiled_step

from kmp.traffic import Traffic, traffic_of
from kmp.utils import atomic_files
from kmp_bench.results import header

POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")
QUICK = "small"
_COLUMNS = (
    *("kernels", "of these XLA", "GB", "of these float32", "GB kept"),
    *("transposes", "GB of these", "host decisions"),
)


@dataclass(frozen=True)
class Count:
    """What one step costs, and whose step it is."""

    model: str
    batch: int
    policy: str
    scaling: str
    traffic: Traffic


def main(arguments: Sequence[str] | None = None) -> None:
    """Counts, writes the results after each step, and prints them as tables."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    large = [name for name in MODELS if name != QUICK]
    models = [QUICK] if parsed.quick else parsed.models or large
    unknown = set(models) - set(MODELS)
    if unknown:
        parser.error(f"unknown model {min(unknown)!r}: choose from {', '.join(MODELS)}")

    console = Console(width=120, highlight=False, markup=False)
    cases = list(itertools.product(models, parsed.policy, parsed.scaling))
    counts: list[Count] = []
    for model, policy, scaling in track(cases, "Tracing", console=console, transient=True):
        counts.append(count(model, policy, scaling, parsed.batch or DEFAULT_BATCH[model]))
        if parsed.json:
            results = [asdict(each) for each in counts]
            atomic_files.write_json(parsed.json, {**header(), "results": results})
        keras.backend.clear_session()
        gc.collect()  # Keras' models are reference cycles
    console.print(table_of(counts))
    for each in counts if parsed.types else ():
        console.print(types_table(each, parsed.types))


def _parser() -> argparse.ArgumentParser:
    description, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    models_help = f"{', '.join(MODELS)}; default: all but {QUICK}"
    parser.add_argument("models", nargs="*", metavar="MODEL", help=models_help)
    parser.add_argument("--policy", nargs="+", choices=POLICIES, default=["mixed_float16"])
    parser.add_argument("--scaling", nargs="+", choices=SCALINGS, default=list(SCALINGS))
    parser.add_argument("--batch", type=int, metavar="N", help="default: as in step_models.py")
    parser.add_argument(
        "--types",
        type=int,
        default=0,
        metavar="N",
        help="also list the N largest types of operation",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results as JSON")
    parser.add_argument("--quick", action="store_true", help="count the small model only")
    return parser


def count(model: str, policy: str, scaling: str, batch: int) -> Count:
    """Traces a training step and returns what it costs."""
    train_step, specs = compiled_step(model, policy, scaling, batch)
    graph = tf.function(train_step, autograph=False).get_concrete_function(*specs).graph
    return Count(model, batch, policy, scaling, traffic_of(graph))


def table_of(counts: Sequence[Count]) -> Table:
    """Returns a table with a row for each step."""
    table = Table("model", "batch", "policy", "scaling", box=None)
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    for each in counts:
        traffic = each.traffic
        table.add_row(
            *(each.model, str(each.batch), each.policy, each.scaling),
            f"{traffic.kernels:,}",
            f"{traffic.compiled.kernels:,}" if traffic.compiled_calls else "",
            _gigabytes(traffic.bytes),
            _gigabytes(traffic.float32_bytes),
            _gigabytes(traffic.kept_bytes),
            f"{traffic.transposed.kernels:,}",
            _gigabytes(traffic.transposed.bytes),
            str(traffic.host_decisions),
        )
    return table


def types_table(each: Count, most: int) -> Table:
    """Returns a table with a row for each of the types of operations that move the most bytes."""
    title = f"{each.model}, {each.policy}, {each.scaling}"
    table = Table("type of operation", title=title, title_justify="left", box=None)
    for name in ("kernels", "GB", "of these float32"):
        table.add_column(name, justify="right")
    for kind, cost in list(each.traffic.by_type.items())[:most]:
        numbers = _gigabytes(cost.bytes), _gigabytes(cost.float32_bytes)
        table.add_row(kind, f"{cost.kernels:,}", *numbers)
    return table


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f}"


if __name__ == "__main__":
    logging.getLogger("kmp").setLevel(logging.ERROR)  # it reports the best policy for this machine
    tf.config.set_visible_devices([], "GPU")  # the graph is only traced
    main()
