"""What the demo shows: a progress bar, a table with the reason for what it says, and two pictures."""

import shlex
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kmp.demo import experiment
from kmp.demo.experiment import BATCH_SIZE, GROWTH_INTERVAL, LABEL_WEIGHT, SEEDS, Result, Way
from kmp.utils import FLOAT16, as_power

Results = dict[Way, list[Result]]


def run(console: Console, dataset: str, policy: str, steps: int, out: Path) -> Results:
    """Trains in every way with every seed, shows what came of it, and leaves logs and pictures in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    parts = experiment.load(dataset)
    ways = experiment.ways(policy)
    with _progress(console) as progress:
        task = progress.add_task("", total=len(ways) * len(SEEDS) * steps)
        results: Results = {way: [] for way in ways}
        for seed in SEEDS:
            for way in ways:
                progress.update(task, description=f"{way.name}, seed {seed}")
                folder = out / way.name.replace(",", "").replace(" ", "-") / f"seed-{seed}"
                results[way].append(experiment.train(way, seed, steps, parts, folder, lambda: progress.advance(task)))
    console.print(table(results))
    for line in reasons(results):
        console.print(line, highlight=False)
    for path in pictures(results, out):
        _print_path(console, f"Picture: {path}")
    _print_path(console, f"Report: {report_of(results, out)}")
    _print_path(console, f"Logs: {out}")
    _print_path(console, f"To see them: tensorboard --logdir {shlex.quote(str(out))}")
    return results


def table(results: Results) -> Table:
    """Returns the table of all ways, means over the seeds with the range below."""
    shown = Table(title=f"One model, {len(SEEDS)} seeds each: mean and range", title_justify="left")
    shown.add_column("trained in")
    for name in (
        "validation\naccuracy",
        "zero\ngradients",
        "flushed\nto zero",
        "overflow\ncount",
        "final\nscale",
        "seconds",
    ):
        shown.add_column(name, justify="right", min_width=len("0.000-0.000") if "accuracy" in name else None)
    baseline = _mean(results[next(iter(results))], lambda result: result.zeros)
    for way, trained in results.items():
        zeros = _mean(trained, lambda result: result.zeros)
        shown.add_row(
            way.name.replace(", ", ",\n"),
            _range([result.accuracy for result in trained]),
            f"{zeros:.1%}",
            "" if way.policy == "float32" else f"{max(0.0, zeros - baseline):.1%}",
            " ".join(str(result.snapshot.overflow_count) for result in trained),
            "\n".join(sorted({as_power(result.snapshot.loss_scale) for result in trained})) if way.scaled else "none",
            f"{_mean(trained, lambda result: result.seconds):.1f}",
        )
    return shown


def reasons(results: Results) -> Iterator[str]:
    """Yields the sentences that say what was trained, what came of it, and why."""
    yield (
        f"The model denoises an image and names what is on it, with one trunk for both; the naming loss has the small "
        f"weight {LABEL_WEIGHT:g}, as side tasks do. Accuracy is that of the names."
    )
    names = {way: way.name.replace(", ", " with ") for way in results}
    accuracies = {names[way]: [result.accuracy for result in trained] for way, trained in results.items()}
    spread = max(max(values) - min(values) for values in accuracies.values())
    means = {name: statistics.fmean(values) for name, values in accuracies.items()}
    if len(means) > 1 and max(means.values()) - min(means.values()) <= spread:
        yield f"The ways differ by no more than the seeds do ({spread:.3f})."
    elif any(way.scaled for way in results):
        yield from _why(means)


def _why(means: dict[str, float]) -> Iterator[str]:
    outcome = ", ".join(f"{accuracy:.2f} in {name}" for name, accuracy in means.items())
    gradient = LABEL_WEIGHT / BATCH_SIZE
    yield (
        f"It reached {outcome}. Why: the mean over a batch of {BATCH_SIZE} divides that weight once more, so a "
        f"gradient at the naming output is at most {gradient:.1e}. float16 rounds to zero what is below half of its "
        f"smallest number, 2^-24 = {FLOAT16.smallest_subnormal:.1e}: unless a probability is wrong by more than "
        f"{2.0**FLOAT16.flush_exponent / gradient:.2f}, nothing is learnt from it."
    )
    yield (
        "'Flushed' is the share that is zero beyond float32's own, where ReLU switched units off. The loss scale lifts "
        "all gradients into float16's range; it grows until one overflows, and that step is skipped. (Here every "
        f"{GROWTH_INTERVAL} steps, so that it shows in a short run; the default is 2000.)"
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


def report_of(results: Results, out: Path) -> Path:
    """Writes the report that compares the ways, of their first seeds; returns the file."""
    from kmp import report

    return report.write({way.name: trained[0].run for way, trained in results.items()}, out / "report.html")


def _print_path(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"))
    return Progress(*columns, TimeRemainingColumn(), console=console)


def _mean(results: list[Result], of: Callable[[Result], float]) -> float:
    return statistics.fmean(map(of, results))


def _range(values: list[float]) -> str:
    return f"{statistics.fmean(values):.3f}\n{min(values):.3f}-{max(values):.3f}"
