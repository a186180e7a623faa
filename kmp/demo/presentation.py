"""What the demo shows: a progress bar, a table with an explanation, two figures, and a report."""

import shlex
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kmp.demo import experiment
from kmp.demo.experiment import BATCH_SIZE, GROWTH_INTERVAL, LABEL_WEIGHT, SEEDS, Result, Variant
from kmp.utils import FLOAT16, as_power

Results = dict[Variant, list[Result]]


def run(console: Console, dataset: str, policy: str, steps: int, out: Path) -> Results:
    """Trains each variant with each seed, prints a comparison, and writes logs, figures and a report.

    Args:
        console: Where to print.
        dataset: As `name` of `experiment.load`.
        policy: As `mixed_policy` of `experiment.variants`.
        steps: Training steps of each run.
        out: Folder to write to.

    Returns:
        The results of each variant, one per seed.
    """
    out.mkdir(parents=True, exist_ok=True)
    parts = experiment.load(dataset)
    variants = experiment.variants(policy)
    with _progress(console) as progress:
        task = progress.add_task("", total=len(variants) * len(SEEDS) * steps)
        results: Results = {variant: [] for variant in variants}
        for seed in SEEDS:
            for variant in variants:
                progress.update(task, description=f"{variant.name}, seed {seed}")
                log_dir = out / variant.name.replace(",", "").replace(" ", "-") / f"seed-{seed}"
                result = experiment.train(variant, seed, steps, parts, log_dir, lambda: progress.advance(task))
                results[variant].append(result)
    console.print(table(results))
    for line in explanation(results):
        console.print(line, highlight=False)
    for path in save_figures(results, out):
        _print_path(console, f"Figure: {path}")
    _print_path(console, f"Report: {write_report(results, out)}")
    _print_path(console, f"Logs: {out}")
    _print_path(console, f"To view the logs: tensorboard --logdir {shlex.quote(str(out))}")
    return results


def table(results: Results) -> Table:
    """Returns a table of all variants: means over the seeds, and the range of the accuracy."""
    rows = Table(title=f"One model, {len(SEEDS)} seeds each: mean and range", title_justify="left")
    rows.add_column("trained in")
    for name in (
        "validation\naccuracy",
        "zero\ngradients",
        "flushed\nto zero",
        "overflow\ncount",
        "final\nscale",
        "seconds",
    ):
        rows.add_column(name, justify="right", min_width=len("0.000-0.000") if "accuracy" in name else None)
    baseline = _mean(results[next(iter(results))], lambda result: result.zeros)
    for variant, trained in results.items():
        zeros = _mean(trained, lambda result: result.zeros)
        scales = sorted({as_power(result.snapshot.loss_scale) for result in trained})
        rows.add_row(
            variant.name.replace(", ", ",\n"),
            _range([result.accuracy for result in trained]),
            f"{zeros:.1%}",
            "" if variant.policy == "float32" else f"{max(0.0, zeros - baseline):.1%}",
            " ".join(str(result.snapshot.overflow_count) for result in trained),
            "\n".join(scales) if variant.scaled else "none",
            f"{_mean(trained, lambda result: result.seconds):.1f}",
        )
    return rows


def explanation(results: Results) -> Iterator[str]:
    """Yields paragraphs: the task, the accuracies, and why they differ, if they differ by more than the seeds do."""
    yield (
        f"The model denoises images and also classifies them, with one trunk for both tasks. The classification loss "
        f"has the small weight {LABEL_WEIGHT:g}, as auxiliary losses do. Accuracy is that of the classification."
    )
    names = {variant: variant.name.replace(", no loss scale", " without loss scaling") for variant in results}
    accuracies = {names[variant]: [result.accuracy for result in trained] for variant, trained in results.items()}
    spread = max(max(values) - min(values) for values in accuracies.values())
    means = {name: statistics.fmean(values) for name, values in accuracies.items()}
    if len(means) > 1 and max(means.values()) - min(means.values()) <= spread:
        yield f"The mean accuracies differ by no more than the seeds do ({spread:.3f})."
    elif any(variant.scaled for variant in results):
        yield from _reasons(means)


def _reasons(means: dict[str, float]) -> Iterator[str]:
    outcome = ", ".join(f"{accuracy:.2f} in {name}" for name, accuracy in means.items())
    gradient = LABEL_WEIGHT / BATCH_SIZE
    yield (
        f"The accuracy is {outcome}. The reason: the loss is a mean over a batch of {BATCH_SIZE}, so a gradient at the "
        f"classification output is at most {LABEL_WEIGHT:g} / {BATCH_SIZE} = {gradient:.1e}. float16 flushes to zero "
        f"what is below half of its smallest subnormal, 2^-24 = {FLOAT16.smallest_subnormal:.1e}: a predicted "
        f"probability whose error is below {2.0**FLOAT16.flush_exponent / gradient:.2f} gets a zero gradient."
    )
    yield (
        "'Flushed to zero' is the share of zeros beyond that in float32, where inactive ReLU units cause zeros. The "
        "loss scale moves all gradients up into float16's range. It grows until a gradient overflows; that step is "
        f"skipped. (The growth interval is {GROWTH_INTERVAL} steps here, to show this in a short run; the default is "
        "2000.)"
    )


def save_figures(results: Results, out: Path) -> list[Path]:
    """Draws gradient exponents and loss scale of the last variant with the first seed. Returns the paths."""
    from kmp import plots

    run = list(results.values())[-1][0].run
    figures = {
        "gradient_exponents.png": plots.gradient_exponents(run.histograms[len(run.histograms) // 2]),
        "loss_scale.png": plots.loss_scale(run),
    }
    for name, ax in figures.items():
        plots.save(ax, out / name)
    return [out / name for name in figures]


def write_report(results: Results, out: Path) -> Path:
    """Writes a report that compares the variants with the first seed. Returns its path."""
    from kmp import report

    return report.write({variant.name: trained[0].run for variant, trained in results.items()}, out / "report.html")


def _print_path(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"))
    return Progress(*columns, TimeRemainingColumn(), console=console)


def _mean(results: list[Result], value_of: Callable[[Result], float]) -> float:
    return statistics.fmean(map(value_of, results))


def _range(values: list[float]) -> str:
    return f"{statistics.fmean(values):.3f}\n{min(values):.3f}-{max(values):.3f}"
