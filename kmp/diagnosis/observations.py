"""What the records of a run show: the values that causes are found from."""

import math
from functools import cached_property

import msgspec

from kmp.diagnosis.gradients import Gradients
from kmp.diagnosis.model_names import ModelNames
from kmp.diagnosis.passes import Passes
from kmp.diagnosis.skipped_steps import SkippedSteps
from kmp.diagnosis.updates import Updates
from kmp.records import Record, Run
from kmp.utils.float_formats import FLOAT16


class Observations:
    """What the records of a run show; after a repair, those since the last one.

    Args:
        run: The run.

    Attributes:
        all_records: The run.
        repair: The record of the last repair; `None` without one.
        records: The run since then. Its counts begin there.
        settings: Its settings.
        format: The number format that limits it.
        last_step: The last step of all records.
        skipped_steps: Those that all records count; `None` if they were not counted.
        loss_scale: The loss scale in use; NaN if it is unknown.
        model: The names of the layers.
        skipped: The steps that were skipped.
        passes: The replays.
    """

    def __init__(self, run: Run) -> None:
        self.all_records = run
        self.repair, self.records = since_last_repair(run)
        self.settings, self.format = self.records.settings, self.records.format
        self.last_step = max((row.step for row in run.rows), default=0)
        self.skipped_steps: int | None = run.last("overflow_count")
        samples = [sample.loss_scale for sample in self.records.samples[-1:]]
        scales = [*samples, *self.records.series("loss_scale")[1]]
        self.loss_scale = float(next(filter(math.isfinite, reversed(scales)), math.nan))
        self.model = ModelNames(self.settings)
        steps = self.last_step - (self.repair.step if self.repair else 0)
        self.skipped = SkippedSteps(self.records, self.last_step, steps, self.loss_scale)
        self.passes = Passes(self.records, self.last_step, self.skipped)

    @cached_property
    def gradients(self) -> Gradients:
        """The sizes of the gradients, and what float16 loses of them."""
        return Gradients(self.records, self.all_records, self.loss_scale, self.passes, self.model)

    @cached_property
    def updates(self) -> Updates:
        """The sizes of the updates, and the losses."""
        return Updates(self.records, self.last_step, self.gradients.samples)

    @property
    def dtypes(self) -> str:
        """The dtypes that the layers compute in, in words."""
        return " and ".join(self.settings.compute_dtypes or ["an unknown dtype"])

    @property
    def is_fixed(self) -> bool:
        """Whether the loss scale is fixed."""
        return self.settings.rule == "FixedScale"

    @property
    def min_scale(self) -> float:
        """The minimum of the loss scale."""
        lowest = self.settings.min_scale
        return FLOAT16.smallest_normal if lowest is None else lowest

    @property
    def has_step_of_keras(self) -> bool:
        """Whether `fit` trains with the training step of Keras."""
        return self.settings.in_fit and self.settings.train_step == "keras"


def since_last_repair(run: Run) -> tuple[Record | None, Run]:
    """Returns the record in which layers were last set to float32, and the run after it.

    The counts of that run begin there. `None` and the run itself if there is none.
    """
    repairs = [index for index, row in enumerate(run.rows) if row.fallback]
    if not repairs:
        return None, run
    begin = repairs[-1] + 1
    before, counts = Run(run.rows[:begin]), ("overflow_count", "nonfinite_loss_count")
    counted = {key: int(before.last(key) or 0) for key in counts}
    origins = before.last("overflow_origins_by_variable") or {}
    rows = []
    for row in run.rows[begin:]:
        since = {
            key: getattr(row, key) - earlier
            for key, earlier in counted.items()
            if getattr(row, key) is not msgspec.UNSET
        }
        if row.overflow_origins_by_variable:
            by_variable = row.overflow_origins_by_variable.items()
            since["overflow_origins_by_variable"] = {
                path: count - origins.get(path, 0) for path, count in by_variable
            }
        rows.append(msgspec.structs.replace(row, **since))
    return before.rows[-1], Run(rows, run.header)
