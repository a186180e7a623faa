"""One training that a monitor watches: it records, replays, repairs, detects and reports."""

import math
from typing import Any

import keras

from kmp.backend import distribution
from kmp.callbacks import nonfinite_steps
from kmp.callbacks.batch_replayer import BatchReplayer
from kmp.callbacks.failing_batch import FailingBatch
from kmp.callbacks.harm_warning import HarmWarning
from kmp.callbacks.monitor_settings import MonitorSettings
from kmp.callbacks.nonfinite_steps import NonfiniteSteps, NonfiniteStreak
from kmp.callbacks.recorder import Recorder
from kmp.callbacks.repairer import Repairer
from kmp.callbacks.report_writer import ReportWriter
from kmp.callbacks.stuck_detector import StuckDetector, StuckError, explained
from kmp.callbacks.training_records import Logs
from kmp.guarding.guarded_step import guard_train_step
from kmp.guarding.model_optimizers import optimizers_of
from kmp.optimizer import LossScaleOptimizer
from kmp.records import Record, Run, Snapshot
from kmp.utils import user_messages

_CHECKED_EVERY = 32  # batches; each check copies 72 bytes from the device
# Skipped steps in a row, or since the last check, after which a repair looks for a cause.
_STREAK = 4


class Training:
    """The parts of a `Monitor` in one training, in the order in which they act.

    Each check copies the counts of steps from the device. Only where a part needs more, it copies
    more. Three cadences are kept apart, because their costs are: of these checks, which an overflow
    makes frequent; of records, in `Recorder`, whose interval grows with the log; and in
    `SampleSchedule`, which steps measure gradients on the device, and which of those updates.

    Args:
        settings: The settings of the monitor.
        run: Gets the records.
        model: The model in training.
        optimizer: The optimizer to read.
        before: The training before this one of the same callback, which this one may continue.
        epochs: The number of epochs; 0 if it is not known.
        batches_of_epoch: The number of batches in an epoch; 0 if it is not known.
    """

    def __init__(
        self,
        settings: MonitorSettings,
        run: Run,
        model: keras.Model,
        optimizer: LossScaleOptimizer,
        *,
        before: "Training | None",
        epochs: int,
        batches_of_epoch: int,
    ) -> None:
        self._settings, self._model, self._optimizer = settings, model, optimizer
        self._epochs, self._batches_of_epoch = epochs, batches_of_epoch
        self.recorder = Recorder(settings, run, model, optimizer)
        self._ended_at: int | None = None  # the step, of a training that has ended
        self._before_ended_at = before._ended_at if before else None
        earlier = before._replayer if before else None
        is_valid = earlier is not None and earlier.watches(model, optimizer)
        self._replayer: BatchReplayer | None = earlier if is_valid else None
        self._repairer: Repairer | None = None
        self._harm_warning: HarmWarning | None = None
        self._detector: StuckDetector | None = None
        self._nonfinite: NonfiniteSteps | None = None
        self._before_nonfinite = before._nonfinite if before else None
        warning = before._harm_warning if before else None
        self._before_has_warned = warning is not None and warning.has_warned
        self._report: ReportWriter | None = None
        self._failing_batch: FailingBatch | None = None
        self.first_epoch = 0
        # The last epoch, until its metrics are recorded.
        self._ended_epoch: tuple[int, Logs] | None = None

    def prepare(self) -> bool:
        """Adds to the training step what the parts need. Returns whether to trace it again.

        Raises:
            ValueError: If a pattern of variables matches none, or no learning rate can be lowered.
            OSError: If a file cannot be written.
        """
        settings, model = self._settings, self._model
        if settings.on_nonfinite == nonfinite_steps.LOWER:
            nonfinite_steps.check_learning_rate(self._optimizer)
        is_of_model = any(self._optimizer is each for each in optimizers_of(model).values())
        has_one_replica = model.distribute_strategy.num_replicas_in_sync == 1
        is_new = self.recorder.prepare()
        if is_of_model:
            is_new |= guard_train_step(model)
        if settings.replay and is_of_model and has_one_replica:
            if self._replayer is None:
                self._replayer = BatchReplayer(model, self._optimizer)
                is_new |= self._replayer.is_new
            if settings.repair:
                self._repairer = Repairer(model, self._optimizer, self.recorder, self._replayer)
        if self._repairer or settings.on_nonfinite != "ignore":
            self._detector = StuckDetector(self._optimizer, settings.patience)
        is_chief = model.distribute_strategy.extended.should_checkpoint
        if settings.report is not None and is_chief:
            self._report = ReportWriter(settings.report, self.recorder.run, model.name)
        if settings.failing_batch is not None:
            self._failing_batch = FailingBatch(settings.failing_batch)
        return is_new

    def start(self) -> None:
        """Begins at the step of the optimizer.

        Runs twice: the `on_train_begin` of a later callback may have loaded the optimizer.
        """
        self.recorder.start()
        self._batches_until_check = 1
        self._counts = self._optimizer.counters.read_counts()
        continues = self._before_ended_at == self.recorder.previous.step
        if self._settings.on_nonfinite != "ignore":
            before = self._before_nonfinite if continues else None
            self._nonfinite = NonfiniteSteps(self._model, self._optimizer, before)
            self._nonfinite.start(self._counts)
        if self._detector:
            self._detector.start(self.recorder.previous)
        if self._repairer:
            self._repairer.start()
        if self._replayer:
            has_warned = continues and self._before_has_warned
            self._harm_warning = HarmWarning(self.recorder, has_warned=has_warned)
            snapshot = self.recorder.previous
            self._replayer.begin(snapshot, self._planned_steps(), continues=continues)

    def _planned_steps(self) -> int:
        """Returns the number of steps of this training, 0 if it is not known."""
        return (self._epochs - self.first_epoch) * self._batches_of_epoch

    def open_log(self) -> None:
        """Opens the log, and repeats the repairs that it has in a model that was built again.

        Raises:
            ValueError: If the folder is in use by another callback, or has a log of another kind.
        """
        self.recorder.open_log()
        # With several workers, only the chief has the log, and all must compute alike.
        has_several = distribution.has_several_workers(self._model.distribute_strategy)
        if self._repairer and not self.recorder.has_trained and not has_several:
            self._repairer.repeat_earlier()

    def begin_epoch(self, epoch: int) -> None:
        """Prepares an epoch."""
        self._finish_epoch()
        self.recorder.begin_epoch(epoch, self._batches_of_epoch)
        if self.recorder.batches_left == 1:
            self._batches_until_check = 1

    def begin_batch(self) -> None:
        """Prepares a batch."""
        self._finish_epoch()
        self.recorder.begin_batch()

    def end_batch(self, logs: Logs) -> None:
        """Checks the optimizer if that is due."""
        self._finish_epoch()
        steps = self._model.steps_per_execution
        self.recorder.has_trained = True
        self.recorder.batches_left -= steps
        self._batches_until_check -= steps
        if self._nonfinite and self._nonfinite.are_in(logs):
            self._batches_until_check = 0
        if self._batches_until_check <= 0 or self.recorder.has_new_repairs:
            self._check()
        self.recorder.end_batch()

    def _check(self, is_epoch_end: bool = False) -> None:
        """Reads the counts of steps, and lets the parts act that these make due."""
        counts = self._optimizer.counters.read_counts()
        new = counts.overflow_count - self._counts.overflow_count
        self._counts = counts
        if new and self._replayer:
            self._replayer.hold_skipped()
        if self._nonfinite:
            self._follow_nonfinite(self._nonfinite.look(counts))
        has_streak = max(new, counts.overflows_in_a_row) >= _STREAK
        is_needed = bool(self._repairer) and (has_streak or counts.step >= self._next_proof)
        if is_epoch_end or self.recorder.batches_left <= 0 or is_needed:
            self._read(counts.step)
        if self.recorder.has_new_repairs:  # of another callback
            self._read(counts.step)
            self.recorder.add_repairs()
            self._mark_repair()
        if self._repairer and self._repairer.repair():
            self._mark_repair()
        if self._harm_warning:
            self._harm_warning.look(self._repairer.obstacle if self._repairer else "")
        if self._detector and new:
            self._detect()
        self._plan(counts, new)

    def _plan(self, counts: Any, new: int) -> None:
        """Sets when to check again: before anything is due, and soon after an overflow."""
        batches = [self.recorder.batches_left]
        if self._detector:
            batches.append(self._detector.batches_until_stuck(counts))
        if self._nonfinite:
            batches.append(_CHECKED_EVERY)
        if self._replayer:
            batches.append(self._replayer.most_steps)
        if self._repairer:
            # A longer streak is looked at again when it has doubled.
            batches.append(counts.overflows_in_a_row or (_STREAK if new else _CHECKED_EVERY))
            if math.isfinite(self._next_proof):
                batches.append(math.ceil(self._next_proof) - counts.step)
        self._batches_until_check = max(1, min(batches))

    @property
    def _next_proof(self) -> float:
        return self._replayer.next_proof if self._replayer else math.inf

    def _read(self, step: int) -> None:
        """Records the state of the optimizer, and replays a batch if that is due."""
        if self.recorder.read(step):
            self._replay()

    def _replay(self, is_last: bool = False) -> None:
        if self._replayer:
            variables = self.recorder.selected_variables()
            snapshot = self.recorder.previous
            self._add(self._replayer.replay_if_due(snapshot, variables, is_last=is_last))

    def _add(self, found: Record | None) -> None:
        if found:
            self.recorder.add(found)

    def _mark_repair(self) -> None:
        if self._detector:
            self._detector.repaired_at = self.recorder.previous.step

    def _follow_nonfinite(self, streak: NonfiniteStreak | None) -> None:
        """Reports a streak of steps that no loss scale prevents, and does what was asked for."""
        policy, patience = self._settings.on_nonfinite, self._settings.patience
        if streak is None or self._nonfinite is None:
            return
        is_last = self._nonfinite.count == nonfinite_steps.MOST_WARNINGS
        if self._nonfinite.count > nonfinite_steps.MOST_WARNINGS and policy != "raise":
            return
        origin = None if streak.is_loss else self._optimizer.snapshot().overflow_origin
        batch = self._replayer.batch_of(streak.first) if self._replayer else None
        data = nonfinite_steps.describe_data(self._model, batch)
        text = streak.describe(origin, data)
        if self._failing_batch:
            text += self._failing_batch.save(streak.first, batch)
        if policy == "raise":
            self._replay_last_skipped()
            raise StuckError(self._explained(text))
        text += " The weights are unchanged."
        is_corrupt = nonfinite_steps.NAN_OR_INF in data  # which no learning rate cures
        if policy == nonfinite_steps.LOWER and not is_corrupt:
            before, now = nonfinite_steps.lower_learning_rate(self._optimizer)
            self._read(self._counts.step)
            step = self.recorder.previous.step
            self.recorder.add(Record(step=step, lowered_learning_rate=now))
            text += f" The learning rate is lowered from {before:g} to {now:g}."
        if is_last:
            text += " Later ones are counted without a warning."
        end = "a warning names" if policy == "warn" else "a StuckError ends the training and names"
        user_messages.warn(f"{text} After {patience} skipped steps in a row, {end} the cause.")

    def _detect(self) -> None:
        assert self._detector is not None
        streak = self._detector.look()
        if streak is None:
            return
        self._replay_last_skipped()
        if self._repairer and self._repairer.repair():
            self._mark_repair()
            return
        self._detector.mark_reported(streak)
        if self._settings.on_nonfinite == "ignore":
            return
        headline = streak.describe(self.recorder.run.has_loss_scale)
        message = self._explained(headline, streak.now)
        if self._settings.on_nonfinite != "warn":
            raise StuckError(message)
        user_messages.warn(message)

    def _replay_last_skipped(self) -> None:
        """Records the last batch that was skipped, replayed."""
        self._read(self._counts.step)
        if self._replayer:
            snapshot, variables = self.recorder.previous, self.recorder.selected_variables()
            self._add(self._replayer.replay_stuck(snapshot, variables))

    def _explained(self, headline: str, now: Snapshot | None = None) -> str:
        """Returns the cause of skipped steps, in files that are complete.

        `fit` calls no callback after an error.
        """
        run = self.recorder.run
        message = explained(headline, self._model, now or self.recorder.previous, run)
        self._finish_epoch()
        if self._report:
            self._report.write()
        self.recorder.write_verdict()
        return message

    def end_epoch(self, epoch: int, logs: Logs) -> None:
        """Reads the optimizer."""
        self._check(is_epoch_end=True)
        self._ended_epoch = epoch, logs

    def _finish_epoch(self) -> None:
        """Records the metrics of an epoch, also those that later callbacks have added to them."""
        if self._ended_epoch is None:
            return
        epoch, logs = self._ended_epoch
        self._ended_epoch = None
        self.recorder.end_epoch(epoch, logs)
        if self._report:
            self._report.end_epoch()

    @property
    def has_steps(self) -> bool:
        """Whether the optimizer has taken a step in this training."""
        return self.recorder.previous.step > self.recorder.first_step

    def end(self, *, warns: bool) -> None:
        """Replays the last batch, and completes the files.

        Args:
            warns: Whether to warn if nothing was recorded.
        """
        self._finish_epoch()
        if self.recorder.has_trained:
            self._replay(is_last=True)
            if warns:
                self.recorder.warn_if_nothing_was_recorded()
        self.close()
        self._ended_at = self.recorder.previous.step
        if self._report:
            self._report.end()

    def close(self) -> None:
        """Frees memory and files."""
        try:
            if self._replayer:
                self._replayer.end()
        finally:
            self.recorder.close()
