"""The callback that lets a training go on in which float16 fails in a few layers."""

from collections.abc import Sequence

import keras

from kmp.advice import (
    EXPLODING_LOSS,
    SMALL_LOSS,
    Finding,
    RunMetrics,
    advise,
    diagnosis_of,
    since_last_fallback,
)
from kmp.backend import (
    computing_layers,
    direct_sublayers,
    distribution,
    dtype_policies_replaced,
    is_keras_class,
    is_passthrough,
    layers_in_16_bits,
    sublayers,
)
from kmp.callbacks.monitor import Monitor
from kmp.callbacks.optimizer_reader import CopyableCallback, Logs
from kmp.policy import guarding
from kmp.records import HARMFUL_OUTPUT_ERROR_ALONE, Replay
from kmp.utils import FLOAT32, user_messages, validation

# The causes of findings that float16 alone has: not data, labels, a learning rate or weights with
# NaN.
CURABLE = (
    "backward_overflow",
    "constant",
    "forward_overflow",
    "forward_underflow",
    "loss_overflow",
    "precision_loss",
    "rounding",
)
_STREAK = 4  # skipped steps in a row, or since the last check, after which it looks for a cause
_CHECKED_EVERY = 32  # batches; each check copies a few numbers from the device
_AGREEING = 3  # comparisons in a row in which gradients differ are a proof
# A training that overflows may diverge in any number format, before the records are enough to say
# so.
_LARGE_UPDATE = 1.0  # relative to the norm of the weights; 0.001 is typical


class Float32Fallback(CopyableCallback):
    """Sets layers to float32 in which float16 provably fails, and continues the training.

    When steps are skipped in a row, or a comparison shows that float16 changes outputs and
    gradients, the monitor's replay of a batch searches the fewest layers that have to compute in
    float32, at most twelve; or a model of that size that computes outside of its layers. If it
    finds them, and the cause is not the data, the labels, the learning rate or the weights, this
    callback sets their `dtype_policy` and that of their sublayers to float32, and replays the batch
    once more. Only if that is sound, the training step is traced again and the training continues;
    otherwise everything is as before. Variables, optimizer and counters stay. A loss scale that the
    overflows have lowered returns to the initial one, or to what the batch then allows.

    It warns with the layers, the reason, the step and the change that makes it permanent, and
    records `fallback`. The layers of a functional or Sequential model keep their policy in each
    file that is saved, and so do layers that a custom class creates with a `dtype` of their own. A
    training that resumes in a new process, with a model that is built again in the same way, sets
    the layers before its first step if it continues the log in the monitor's `log_dir`. Without a
    log it falls back again in the steps that overflow.

    Does nothing where no batch can be replayed, see `Monitor`; and nothing to a training without
    overflows and harmful errors.

    Args:
        monitor: The `kmp.callbacks.Monitor` of the same `fit`, listed before it, with
            `reference="auto"`.

    Raises:
        TypeError: If `monitor` is not a `Monitor`.
        ValueError: If it has `reference=None`.

    Example:
    >>> from kmp import callbacks
    >>> monitor = callbacks.Monitor()
    >>> attached = [monitor, callbacks.Float32Fallback(monitor), callbacks.StuckDetector()]
    """

    def __init__(self, monitor: Monitor) -> None:
        super().__init__()
        validation.instance("monitor", monitor, Monitor, "a kmp.callbacks.Monitor")
        self.monitor = monitor
        if monitor.reference is None:
            raise ValueError(
                "`monitor` must replay batches: create a kmp.callbacks.Monitor with"
                " reference='auto'."
            )
        self._begin()

    def on_train_begin(self, logs: Logs = None) -> None:
        self._begin()

    def _begin(self) -> None:
        self.repaired_at = 0  # the step of the last repair of this training
        self._batches_left = 1
        self._overflows: int | None = None  # at the last check
        self._rejected: Replay | None = None
        self._records = 0  # of the run, when it was examined last

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        # With several workers, only the chief has the log, and all must compute alike.
        has_several_workers = distribution.has_several_workers(self.model.distribute_strategy)
        if self.monitor.is_active and not self.monitor.has_trained and not has_several_workers:
            self._repeat_earlier_fallbacks()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if not self.monitor.is_active:
            return
        self._batches_left -= self.model.steps_per_execution
        if self._batches_left <= 0:
            counts = self.monitor.optimizer.counters.read_counts()
            new = 0 if self._overflows is None else counts.overflow_count - self._overflows
            self._overflows = counts.overflow_count
            # A longer streak is looked at again when it has doubled.
            self._batches_left = counts.overflows_in_a_row or (_STREAK if new else _CHECKED_EVERY)
            if max(new, counts.overflows_in_a_row) >= _STREAK:
                self.monitor.read()
        self.repair()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if self.monitor.is_active:
            self.repair()

    def _repeat_earlier_fallbacks(self) -> None:
        """Sets layers of a model that was built again to float32, if the log that this training continues has them.

        They were proven in the same run. The first step is traced later, so it computes with them.
        """
        rows, layers = self.monitor.earlier_fallbacks, computing_layers(self.model)
        paths = list(
            dict.fromkeys(path for row in rows for path in row["fallback"] if path in layers)
        )
        changed = layers_in_16_bits([layers[path] for path in paths])
        if not changed:
            return
        self._set_to_float32(changed)
        # The log has the record. The run in memory begins here, with the counts of the optimizer.
        snapshot, reason = self.monitor.optimizer.snapshot(), rows[-1].get("fallback_reason", "")
        counts = ("overflow_count", "nonfinite_loss_count", "overflow_origins_by_variable")
        record = {"step": snapshot.step, "fallback": paths, "fallback_reason": reason}
        self.monitor.run.append(record | {key: getattr(snapshot, key) for key in counts})
        finding = next(
            found for found in advise(self.monitor.run) if found.cause == "float32_fallback"
        )
        self._warn(
            reason,
            f"As at step {rows[-1]['step']}, before the training was resumed,",
            paths,
            changed,
            finding,
        )

    def repair(self) -> bool:
        """Sets the layers to float32 that the last replay found, if it is a proof and float16 is the cause.

        Returns whether it did.
        """
        replay, records = self.monitor.last_replay, len(self.monitor.run.rows)
        is_known = replay is self._rejected or records == self._records
        if replay is None or is_known or not replay.float32_layers:
            return False
        has_output_error = (
            replay.error_origin or (replay.output_error or 0.0) > HARMFUL_OUTPUT_ERROR_ALONE
        )
        # The rounding of the outputs may be all that is left of a small loss.
        largest = HARMFUL_OUTPUT_ERROR_ALONE * max(abs(replay.float32_loss or 0.0), SMALL_LOSS)
        has_loss_error = replay.is_harmful and replay.loss_difference > largest
        is_proof = (
            has_output_error or has_loss_error or replay.lost_states or replay.overflow_inside
        )
        self._records = records
        if replay.is_finite and not is_proof and not self._is_repeated():
            return False  # only gradients differ, which one batch does not prove
        metrics = RunMetrics(self.monitor.run)
        finding = next(iter(diagnosis_of(metrics).problems), None)
        if finding is None or _may_diverge(metrics, replay):
            return False  # a later record may tell
        self._rejected = replay
        layers = computing_layers(self.model)
        changed = layers_in_16_bits(
            [layers[path] for path in replay.float32_layers if path in layers]
        )
        if (
            finding.cause not in CURABLE
            or not layers.keys() >= set(replay.float32_layers)
            or not changed
        ):
            return False
        float32 = keras.DTypePolicy(FLOAT32.name)
        with dtype_policies_replaced((layer, float32) for layer in changed):
            proof = self.monitor.replay_again(replay.usable_scale)
        result = proof.get("replay")
        if result is None or not result.is_finite or (replay.is_finite and result.is_harmful):
            return False
        self._set_to_float32(changed)
        rule = self.monitor.optimizer.rule
        if not replay.is_finite:  # the overflows have lowered the scale, or it overflows still
            scale = max(
                rule.min_scale, min(rule.initial_scale, result.usable_scale or rule.initial_scale)
            )
            self.monitor.optimizer.dynamic_scale.assign(scale)
        self.monitor.add_record(
            {"fallback": replay.float32_layers, "fallback_reason": finding.title}
        )
        self.monitor.add_record(proof)
        self.repaired_at = self.monitor.run.rows[-1]["step"]
        self._warn(
            finding.title, f"At step {self.repaired_at}", replay.float32_layers, changed, finding
        )
        return True

    def _is_repeated(self) -> bool:
        """Whether the last comparisons since a repair were all harmful, and a layer in float32 is in each cure."""
        _, run = since_last_fallback(self.monitor.run)
        latest = [replay for _, replay in run.comparisons[-_AGREEING:] if replay.is_harmful]
        cures = [set(replay.float32_layers or ()) for replay in latest]
        return len(latest) == _AGREEING and bool(set.intersection(*cures))

    def _set_to_float32(self, changed: Sequence[keras.Layer]) -> None:
        for layer in changed:
            layer.dtype_policy = FLOAT32.name
        guard = guarding.guard_of(self.model)
        if guard:
            guard.has_fallback = True
        self.model.make_train_function(force=True)
        self.model.test_function = self.model.predict_function = (
            None  # traced again when they are used
        )

    def _warn(
        self,
        reason: str,
        when: str,
        paths: Sequence[str],
        changed: Sequence[keras.Layer],
        finding: Finding,
    ) -> None:
        change = finding.change.replace("\n", "\n  ")
        user_messages.warn(
            f"{reason} {when} kmp set {', '.join(map(repr, paths))} to float32, and the training"
            f" continues. To make it permanent:\n  {change}{_not_in_files(self.model, changed)}"
        )


def _may_diverge(metrics: RunMetrics, replay: Replay) -> bool:
    """Whether the updates are so large, or the loss so high in float32 too, that float16 need not be the cause."""
    first, highest, _ = metrics.losses
    has_risen = min(highest, abs(replay.float32_loss or 0.0)) > EXPLODING_LOSS * max(
        abs(first), SMALL_LOSS
    )
    return has_risen or metrics.update_ratio[1] > _LARGE_UPDATE


def _not_in_files(model: keras.Model, changed: Sequence[keras.Layer]) -> str:
    """Returns a sentence about the layers that code of the user creates: Keras saves no policy of these."""
    changed_ids = set(map(id, changed))
    owners = [
        each
        for each in sublayers(model)
        if not (is_keras_class(type(each)) or is_passthrough(each))
    ]
    created = {
        inner.name: type(owner).__name__
        for owner in owners
        for inner in direct_sublayers(owner)
        if id(inner) in changed_ids
    }
    if not created:
        return ""
    names, classes = ", ".join(map(repr, created)), " and ".join(dict.fromkeys(created.values()))
    return (
        f"\nA saved file keeps this for {names} only if the config of {classes} contains it: make"
        " the change before you load the file."
    )
