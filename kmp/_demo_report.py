"""What the demo shows: a progress bar, a table with the reason for what it says, and two pictures."""

import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kmp import _demo
from kmp._demo import BATCH_SIZE, LABEL_WEIGHT, SEEDS, Result, Way
from kmp._formats import FLOAT16

Results = dict[Way, list[Result]]


def run(console: Console, dataset: str, policy: str, steps: int, out: Path) -> Results:
    """Trains in every way with every seed, shows what came of it, and leaves logs and pictures in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    parts = _demo.load(dataset)
    ways = _demo.ways(policy)
    with _progress(console) as progress:
        task = progress.add_task("", total=len(ways) * len(SEEDS) * steps)
        results: Results = {way: [] for way in ways}
        for seed in SEEDS:
            for way in ways:
                progress.update(task, description=f"{way.name}, seed {seed}")
                folder = out / way.name.replace(",", "").replace(" ", "-") / f"seed-{seed}"
                results[way].append(_demo.train(way, seed, steps, parts, folder, lambda: progress.advance(task)))
    console.print(table(results))
    for line in reasons(results):
        console.print(line)
    for picture in pictures(results, out):
        console.print(f"Picture: {picture}")
    console.print(f"Logs, also for `tensorboard --logdir {out}`: {out}")
    return results


def table(results: Results) -> Table:
    """Returns the table of all ways, means over the seeds with the range in brackets."""
    shown = Table(title=f"One model, {len(SEEDS)} seeds each: mean (lowest to highest)", title_justify="left")
    shown.add_column("trained in")
    for name in (
        "validation\naccuracy",
        "gradients\nzero",
        "of them\nflushed",
        "steps\nskipped",
        "final\nscale",
        "seconds",
    ):
        shown.add_column(name, justify="right")
    baseline = _mean(results[next(iter(results))], lambda result: result.zeros)
    for way, trained in results.items():
        zeros = _mean(trained, lambda result: result.zeros)
        shown.add_row(
            way.name.replace(", ", ",\n"),
            _range([result.accuracy for result in trained]),
            f"{zeros:.1%}",
            "" if way.policy == "float32" else f"{max(0.0, zeros - baseline):.1%}",
            " ".join(str(result.snapshot.overflow_count) for result in trained),
            "\n".join(sorted({_power(result.snapshot.loss_scale) for result in trained})) if way.scaled else "none",
            f"{_mean(trained, lambda result: result.seconds):.1f}",
        )
    return shown


def reasons(results: Results) -> Iterable[str]:
    """Yields the sentences that say why the table looks as it does."""
    gradient = LABEL_WEIGHT / BATCH_SIZE
    yield (
        f"Why: the label's loss has weight {LABEL_WEIGHT:g}, and the mean over a batch of {BATCH_SIZE} divides by "
        f"{BATCH_SIZE}: no gradient at its output exceeds {gradient:.1e}. float16 rounds to zero what is below half of "
        f"its smallest number, 2^-24 = {FLOAT16.smallest_subnormal:.1e}: every error of a predicted probability below "
        f"{FLOAT16.smallest_subnormal / 2 / gradient:.2f} leaves no trace."
    )
    yield (
        "'Flushed' is the share that is zero beyond float32's own, where ReLU switched units off. The loss scale lifts "
        "all gradients into float16's range; it grows until one overflows, and that step is skipped."
    )


def pictures(results: Results, out: Path) -> list[Path]:
    """Draws the last way's first training: gradient exponents, and the loss scale; returns the two files."""
    from kmp import plots

    shown = list(results.values())[-1][0].run
    drawn = {
        "gradient_exponents.png": plots.gradient_exponents(shown.histograms[len(shown.histograms) // 2]),
        "loss_scale.png": plots.loss_scale(shown),
    }
    for name, ax in drawn.items():
        plots.save(ax, out / name)
    return [out / name for name in drawn]


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"))
    return Progress(*columns, TimeRemainingColumn(), console=console)


def _mean(results: list[Result], of: Callable[[Result], float]) -> float:
    return statistics.fmean(map(of, results))


def _range(values: list[float]) -> str:
    return f"{statistics.fmean(values):.3f}\n({min(values):.3f} to {max(values):.3f})"


def _power(scale: float) -> str:
    mantissa, exponent = scale.hex().split("p")
    return f"2^{int(exponent)}" if float.fromhex(mantissa) == 1.0 else f"{scale:g}"
