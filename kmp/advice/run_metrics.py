"""Metrics of a run from which the effect of float16 is diagnosed."""

import itertools
import math
from functools import cached_property
from operator import itemgetter
from typing import Any

import numpy as np

from kmp.advice.gradient_metrics import GradientMetrics
from kmp.advice.sample_statistics import statistics
from kmp.records import Replay, Run, layer_of
from kmp.utils import FLOAT16

STUCK_AFTER = 12  # consecutive skipped steps
_MOST_FLUSHED = 0.5
_LAST_LOSSES = 5


class RunMetrics:
    """Computes metrics from the records of a run.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.replays = [replay for _, replay in run.replays]
        self.settings = run.settings
        self.steps = max((row["step"] for row in run.rows), default=0)
        self.overflows = int(run.last("overflow_count") or 0)
        self.nonfinite_losses = int(run.last("nonfinite_loss_count") or 0)
        self.gradient_overflows = self.overflows - self.nonfinite_losses
        self.consecutive_overflows = int(run.last("overflows_in_a_row") or 0)
        # Older logs lack the key. All non-finite losses may then have been consecutive.
        self.consecutive_nonfinite_losses = int(run.last("nonfinite_losses_in_a_row", self.nonfinite_losses) or 0)
        origins = run.last("overflow_origins_by_variable") or {}
        self.overflow_origins: dict[str, int] = {path: count for path, count in origins.items() if count}
        samples = statistics(run)
        scales = [*(sample.loss_scale for sample in samples[-1:]), *run.series("loss_scale")[1]]
        self.scale = float(next((scale for scale in reversed(scales) if math.isfinite(scale)), math.nan))
        self.gradients = GradientMetrics(run, samples, self.scale)

    @property
    def is_fixed(self) -> bool:
        """Whether the loss scale is fixed."""
        return bool(self.settings.get("rule") == "FixedScale")

    @property
    def dtypes(self) -> str:
        """The model's compute dtypes, joined by "and"."""
        return " and ".join(self.settings.get("compute_dtypes", ["an unknown dtype"]))

    @property
    def is_float16(self) -> bool:
        """Whether the model computed in float16. True if the dtypes are unknown."""
        return FLOAT16.name in self.settings.get("compute_dtypes", [FLOAT16.name])

    def setting(self, name: str, default: Any) -> Any:
        """Returns a setting of the run, such as `"growth_interval"`."""
        return self.settings.get(name, default)

    @property
    def settings_call(self) -> str:
        """The call that the settings of the loss scale come from: `kmp.enable` sets those that no other call sets."""
        return self.setting("settings_call", "kmp.enable")

    @property
    def learning_rate(self) -> float | None:
        """The learning rate; of a schedule, the highest at the end of an epoch; `None` if it is unknown."""
        _, rates = self.run.metrics.get("learning_rate", ((), ()))
        return self.settings.get("learning_rate", max(rates, default=None))

    def class_of(self, layer: str) -> str:
        """Returns the class of the layer with this path; `""` if it is unknown."""
        return self.settings.get("layers", {}).get(layer, "")

    def layer_of(self, variable: str) -> str:
        """Returns the path of the layer with this variable that a program creates: an RNN, not its cell."""
        layers, path = self.settings.get("layers", {}), layer_of(variable)
        parents = itertools.accumulate(path.split("/"), lambda parent, name: f"{parent}/{name}")
        return next((parent for parent in reversed(list(parents)) if parent in layers), path)

    @property
    def forward_replay(self) -> Replay | None:
        """The last replay without a finite loss in the precision of the model, or of the forward pass alone."""
        return next((replay for replay in reversed(self.replays) if replay.loss is None), None)

    @property
    def backward_replay(self) -> Replay | None:
        """The last replay whose loss was finite in the precision of the model, and whose gradients were not."""
        failed = (replay for replay in reversed(self.replays) if not replay.is_finite)
        return next((replay for replay in failed if replay.loss is not None), None)

    @property
    def clean_replay(self) -> Replay | None:
        """The last replay whose loss and gradients were finite."""
        clean = (replay for replay in reversed(self.replays) if replay.is_finite)
        return next((replay for replay in clean if not replay.is_forward_only), None)

    @property
    def flushed(self) -> dict[str, float]:
        """The share of a variable's gradient that float16 flushed to zero in the last clean replay, by path.

        Empty if the loss scale has grown since, because then it flushes less.
        """
        replay = self.clean_replay
        return {} if replay is None or replay.loss_scale < self.scale else replay.flushed

    @cached_property
    def flushed_layers(self) -> list[str]:
        """The layers of which each variable's gradient was flushed to zero for the most part, in the last clean replay.

        Variables whose gradient is zero in float32 too are ignored.
        """
        if self.clean_replay is None or not self.gradients.finite_samples:
            return []
        names = [name for name in self.gradients.finite_samples[-1].names if name not in self.clean_replay.zero]
        alive = {self.layer_of(name) for name in names if self.flushed.get(name, 0.0) <= _MOST_FLUSHED}
        return [layer for layer in dict.fromkeys(map(self.layer_of, names)) if layer not in alive]

    @property
    def has_reference(self) -> bool:
        """Whether gradients in float32 distinguish flushed elements from those that are truly zero."""
        return self.clean_replay is not None or self.gradients.excess_zeros is not None

    @property
    def unexplained_zero_variables(self) -> list[str]:
        """The `gradients.all_zero_variables` that the last clean replay did not show to be zero in float32 too."""
        explained = set(self.clean_replay.zero) if self.clean_replay else set()
        return [name for name in self.gradients.all_zero_variables if name not in explained]

    @cached_property
    def first_loss(self) -> float:
        """The first finite recorded loss; NaN if there is none."""
        return next((value for value in self._losses if math.isfinite(value)), math.nan)

    @cached_property
    def highest_loss(self) -> float:
        """The highest magnitude of a finite loss since the first record; NaN if there is none."""
        recorded = self.run.series("highest_loss")[1]
        increased = [float(value) for value in recorded[recorded > recorded[0]]] if recorded.size else []
        return max((*increased, *(abs(value) for value in self._losses if math.isfinite(value))), default=math.nan)

    @cached_property
    def last_loss(self) -> float:
        """The median of the last finite losses, because that of one batch may be noisy; NaN if there is none."""
        losses = [value for value in self._losses if math.isfinite(value)]
        return float(np.median(losses[-_LAST_LOSSES:])) if losses else math.nan

    @property
    def ends_nonfinite(self) -> bool:
        """Whether the run ends in a streak of non-finite losses, after steps that were not part of it."""
        streak = self.consecutive_overflows
        return STUCK_AFTER <= streak <= self.consecutive_nonfinite_losses and streak < self.steps

    @cached_property
    def startup_overflows(self) -> tuple[int, int, float]:
        """Gradient overflows until the first record after an applied step; that record's step and loss scale."""
        rows = sorted(self.run.rows, key=itemgetter("step"))
        if not rows or rows[0]["step"] > 1:
            return 0, 0, self.scale
        for step, records in itertools.groupby(rows, key=itemgetter("step")):
            merged = {key: value for record in records for key, value in record.items() if value is not None}
            if merged.get("overflows_in_a_row") == 0 and {"loss_scale", "overflow_count"} <= merged.keys():
                overflows = merged["overflow_count"] - merged.get("nonfinite_loss_count", 0)
                return int(overflows), step, float(merged["loss_scale"])
        return 0, 0, self.scale

    @property
    def main_overflow_origin(self) -> tuple[str, float]:
        """The most frequent overflow origin and its share, for steps with a finite loss; `("", 0.0)` if none."""
        if not self.overflow_origins:
            return "", 0.0
        path = max(self.overflow_origins, key=self.overflow_origins.__getitem__)
        return path, self.overflow_origins[path] / sum(self.overflow_origins.values())

    @property
    def _losses(self) -> np.ndarray:
        return self.run.series("last_loss")[1]
