"""Targets that the loss does not take."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kmp.diagnosis.bad_batches import keep_examples, severity_of_batches
from kmp.diagnosis.cause import WARNING, Cause
from kmp.diagnosis.edits import NO_CHANGE, Change, PrepareData, SetArguments
from kmp.diagnosis.model_names import name_of
from kmp.diagnosis.observations import Observations
from kmp.diagnosis.wording import failed_steps
from kmp.records import Replay
from kmp.records.replay import InvalidTargets


@dataclass(frozen=True, kw_only=True)
class BadTargets(Cause):
    """Targets that are not the index of a class, or of a binary loss not from 0 to 1.

    Args:
        targets: What was found.
        array: The targets, as Python source.
        layer: The path of the output layer; empty if it is not known.
        marker: The value that marks missing targets, if a single one seems to.
        has_ignoring_loss: Whether the edit is a loss that ignores that value.
    """

    names: ClassVar[Mapping[str, str]] = {
        "targets": "targets with NaN or Inf, or that are not those the loss takes",
    }

    targets: InvalidTargets
    array: str
    layer: str = ""
    marker: int | None = None
    has_ignoring_loss: bool = False

    @classmethod
    def out_of_range(cls, run: Observations) -> "BadTargets | None":
        """Returns the cause if targets of a binary cross-entropy are not from 0 to 1."""
        replay = _replay_with_invalid(run, is_binary=True)
        targets = replay.batch.invalid_targets if replay else None
        if targets is None:
            return None
        array, change = f"y{targets.key}", NO_CHANGE
        low, high = f"{targets.smallest:g}", f"{targets.largest:g}"
        if low != high:
            change = Change((PrepareData(f"{array} = ({array} - {low}) / ({high} - {low})"),))
        return cls(
            run=run,
            name="targets",
            severity=WARNING,
            location=array,
            change=change,
            targets=targets,
            array=array,
        )

    @classmethod
    def not_classes(cls, run: Observations) -> "BadTargets | None":
        """Returns the cause if targets are not the index of a class."""
        replay = _replay_with_invalid(run, is_binary=False)
        targets = replay.batch.invalid_targets if replay else None
        if replay is None or targets is None:
            return None
        array = f"y{targets.key}"

        # A single invalid value that is negative, or larger than the number of classes, is a mark.
        marker = targets.only_invalid
        if marker is not None and 0 <= marker <= targets.classes:
            marker = None
        outputs = run.settings.output_layers
        layer = outputs[targets.output] if targets.output < len(outputs) else ""
        has_ignoring_loss = marker is not None and targets.per_example > 1 and not targets.key
        if has_ignoring_loss:
            change = Change((SetArguments("model.compile", {"loss": _ignoring_loss(targets)}),))
        elif marker is not None or int(targets.smallest) < 0:
            condition = f"{array} >= 0"
            if int(targets.largest) >= targets.classes:
                condition = f"({array} >= 0) & ({array} < {targets.classes})"
            change = Change((keep_examples(array, condition, replay),))
        else:
            change = _more_classes(run, layer, int(targets.largest) + 1)
        return cls(
            run=run,
            name="targets",
            severity=severity_of_batches(run),
            location=layer or array,
            change=change,
            targets=targets,
            array=array,
            layer=layer,
            marker=marker,
            has_ignoring_loss=has_ignoring_loss,
        )

    @property
    def _range(self) -> str:
        return f"{self.targets.smallest:g} to {self.targets.largest:g}"

    @property
    def title(self) -> str:
        if self.targets.is_binary:
            return (
                f"The targets {self.array} are from {self._range}, but binary cross-entropy takes"
                " numbers from 0 to 1."
            )
        return (
            f"The targets {self.array} have classes from {self._range}, but the model has the"
            f" classes 0 to {self.targets.classes - 1}."
        )

    @property
    def evidence(self) -> str:
        if self.targets.is_binary:
            return f"in a batch of the training {self.array} was from {self._range}"
        output = f"the output {name_of(self.layer)}" if self.layer else "the output"
        were = (
            f"the targets were from {self._range} and {output} had {self.targets.classes} classes"
        )
        if not self.run.skipped.count:
            return f"in a batch of the training {were}"
        return f"{failed_steps(self.run)}; in the last such step {were}"

    @property
    def note(self) -> str:
        if self.targets.is_binary:
            return "in training, in validation and later"
        means = f"if {self.marker} means that a target is missing"
        if self.has_ignoring_loss:
            return means
        if self.marker is not None:
            return f"or loss={_ignoring_loss(self.targets)}, {means}"
        if int(self.targets.smallest) == 1:
            array = self.array
            return (
                f"or {array} = {array} - 1, also in validation, because Keras counts classes from 0"
            )
        return ""


def _replay_with_invalid(run: Observations, *, is_binary: bool) -> Replay | None:
    """Returns the last replay with targets that a binary loss, or another one, does not take."""
    for replay in reversed(run.passes.all):
        targets = replay.batch.invalid_targets
        if targets is not None and targets.is_binary == is_binary:
            return replay
    return None


def _ignoring_loss(targets: InvalidTargets) -> str:
    """Returns the source of a loss that ignores the only invalid value."""
    from_logits = "from_logits=True, " if targets.from_logits else ""
    arguments = f"{from_logits}ignore_class={targets.only_invalid}"
    return f"keras.losses.SparseCategoricalCrossentropy({arguments})"


def _more_classes(run: Observations, layer: str, classes: int) -> Change:
    """Returns the change of the output layer to a number of classes, if its class is known."""
    class_name = run.model.layers.get(layer, "")
    argument = "filters" if class_name.startswith("Conv") else ""
    if class_name == "Dense":
        argument = "units"
    if not argument:
        return NO_CHANGE
    call = f"keras.layers.{class_name}"
    return Change((SetArguments(call, {argument: str(classes)}, name_of(layer)),))
