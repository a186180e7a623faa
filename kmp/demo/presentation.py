"""What the demo shows: a progress bar, a table with an explanation, two figures, and a report."""

import functools
import shlex
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kmp import plots, report
from kmp.demo import experiment
from kmp.demo.experiment import BATCH_SIZE, GROWTH_INTERVAL, LABEL_WEIGHT, SEEDS, Result, Variant
from kmp.report.format_table import both_formats
from kmp.report.run_summary import RunSummary
from kmp.utils.float_formats import FLOAT16, as_power

Results = dict[Variant, list[Result]]


def run(console: Console, policy: str, steps: int, out: Path) -> Results:
    """Trains each variant with each seed, prints a comparison, and writes all files to `out`."""
    parts = experiment.load()
    out.mkdir(parents=True, exist_ok=True)
    results: Results = {variant: [] for variant in experiment.variants(policy)}
    with Progress(console=console) as progress:
        task = progress.add_task("", total=len(results) * len(SEEDS) * steps)
        for seed in SEEDS:
            for variant, trained in results.items():
                progress.update(task, description=f"{variant.name}, seed {seed}")
                log_dir = out / variant.name.replace(" ", "-") / f"seed-{seed}"
                advance = functools.partial(progress.advance, task)
                result = experiment.train(variant, seed, steps, parts, log_dir, advance)
                trained.append(result)
    console.print(table(results))
    for line in explanation(results):
        console.print(line, highlight=False)

    # The first seed of each variant in the report, that of the last one in the figures.
    runs = {variant.name: trained[0].run for variant, trained in results.items()}
    *_, last = runs.values()
    console.print(both_formats(RunSummary("", last)).intro, highlight=False)
    middle = last.histograms[len(last.histograms) // 2]
    plots.save(plots.gradient_exponents(middle), out / "gradient_exponents.png")
    plots.save(plots.loss_scale(last), out / "loss_scale.png")
    for line in (
        f"Figure: {out / 'gradient_exponents.png'}",
        f"Figure: {out / 'loss_scale.png'}",
        f"Report: {report.write(runs, out / 'report.html')}",
        f"Logs: {out}",
        f"To view the logs: tensorboard --logdir {shlex.quote(str(out))}",
    ):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return results


def table(results: Results) -> Table:
    """Returns a table of all variants: means over the seeds, and the range of the accuracy."""
    rows = Table(title=f"One model, {len(SEEDS)} seeds each: mean and range", title_justify="left")
    rows.add_column("trained in")
    rows.add_column("validation\naccuracy", justify="right", min_width=len("0.000-0.000"))
    others = ("zero\ngradients", "flushed\nto zero", "overflow\ncount", "final\nscale", "seconds")
    for name in others:
        rows.add_column(name, justify="right")
    in_float32 = _mean_zeros(next(iter(results.values())))
    for variant, trained in results.items():
        rows.add_row(variant.name, *_cells(variant, trained, in_float32))
    return rows


def _cells(variant: Variant, trained: Sequence[Result], zeros_in_float32: float) -> Iterator[str]:
    accuracies = [result.accuracy for result in trained]
    yield f"{statistics.fmean(accuracies):.3f}\n{min(accuracies):.3f}-{max(accuracies):.3f}"
    zeros = _mean_zeros(trained)
    yield f"{zeros:.1%}"
    yield "" if variant.policy == "float32" else f"{max(0.0, zeros - zeros_in_float32):.1%}"
    yield " ".join(str(result.run.last("overflow_count")) for result in trained)
    scales = {as_power(result.run.last("loss_scale")) for result in trained}
    yield "\n".join(sorted(scales)) if variant.scaled else "none"
    yield f"{statistics.fmean(result.seconds for result in trained):.1f}"


def _mean_zeros(trained: Sequence[Result]) -> float:
    return statistics.fmean(result.zeros for result in trained)


def explanation(results: Results) -> Iterator[str]:
    """Yields paragraphs: the task, the accuracies, and why they differ.

    The last only if they differ by more than the seeds do.
    """
    yield (
        "The model denoises images and also classifies them, with one trunk for both tasks. The"
        f" classification loss has the small weight {LABEL_WEIGHT:g}, as auxiliary losses do."
        " Accuracy is that of the classification."
    )
    accuracies = {}
    for variant, trained in results.items():
        accuracies[variant.name] = [result.accuracy for result in trained]
    spread = max(max(values) - min(values) for values in accuracies.values())
    means = {name: statistics.fmean(values) for name, values in accuracies.items()}
    if len(means) > 1 and max(means.values()) - min(means.values()) <= spread:
        yield f"The mean accuracies differ by no more than the seeds do ({spread:.3f})."
    elif any(variant.scaled for variant in results):
        outcome = ", ".join(f"{accuracy:.2f} in {name}" for name, accuracy in means.items())
        gradient = LABEL_WEIGHT / BATCH_SIZE
        yield (
            f"The accuracy is {outcome}. The reason: the loss is a mean over a batch of"
            f" {BATCH_SIZE}, so a gradient at the classification output is at most {LABEL_WEIGHT:g}"
            f" / {BATCH_SIZE} = {gradient:.1e}. float16 flushes to zero what is below half of its"
            f" smallest subnormal, 2^-24 = {FLOAT16.smallest_subnormal:.1e}: a predicted"
            f" probability whose error is below {2.0**FLOAT16.flush_exponent / gradient:.2f} gets a"
            " zero gradient."
        )
        yield (
            "'Flushed to zero' is the share of zeros beyond that in float32, where inactive ReLU"
            " units cause zeros. The loss scale moves all gradients up into float16's range. It"
            " grows until a gradient overflows; that step is skipped. (The growth interval is"
            f" {GROWTH_INTERVAL} steps here, to show this in a short run; the default is 2000.)"
        )
