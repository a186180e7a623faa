"""Lets a training go on in which 16 bits fail in a few layers."""

from collections.abc import Sequence
from dataclasses import replace

import keras

from kmp.advice import Finding
from kmp.advice.diagnose import finding_of
from kmp.backend.keras_internals import (
    computing_layers,
    direct_sublayers,
    float32_policy,
    is_keras_class,
    is_passthrough,
    layers_in_16_bits,
    sublayers,
)
from kmp.callbacks.batch_replayer import BatchReplayer, RetraceError
from kmp.callbacks.recorder import Recorder
from kmp.callbacks.retracing import models_with, trace_again
from kmp.diagnosis import Cure, Observations, cure_of
from kmp.diagnosis.branches import flushed_layers
from kmp.diagnosis.causes.repaired import Repaired
from kmp.diagnosis.model_names import ModelNames
from kmp.diagnosis.soundness import is_harmful
from kmp.diagnosis.wording import capitalized
from kmp.guarding.guarded_step import Repair, guarded_step_of
from kmp.optimizer import LossScaleOptimizer
from kmp.records import Record, Replay
from kmp.utils import user_messages


class Repairer:
    """Sets layers to float32 in which 16 bits provably fail, and continues the training.

    `kmp.diagnosis.cure_of` decides by the records. The repair replays the batch once more with
    these layers in float32. Only if that is sound, the step is traced again with them; otherwise
    everything is as before.

    Args:
        model: The model in training.
        optimizer: Its optimizer.
        recorder: The records of the training.
        replayer: The replays of the training.

    Attributes:
        obstacle: The error of the user's code with the last cure; empty if there was none.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: LossScaleOptimizer,
        recorder: Recorder,
        replayer: BatchReplayer,
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._recorder, self._replayer = recorder, replayer

    def start(self) -> None:
        """Begins a training. Replays of earlier ones are no reason for a repair."""
        self._examined = len(self._recorder.run.rows)
        replays = self._recorder.run.replays
        self._rejected: Replay | None = replays[-1][1] if replays else None
        self.obstacle = ""
        self._repaired_at: int | None = None  # the step, until another one has been checked

    def repeat_earlier(self) -> None:
        """Sets layers of a model that was built again to float32, if the continued log has them.

        They were proven in the same run. The first step is traced later, so it computes with them.
        """
        rows = self._recorder.earlier_fallbacks
        layers = computing_layers(self._model, self._replayer.beside)
        paths: dict[str, None] = {}
        for row in rows:
            paths |= dict.fromkeys(path for path in row.fallback or () if path in layers)
        changed = layers_in_16_bits([layers[path] for path in paths])
        if not changed:
            return
        reason = rows[-1].fallback_reason or ""
        failed = self._set_to_float32(changed, Repair(tuple(paths), reason))
        self._recorder.repairs_recorded += 1
        # The log has the record. The run in memory begins here, with the counts of the optimizer.
        snapshot = self._optimizer.snapshot()
        record = Record(
            step=snapshot.step,
            fallback=list(paths),
            fallback_reason=reason,
            overflow_count=snapshot.overflow_count,
            nonfinite_loss_count=snapshot.nonfinite_loss_count,
            overflow_origins_by_variable=snapshot.overflow_origins_by_variable,
        )
        self._recorder.run.append(record)
        repaired = Repaired.of(Observations(self._recorder.run))
        assert repaired is not None
        when = f"as at step {rows[-1].step}, before the training was resumed,"
        continues = "the training continues"
        finding = finding_of(repaired)
        self._warn(reason, when, continues, list(paths), changed, finding, failed)

    def repair(self) -> bool:
        """Applies the cure that the records prove, if there is one. Returns whether it did."""
        run = self._recorder.run
        if len(run.rows) == self._examined:
            return False
        self._examined = len(run.rows)
        self._check_trace()
        cure = cure_of(Observations(run))
        if cure is None or cure.replay is self._rejected:
            return False
        self._rejected = cure.replay
        layers = computing_layers(self._model, self._replayer.beside)
        if not layers.keys() >= set(cure.layers):
            return False
        while True:
            changed = layers_in_16_bits([layers[path] for path in cure.layers])
            proof, self.obstacle = None, ""
            if changed:
                try:
                    proof = self._proof(cure, changed)
                except RetraceError as error:
                    self.obstacle = str(error)
            # Code of the user's may not take a float32 result beside float16: what contains it.
            around = [path.rpartition("/")[0] for path in cure.layers]
            outwards = [
                outer if outer in layers else path
                for outer, path in zip(around, cure.layers, strict=True)
            ]
            if not self.obstacle or tuple(outwards) == tuple(cure.layers):
                break
            cure = replace(cure, layers=tuple(dict.fromkeys(outwards)))
        if proof is None:
            return False
        self._apply(cure, changed, proof)
        return True

    def _check_trace(self) -> None:
        """Warns if a training loop goes on with what was traced before a repair."""
        step = self._recorder.previous.step
        if self._repaired_at is None or step == self._repaired_at:
            return
        self._repaired_at = None
        if self._replayer.runs_earlier_trace:
            user_messages.warn(
                f"At step {step} the training loop still runs what was traced before kmp set layers"
                " to float32. Call the `tf.function` itself, not what `get_concrete_function`"
                " returns."
            )

    def _proof(self, cure: Cure, changed: Sequence[keras.Layer]) -> Record | None:
        """Replays the batch with the cure. Returns the record of the replay if it is sound.

        The layers have their policies again.

        Raises:
            RetraceError: If the cure breaks the training step.
        """
        before = [layer.dtype_policy for layer in changed]
        try:
            for layer in changed:
                layer.dtype_policy = float32_policy(layer)
            proof = self._replayer.replay_again(
                self._recorder.previous,
                self._recorder.selected_variables(),
                self._scale_of_proof(cure),
            )
        finally:
            for layer, policy in zip(changed, before, strict=True):
                layer.dtype_policy = policy
        result = proof.replay if proof else None
        if not result:
            return None
        is_sound = result.is_finite and not self._flushes_branch(cure, result)
        is_harmless = not is_harmful(result, self._recorder.run.format)
        return proof if is_sound and (is_harmless or not cure.replay.is_finite) else None

    def _flushes_branch(self, cure: Cure, proof: Replay) -> bool:
        """Whether the proof flushes the branch that the search kept."""
        branch = cure.replay.search.branch if cure.replay.search else []
        model = ModelNames(self._recorder.run.settings)
        flushed = proof.gradients.flushed
        shares = {
            path: flushed.get(path, 0.0)
            for path in self._recorder.selected_variables()
            if model.layer_of(path) in branch and path not in proof.gradients.zero
        }
        return bool(flushed_layers(shares, model.layer_of))

    def _scale_of_proof(self, cure: Cure) -> float:
        """Returns the loss scale of the search, or the one in use if that is usable.

        The training cannot go on below the minimum; a fixed scale is its own one.
        """
        search = cure.replay.search
        if search and search.loss_scale:
            return search.loss_scale
        in_use = self._recorder.previous.loss_scale
        usable = cure.replay.gradients.usable_scale or in_use
        return min(in_use, max(usable, self._optimizer.rule.min_scale))

    def _apply(self, cure: Cure, changed: Sequence[keras.Layer], proof: Record) -> None:
        finding = finding_of(cure.cause)
        failed = self._set_to_float32(changed, Repair(cure.layers, finding.title))
        continues = "the training continues"
        if proof.replay and not cure.replay.is_finite:
            continues += self._restore_loss_scale(proof.replay, cure)
        self._recorder.add_repairs()
        self._recorder.add(proof)
        step = self._repaired_at = self._recorder.previous.step
        when = f"at step {step}"
        self._warn(finding.title, when, continues, cure.layers, changed, finding, failed)

    def _restore_loss_scale(self, proof: Replay, cure: Cure) -> str:
        """Sets the loss scale that overflows have lowered, or that still overflows.

        Returns what to say of it; nothing if it stays.
        """
        rule, search = self._optimizer.rule, cure.replay.search
        usable = proof.gradients.usable_scale or rule.initial_scale
        if search and search.loss_scale:  # a lower one would flush a branch
            usable = max(usable, search.loss_scale)
        scale = max(rule.min_scale, min(rule.initial_scale, usable))
        if scale == self._recorder.previous.loss_scale:
            return ""
        self._optimizer.dynamic_scale.assign(scale)
        return f" at the loss scale {scale:g}"

    def _set_to_float32(self, changed: Sequence[keras.Layer], repair: Repair) -> list[str]:
        """Sets layers to float32. Returns what `trace_again` does."""
        for layer in changed:
            layer.dtype_policy = float32_policy(layer)
        own = guarded_step_of(self._model)
        if own:
            own.repairs.append(repair)
        models = [*models_with(changed), self._model]  # a layer may be beside the model
        guards = [guard for guard in map(guarded_step_of, models) if guard]
        steps = [step for guard in guards for step in guard.all_graphs]
        failed = trace_again(models, steps)
        for guard in guards:
            guard.has_repaired_layers = True
            guard.forget_graphs()  # they are of the steps before
        return failed

    def _warn(
        self,
        reason: str,
        when: str,
        continues: str,
        paths: Sequence[str],
        changed: Sequence[keras.Layer],
        finding: Finding,
        failed: Sequence[str],
    ) -> None:
        change = finding.change.replace("\n", "\n  ")
        layers, these = ("layer", "this layer") if len(paths) == 1 else ("layers", "these layers")
        names = ", ".join(map(repr, paths))
        why = ""  # a log of another program may have no reason
        if reason:
            sound = f"A replayed batch is sound with {these} in float32."
            why = f" {reason.rstrip('.')}. {sound}"
        limits = _not_in_files(self._model, changed)
        if failed:
            limits += "\nThese functions could not be traced with float32, and run as before: "
            limits += ", ".join(map(repr, failed))
        user_messages.warn(
            f"{capitalized(when)} kmp set the {layers} {names} to float32, and"
            f" {continues}.{why} To make this change permanent:\n  {change}{limits}\n"
        )


def _not_in_files(model: keras.Model, changed: Sequence[keras.Layer]) -> str:
    """Returns a sentence about layers that code of the user creates.

    Keras saves no policy of these.
    """
    changed_ids = set(map(id, changed))
    created: dict[str, str] = {}
    for owner in sublayers(model):
        if is_keras_class(type(owner)) or is_passthrough(owner):
            continue
        for inner in direct_sublayers(owner):
            if id(inner) in changed_ids:
                created[inner.name] = type(owner).__name__
    if not created:
        return ""
    names, classes = ", ".join(map(repr, created)), " and ".join(dict.fromkeys(created.values()))
    return (
        f"\nA saved file keeps this for {names} only if the config of {classes} contains it: make"
        " the change before you load the file."
    )
