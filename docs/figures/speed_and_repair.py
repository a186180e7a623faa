"""Draws the figure of the README: speed on a GPU, and a run that repaired itself.

    python docs/figures/speed_and_repair.py          # trains, about two minutes on two CPU cores
    python docs/figures/speed_and_repair.py --draw   # draws the saved numbers again

Needs the extra `demo`. The speed is read from benchmarks/h100.json. The trainings are those of
`kmp demo`, and longer; their numbers are in speed_and_repair.json.
"""

import argparse
import datetime
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Its float16 is many times slower on newer CPUs.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from kmp.plots.style import DARK, LIGHT, MIDDLE
from kmp_bench.results import header
from kmp_cli.demo import experiment
from kmp_cli.demo.experiment import Setup

FIGURE = Path(__file__).with_suffix(".png")
RESULTS = Path(__file__).with_suffix(".json")
GPU = Path(__file__).parents[2] / "benchmarks" / "h100.json"
COLORS = {"float32": "0.6", "float16": DARK, "bfloat16": LIGHT}
EPOCHS = 10
SEEDS = 3


def train(setup: Setup, seed: int, epochs: int, folder: Path) -> dict[str, Any]:
    """Returns the validation accuracy before the training and after each epoch.

    Also how many steps updated the weights, and with kmp the first repair: its step and layers.
    """
    parts = experiment.load()
    steps_per_epoch = math.ceil(len(parts.training.labels) / experiment.BATCH_SIZE)
    length = experiment.Length(epochs, steps_per_epoch)
    trained = experiment.train(setup, seed, length, parts, folder)
    result = {
        "precision": setup.name,
        "seed": seed,
        "steps_of_an_epoch": steps_per_epoch,
        "updates": trained.updates,
        "validation_accuracy": [round(accuracy, 4) for accuracy in trained.accuracies],
    }
    if trained.repairs:
        repair = trained.repairs[0]
        result["repair"] = {"step": repair.step, "layers": repair.layers}
    return result


def measure(epochs: int, seeds: int) -> dict[str, Any]:
    """Trains in each precision with each seed."""
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for setup in experiment.setups("mixed_float16"):
            for seed in range(seeds):
                runs.append(train(setup, seed, epochs, Path(folder, f"{setup.name}-{seed}")))
                print(setup.name, seed, runs[-1]["validation_accuracy"][-1])
    return {"date": datetime.date.today().isoformat(), **header(), "runs": runs}


def draw_speed(axes: Axes, results: list[dict[str, Any]]) -> None:
    """Draws the speed of two models, relative to float32."""
    groups = {
        "BERT-base": ("network throughput", "BERT-base, 32 of 128"),
        "transformer block": ("training", "transformer block, 128 x 64 x 2048"),
    }
    draw_ratios(axes, results, groups)
    for precision, color in COLORS.items():
        axes.bar(0, 0, color=color, label=precision)
    axes.legend(loc="upper left", ncols=3, frameon=False, columnspacing=1.2, handlelength=1)
    axes.set_title("Speed on an H100", loc="left", weight="bold")


def draw_memory(axes: Axes, results: list[dict[str, Any]]) -> None:
    """Draws the memory of one model, relative to float32."""
    draw_ratios(axes, results, {"BERT-base": ("network memory", "BERT-base, 32 of 128")})
    axes.set_title("Memory", loc="left", weight="bold")


def draw_ratios(
    axes: Axes, results: list[dict[str, Any]], groups: dict[str, tuple[str, str]]
) -> None:
    """Draws a group of bars for each section and case, one bar for each precision."""
    x, centers = 0.0, []
    for section, case in groups.values():
        rows = [row for row in results if (row["section"], row["case"]) == (section, case)]
        rows = [row for row in rows if row["variant"] != "float32 without TF32"]
        centers.append(x + (len(rows) - 1) / 2)
        for row in rows:
            precision = row["variant"].removeprefix("mixed_").removesuffix(", kmp")
            ratio = row["ratio"] or 1.0
            axes.bar(x, ratio, width=0.92, color=COLORS[precision])
            text = "1" if precision == "float32" else f"{ratio:.2f} \u00d7"
            axes.text(x, ratio + 0.02, text, ha="center", va="bottom", fontsize="small")
            x += 1.0
        x += 0.9
    axes.set_xticks(centers, groups)
    axes.tick_params(axis="x", length=0)
    axes.set_yticks([])
    axes.set_ylim(0, 2.2)


def draw_repair(axes: Axes, runs: list[dict[str, Any]]) -> None:
    """Draws the validation accuracy by epoch, a line for each seed, and marks the repair."""
    styles = {
        "float32": {"color": "0.45", "linestyle": (0, (4, 2)), "zorder": 3},
        "float16 with kmp": {"color": DARK, "linewidth": 2.5},
        "float16 in Keras": {"color": MIDDLE, "linewidth": 2.5},
    }
    for precision, style in styles.items():
        for run in runs:
            if run["precision"] == precision:
                label = precision if run["seed"] == 0 else None
                axes.plot(100 * np.array(run["validation_accuracy"]), label=label, **style)
    repaired = next(run for run in runs if "repair" in run)
    repair, start = repaired["repair"], 100 * repaired["validation_accuracy"][0]
    epoch = repair["step"] / repaired["steps_of_an_epoch"]
    axes.plot(epoch, start, "o", color=DARK, markersize=9, zorder=4, clip_on=False)
    layer = repair["layers"][0].partition("/")[2]
    axes.annotate(
        f"step {repair['step']}: kmp sets the layer\n'{layer}' to float32, trains on",
        (epoch, start),
        (1.7, 41),
        color=DARK,
        va="center",
        arrowprops={"arrowstyle": "->", "color": DARK, "shrinkB": 6},
    )
    if not any(run["updates"] for run in runs if run["precision"] == "float16 in Keras"):
        every_step = "the loss is NaN, every step is skipped"
        axes.text(EPOCHS, 15, every_step, color=MIDDLE, ha="right", va="bottom")
    axes.legend(loc="center right", bbox_to_anchor=(1, 0.6), frameon=False)
    axes.set_xlabel("epoch")
    axes.set_yticks([0, 50, 100], ["0", "50 %", "100 %"])
    axes.set_ylim(0, 105)
    axes.set_xlim(-0.15, EPOCHS + 0.1)
    axes.set_title("Accuracy of a network that float16 breaks", loc="left", weight="bold")


def draw(figure_file: Path, results_file: Path) -> None:
    """Draws the three panels, to be read at a width of 800 pixels."""
    plt.rcParams.update({"font.size": 11.5, "axes.titlesize": 13})
    figure, (speed, memory, repair) = plt.subplots(
        1, 3, figsize=(10.5, 4), width_ratios=[5, 2, 7], layout="constrained"
    )
    on_gpu = json.loads(GPU.read_text(encoding="utf-8"))["results"]
    draw_speed(speed, on_gpu)
    draw_memory(memory, on_gpu)
    draw_repair(repair, json.loads(results_file.read_text(encoding="utf-8"))["runs"])
    for axes in (speed, memory, repair):
        axes.spines[["top", "right"]].set_visible(False)
    for axes in (speed, memory):
        axes.spines["left"].set_visible(False)
    figure.get_layout_engine().set(wspace=0.06, w_pad=0.15, h_pad=0.12)
    figure.savefig(figure_file, dpi=160)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    """Trains unless told otherwise, and draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draw", action="store_true", help="draw the saved numbers")
    if not parser.parse_args(arguments).draw:
        results = json.dumps(measure(EPOCHS, SEEDS), indent=1)
        RESULTS.write_text(results + "\n", encoding="utf-8")
    draw(FIGURE, RESULTS)


if __name__ == "__main__":
    main()
