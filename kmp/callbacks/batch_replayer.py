"""Replays batches that a training saw, when that is due."""

import functools
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import keras

from kmp.backend.attributes import attributes_restored
from kmp.backend.keras_internals import compute_dtypes, has_float8_gradients
from kmp.backend.step_graph import StepGraph
from kmp.callbacks.replay_schedule import ReplaySchedule
from kmp.callbacks.retracing import models_with, trace_function_again
from kmp.diagnosis import soundness
from kmp.diagnosis.branches import flushed_branch, flushed_layers
from kmp.guarding.guarded_step import guarded_step_of, has_keras_step
from kmp.guarding.model_optimizers import all_optimizers_of
from kmp.optimizer import LossScaleOptimizer
from kmp.records import Record, Snapshot
from kmp.records.jsonl import check_record
from kmp.replay import (
    CapturedBatch,
    Criteria,
    Failure,
    Passes,
    ReplayAttempts,
    StepContext,
    StepPrograms,
    failing_part,
    is_ragged,
    objects_of_step,
    reason_of,
    replay_batch,
    traced_step,
)
from kmp.utils import user_messages
from kmp.utils.float_formats import FLOAT16, FLOAT32, FloatFormat, computing_format

logger = logging.getLogger("kmp")

CRITERIA = Criteria(
    is_harmful=soundness.shows_harm,
    lost_states=lambda comparison: soundness.harmful_states(comparison.states),
    flushed_layers=flushed_layers,
    flushed_branch=flushed_branch,
)


class RetraceError(RuntimeError):
    """A change of the model breaks its training step."""


class BatchReplayer:
    """Replays batches at the steps of a `ReplaySchedule`.

    Of a model in float32, only batches of skipped steps. Captures the batch of the first step, of
    the step after a replay, and of each skipped step. After a replay that failed, `ReplayAttempts`
    decides what to replay next; without anything left, it warns once.

    Args:
        model: A model with a guard and one replica. The capture is added to its training step.
        optimizer: The optimizer whose steps are replayed.

    Attributes:
        is_new: Whether the capture is new, so that the step must be traced again.
    """

    def __init__(self, model: keras.Model, optimizer: LossScaleOptimizer) -> None:
        guard = guarded_step_of(model)
        assert guard is not None
        is_custom = not has_keras_step(model)
        self._model, self._is_custom = model, is_custom
        self._run = guard.own_step or functools.partial(type(model).train_step, model)
        capture = guard.capture_of(optimizer)
        self.is_new = capture is None
        if capture is None:
            capture = guard.add_capture(optimizer)
        self._capture = capture
        self._begin(optimizer.snapshot())
        self._graph_of_programs: StepGraph | None = None
        self._traced: StepGraph | None = None  # of a step that trains eagerly
        self._repairs_in_trace = 0
        self._programs = StepPrograms()
        self._replayed: CapturedBatch | None = None  # in the last replay
        self._overflows_at_request = 0

    def watches(self, model: keras.Model, optimizer: LossScaleOptimizer) -> bool:
        """Whether it captures the batches of this training."""
        guard = guarded_step_of(model)
        is_in_step = guard is not None and guard.capture_of(optimizer) is self._capture
        return is_in_step and self._model is model

    def begin(self, snapshot: Snapshot, planned_steps: int, *, continues: bool) -> None:
        """Begins a training: captures its first batch.

        Args:
            snapshot: The state of the optimizer.
            planned_steps: The number of steps; 0 if that is not known.
            continues: Whether it is another part of the training before, as where `fit` is called
                for each batch. What that has shown counts.
        """
        if not continues:
            self._begin(snapshot)
        self._schedule.plan(snapshot.step, planned_steps, continues=continues)
        self.end()
        self._request(snapshot)

    def _begin(self, snapshot: Snapshot) -> None:
        """Begins without what earlier replays have shown."""
        scales_loss = self._capture.optimizer.rule.scales_loss
        self._schedule = ReplaySchedule(snapshot, scales_loss=scales_loss)
        self._attempts = ReplayAttempts(
            runs_step=not has_float8_gradients(self._model),
            can_run_less=self._is_custom,
            takes_whole=self._capture.takes_whole,
        )
        self._has_warned = self._has_said_so = False
        self._largest_norms: dict[str, float] = {}  # of the gradients of each layer, in float32
        self._compares_formats = False  # in the next replay

    @property
    def most_steps(self) -> int:
        """In how many steps to look for a skipped one, before other batches replace its batch."""
        return self._capture.most_steps

    def hold_skipped(self) -> None:
        """Has the batch of the last skipped step at hand, also when others have replaced it."""
        self._capture.read()

    def end(self) -> None:
        """Frees the captured batch, and what was made to replay it."""
        self._graph_of_programs = self._traced = None
        self._programs = StepPrograms()
        self._replayed = None
        self._capture.forget()

    def replay_if_due(
        self, snapshot: Snapshot, variables: Mapping[str, Any], *, is_last: bool
    ) -> Record | None:
        """Replays the captured batch if there is a reason to, or if training ends.

        Returns:
            A record with `replay` and the float32 gradients of the `variables` as `reference`, or
            with `replay_error`.
        """
        if not variables:
            return None
        found = self._replay_if_due(snapshot, variables, is_last)
        if self._capture.failure:
            self._attempts.stop(self._capture.failure)
        reason = self._attempts.last_reason if is_last else self._attempts.reason
        if reason is None or self._has_warned:
            return found
        self._has_warned = True
        user_messages.warn(
            f"kmp cannot replay a batch of {self._model.name!r} to find what its precision loses,"
            f" and the training continues without replays: {reason}."
        )
        return found or Record(step=snapshot.step, replay_error=reason)

    def _replay_if_due(
        self, snapshot: Snapshot, variables: Mapping[str, Any], is_last: bool
    ) -> Record | None:
        if self._attempts.reason or self.runs_earlier_trace:
            return None
        schedule, runs_step = self._schedule, self._attempts.runs_step
        has_overflowed = schedule.is_overflow_due(snapshot, has_gradients=runs_step)
        guard = guarded_step_of(self._model)
        is_repaired = guard is not None and guard.has_repaired_layers
        has_computed_in_16_bits = is_repaired or self._format is not FLOAT32
        is_compared = has_computed_in_16_bits and schedule.is_comparison_due(
            snapshot, self._format, is_last=is_last
        )
        if not has_overflowed and not is_compared:
            if snapshot.overflow_count > self._overflows_at_request:
                # The batch of a skipped step has taken the place of another one.
                self._request(snapshot)
            return None
        captured = self._capture.read()
        if captured is None:
            return None
        self._compares_formats = schedule.is_format_due(snapshot, is_last=is_last)
        if has_overflowed and captured.was_skipped:
            return self._replay_overflow(captured, variables, snapshot)
        # Other batches may have replaced that of the skipped step.
        return self._replay_healthy(captured, variables, snapshot) if is_compared else None

    def _replay_overflow(
        self, captured: CapturedBatch, variables: Mapping[str, Any], snapshot: Snapshot
    ) -> Record:
        """Replays the batch of a skipped step."""
        schedule = self._schedule
        schedule.note_zeros(snapshot, self._format)
        failed: Failure = "loss" if schedule.has_new_losses(snapshot) else "gradients"
        with schedule.time.of_overflows.measured():
            found = self._replay(captured, variables, snapshot, captured.loss_scale, failed)
        if not self._attempts.last_reason:  # else another attempt follows
            schedule.note_overflow(snapshot)
        return found

    def _replay_healthy(
        self, captured: CapturedBatch, variables: Mapping[str, Any], snapshot: Snapshot
    ) -> Record | None:
        """Replays a batch to compare the precisions."""
        if captured.was_skipped:  # no sample of the data
            self._request(snapshot)
            return None
        schedule = self._schedule
        schedule.note_zeros(snapshot, self._format)
        if not self._attempts.takes_whole and not is_ragged(captured.data):
            part, *_ = captured.parts(schedule.most_examples(captured))
            captured = captured._replace(data=part)
        with schedule.time.of_comparisons.measured():
            found = self._replay(captured, variables, snapshot, snapshot.loss_scale, None)
        schedule.note_comparison(found.replay or None, self._format)
        if not self._attempts.last_reason:
            schedule.note_compared(snapshot.step)
        return found

    @property
    def next_proof(self) -> float:
        """The step at which to compare again: see `ReplaySchedule.next_proof`."""
        return self._schedule.next_proof

    def replay_stuck(self, snapshot: Snapshot, variables: Mapping[str, Any]) -> Record | None:
        """Replays the last captured batch of a training that is stuck, unless it was replayed.

        Returns what `replay_if_due` does.
        """
        captured = self._capture.read() if variables and not self._attempts.reason else None
        if captured is None or (self._replayed and captured.step == self._replayed.step):
            return None
        if not self._schedule.takes_stuck():
            return None
        failed: Failure = "loss" if snapshot.nonfinite_losses_in_a_row else "gradients"
        return self._replay(captured, variables, snapshot, captured.loss_scale, failed)

    def batch_of(self, step: int) -> tuple[Any, ...] | None:
        """Returns the whole batch of a skipped step, or `None` if it is not kept."""
        return self._capture.batch_of(step)

    def replay_again(
        self,
        snapshot: Snapshot,
        variables: Mapping[str, Any],
        loss_scale: float,
    ) -> Record | None:
        """Replays the batch of the last replay once more, after a change of the model.

        The step is traced for it. Returns `None` if the batch was not kept, or its replay fails.

        Raises:
            RetraceError: If the change breaks the step.
        """
        if self._replayed is None:
            return None
        self._request(snapshot)
        try:
            graph = self._traced_for(self._replayed.data)
        except Exception as error:  # of the change, in code of the user's
            raise RetraceError(reason_of(error)) from error
        try:
            return self._replay_once(self._replayed, variables, snapshot, loss_scale, None, graph)
        except Exception:  # of the change
            return None

    def _replay(
        self,
        captured: CapturedBatch,
        variables: Mapping[str, Any],
        snapshot: Snapshot,
        loss_scale: float,
        failed: Failure | None,
    ) -> Record:
        """Replays a batch, and captures the next one. Returns what `replay_if_due` does."""
        attempts = self._attempts
        self._request(snapshot)
        if self._capture.unrestorable:
            reason = f"a replay would change {self._capture.unrestorable}"
            attempts.stop(reason)
            return Record(step=snapshot.step, replay_error=reason)
        try:
            found = self._replay_once(captured, variables, snapshot, loss_scale, failed)
        except TimeoutError as error:
            attempts.took_too_long(self._replayed)
            return Record(step=snapshot.step, replay_error=f"TimeoutError: {error}")
        # The user's code may fail outside its training step, or memory may be too small.
        except Exception as error:
            following = attempts.failed(error, self._replayed, captured)
            if following == "same batch":
                return self._replay(captured, variables, snapshot, loss_scale, failed)
            if following == "whole batch":
                if self._capture.take_whole(captured):
                    whole = captured._replace(data=captured.whole)
                    return self._replay(whole, variables, snapshot, loss_scale, failed)
                attempts.stop(f"{attempts.last_reason}, and the whole batch is too large")
            return Record(step=snapshot.step, replay_error=attempts.last_reason or "")
        attempts.succeeded()
        return found

    def _replay_once(
        self,
        captured: CapturedBatch,
        variables: Mapping[str, Any],
        snapshot: Snapshot,
        loss_scale: float,
        failed: Failure | None,
        graph: StepGraph | None = None,
    ) -> Record:
        """Replays a part of a batch. Returns a record with `replay`, and maybe `reference`."""
        began, most = time.monotonic(), self._schedule.time.most_seconds
        parts = [captured.data] if graph else self._attempts.parts(captured)
        graph = graph or self._graph_for(parts[0])
        is_whole = graph.rows == captured.batch_size and not self._capture.is_of_loop
        self._attempts.takes_whole = is_whole or self._capture.takes_whole
        if is_whole:
            # What is traced for so many rows takes as long for fewer, of which some would repeat.
            parts = [captured.whole]
        self._replayed = CapturedBatch(parts[0], *captured[1:])
        passes = Passes(
            self._model,
            parts[0],
            graph,
            variables,
            watched=self._watched,
            kind="loop" if self._capture.is_of_loop else "user" if self._is_custom else "keras",
            has_backward=self._attempts.runs_step,
            restored=self._capture.variables,
            deadline=began + most / 2,
            beside=self.beside,
            programs=self._programs if graph is self._graph_of_programs else StepPrograms(),
        )
        compiled_before = passes.programs.seconds
        if failed and len(parts) > 1:
            part = failing_part(passes, parts, failed, loss_scale, captured.batch_size)
            passes = replace(passes, data=part)
            self._replayed = CapturedBatch(part, *captured[1:])
        rule = self._capture.optimizer.rule
        context = StepContext(
            snapshot.step,
            loss_scale,
            initial_scale=rule.initial_scale,
            # Where a minimum or a fixed scale is too large, that is to change, and no layer.
            min_scale=min(rule.min_scale, FLOAT16.smallest_normal),
            batch_size=captured.batch_size,
            failed=failed,
            largest_norms=self._largest_norms,
            compares_formats=self._compares_formats,
        )
        try:
            limited = replace(passes, deadline=began + most)
            found, reference = replay_batch(limited, context, CRITERIA)
        except TimeoutError:
            raise TimeoutError(
                f"{passes.examples} examples take longer than {most:.0f} s"
            ) from None
        record = Record(step=snapshot.step, replay=found)
        check_record(record)
        if self._compares_formats and found.is_finite_in_float32:
            self._compares_formats = False
            self._schedule.note_format()
        compilations = passes.programs.seconds
        self._tell_compilations(compilations - compiled_before)
        took = time.monotonic() - began - (compilations - compiled_before)
        if self._schedule.time.is_long(took):
            self._take_fewer(took)
        for each in found.gradient_errors:
            self._largest_norms[each.layer] = max(each.norm, each.largest_norm)
        if reference:
            record.reference = reference
        return record

    @property
    def _watched(self) -> LossScaleOptimizer | None:
        """The optimizer whose gradients are compared, if there are several."""
        optimizer = self._capture.optimizer
        # One that has scaled a loss: its gradients are not those of the other one's.
        has_loss = optimizer.step_monitor.loss_dtype is not None
        return optimizer if has_loss and len(all_optimizers_of(self._model)) > 1 else None

    def _take_fewer(self, seconds: float) -> None:
        """Replays fewer examples after a replay that took long, and says so once."""
        is_changed = self._attempts.take_fewer(self._replayed)
        if is_changed and not self._has_said_so:
            self._has_said_so = True
            logger.warning(
                "A replay of a batch of %r took %.0f s. The next ones take fewer examples.",
                self._model.name,
                seconds,
            )

    def _tell_compilations(self, seconds: float) -> None:
        """Says what compilations took, if they took long; they are not repeated."""
        self._schedule.time.of_comparisons.once += seconds
        if self._schedule.time.is_long(seconds):
            logger.warning(
                "Harm of 16 bits in %r was checked in the training step as it is compiled, which"
                " took %.0f s to compile in both precisions.",
                self._model.name,
                seconds,
            )

    def _request(self, snapshot: Snapshot) -> None:
        """Captures the batch of the next step."""
        self._overflows_at_request = snapshot.overflow_count
        self._capture.request()

    def _graph_for(self, data: Any) -> StepGraph:
        """Returns the graph of the training step, which is another one after a repair.

        Of a step that trains eagerly, a trace that its optimizers do not apply.
        """
        guard = guarded_step_of(self._model)
        graph = guard.graph_for(data, self._capture.optimizer) if guard else None
        has_none = guard and not guard.graphs_of(self._capture.optimizer)
        if guard and has_none and not self._capture.is_of_loop:
            if self._traced is None or self._repairs_in_trace != len(guard.repairs):
                self._traced = self._traced_for(data)
                self._repairs_in_trace = len(guard.repairs)
            graph = self._traced
        if graph is None:
            raise RuntimeError("the step has no graph that kmp sees")
        if graph is not self._graph_of_programs:
            self._graph_of_programs, self._programs = graph, StepPrograms()
        return graph

    @property
    def runs_earlier_trace(self) -> bool:
        """Whether a training loop was not traced again since the last repair."""
        guard = guarded_step_of(self._model)
        if guard is None or not self._capture.is_of_loop:
            return False
        return not guard.graphs_of(self._capture.optimizer)

    def _traced_for(self, data: Any) -> StepGraph:
        """Returns a new trace of the step, which runs as the one that trains does.

        Raises:
            Exception: What the code of the user raises in it.
        """
        guard = guarded_step_of(self._model)
        assert guard is not None
        layers, optimizers = [self._model, *self.beside], all_optimizers_of(self._model)
        optimizer = self._capture.optimizer
        known = guard.graph_for(data, optimizer)
        if self._capture.is_of_loop:
            before = guard.graphs
            guard.forget_graphs()
            try:
                with attributes_restored(objects_of_step(layers, optimizers)):
                    assert known is not None
                    trace_function_again(known, models_with(layers))
                traced = guard.graph_for(data, optimizer)
            finally:
                guard.graphs = before
            if traced is None:
                raise RuntimeError("its step is another one when it is traced again")
            return traced
        graph = traced_step(self._run, data, layers, optimizers)
        graph.is_compiled = bool(known and known.is_compiled)
        return graph

    @property
    def beside(self) -> list[keras.Layer]:
        """The layers beside the model that its step calls, as in the loss."""
        guard = guarded_step_of(self._model)
        return guard.beside if guard else []

    @property
    def _format(self) -> FloatFormat:
        """The number format that limits the model, which a repair may change."""
        layers = (self._model, *self.beside)
        return computing_format(set().union(*map(compute_dtypes, layers)))
