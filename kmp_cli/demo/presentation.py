"""What the demo shows: a progress bar, a table with an explanation, two figures, and a report."""

import errno
import functools
import shlex
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kmp import plots, report
from kmp.advice import advise
from kmp.records import Record, Run
from kmp.utils.float_formats import as_power
from kmp_cli.demo import experiment
from kmp_cli.demo.experiment import Length, Result, Results
from kmp_cli.demo.explanation import explanation, mean_accuracy, warnings_of_repairs

SEEDS = (0, 1, 2)
_MOST_EPOCHS = 8


def run(
    console: Console, policy: str, steps: int, out: Path, seeds: Sequence[int] = SEEDS
) -> Results:
    """Trains each setup with each seed, prints a comparison, and writes all files to `out`.

    Raises:
        FileExistsError: If `out` is a folder that is not empty, whose files could be replaced.
        ImportError: If scikit-learn is not installed.
    """
    parts = experiment.load()
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        message = "the folder is not empty. Name a new or an empty one: --out FOLDER"
        raise FileExistsError(errno.EEXIST, message, str(out))
    # Epochs of equal length, as many as divide the steps.
    epochs = max(number for number in range(1, _MOST_EPOCHS + 1) if steps % number == 0)
    length = Length(epochs, steps // epochs)
    results: Results = {setup: [] for setup in experiment.setups(policy)}
    with Progress(console=console) as progress:
        task = progress.add_task("", total=len(results) * len(seeds) * steps)
        for seed in seeds:
            for setup, trained in results.items():
                progress.update(task, description=f"{setup.name}, seed {seed}")
                log_dir = out / setup.name.replace(" ", "-") / f"seed-{seed}"
                advance = functools.partial(progress.advance, task)
                result = experiment.train(setup, seed, length, parts, log_dir, advance)
                trained.append(result)
    console.print(table(results, steps))
    for paragraph in explanation(results):
        console.print(f"\n{paragraph}", markup=False, highlight=False)
    for warning in warnings_of_repairs(results):
        console.print("\nkmp's warning, as it appears in a training:\n")
        # The lines stay as they are, to be copied.
        console.print(warning.strip(), markup=False, highlight=False, soft_wrap=True)

    # The verdict, the figures and the report are of the first seed.
    runs = {setup.name: trained[0].run for setup, trained in results.items()}
    recorded = {name: records for name, records in runs.items() if records is not None}
    name, last = list(recorded.items())[-1]  # that of the policy
    verdict = f"kmp's verdict on {name}, seed {seeds[0]}: {advise(last).verdict}"
    console.print(f"\n{verdict}\n", markup=False, highlight=False)
    for line in _write_files(results, recorded, length, out):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return results


def table(results: Results, steps: int) -> Table:
    """Returns a table of all setups: means over the seeds, and the range of the accuracy."""
    seeds = len(next(iter(results.values())))
    rows = Table(
        title=f"One network, {seeds} seed{'s' * (seeds > 1)} each",
        title_justify="left",
        caption="Seconds: mostly of tracing and replays.",
        caption_justify="left",
    )
    rows.add_column("trained in")
    rows.add_column("validation\naccuracy", justify="right", min_width=len("0.000-0.000"))
    rows.add_column(f"updates\n(of {steps})", justify="right")
    rows.add_column("repaired\nby kmp")
    rows.add_column("final\nscale", justify="right")
    rows.add_column("seconds", justify="right")
    for setup, trained in results.items():
        rows.add_row(setup.name, *_cells(trained))
    return rows


def _cells(trained: Sequence[Result]) -> Iterator[str]:
    accuracies = [result.accuracy for result in trained]
    yield f"{mean_accuracy(trained):.3f}\n{min(accuracies):.3f}-{max(accuracies):.3f}"
    yield _distinct(str(result.updates) for result in trained)
    repairs = [repair for result in trained for repair in result.repairs]
    yield _distinct(f"step {repair.step}:\n{repair.names}" for repair in repairs) or "nothing"
    scales = [result.loss_scale for result in trained if result.loss_scale is not None]
    yield _distinct(map(as_power, scales)) or "none"
    yield f"{statistics.fmean(result.seconds for result in trained):.1f}"


def _distinct(texts: Iterable[str]) -> str:
    return "\n".join(dict.fromkeys(texts))


def _write_files(
    results: Results, recorded: dict[str, Run], length: Length, out: Path
) -> Iterator[str]:
    """Writes the figures and the report. Yields a line about each file."""
    plots.save(accuracies(results, length), out / "accuracy.png")
    yield f"Figure: {out / 'accuracy.png'}"
    *_, last = recorded.values()
    middle = last.histograms[len(last.histograms) // 2]
    exponents = plots.gradient_exponents(middle, dtype=last.format.name)
    plots.save(exponents, out / "gradient_exponents.png")
    yield f"Figure: {out / 'gradient_exponents.png'}"
    yield f"Report: {report.write(recorded, out / 'report.html')}"
    yield f"Logs: {out}"
    yield f"To view the logs: tensorboard --logdir {shlex.quote(str(out))}"


def accuracies(results: Results, length: Length) -> Axes:
    """Draws the validation accuracy of the first seed of each setup, and marks its repairs."""
    name = "val_accuracy"
    runs = {}
    for setup, trained in results.items():
        rows = [
            Record(step=epoch * length.steps_per_epoch, metrics={name: accuracy})
            for epoch, accuracy in enumerate(trained[0].accuracies)
        ]
        runs[setup.name] = Run(rows)
    ax = plots.metric(runs, name)
    ax.set_ylim(0, 1)
    repaired = [trained[0] for trained in results.values() if trained[0].repairs]
    for result in repaired:
        repair = result.repairs[0]
        ax.annotate(
            f"step {repair.step}: kmp sets\n{repair.names} to float32",
            (repair.step, result.accuracies[0]),
            (length.steps / 8, 0.3),
            fontsize="small",
            arrowprops={"arrowstyle": "->"},
        )
    return ax
