"""A gradient function of a layer that is not linear in scaled gradients."""

from dataclasses import dataclass

from kmp.diagnosis.cause import ERROR, WARNING, Cause
from kmp.diagnosis.observations import Observations
from kmp.diagnosis.wording import first_few, of_a_batch
from kmp.records import Replay
from kmp.records.step_facts import CodeLine
from kmp.utils.float_formats import FLOAT16


@dataclass(frozen=True, kw_only=True)
class ChangedGradients(Cause):
    """A gradient function of a layer that is not linear, under the training step of Keras.

    Args:
        layers: The paths of the layers whose gradients do not grow with the loss scale.
        origin: The layer whose backward pass changes them; empty if it is not known.
        operation: The operation that is not linear, if the graph shows it.
        replay: The replay that shows what it does; `None` if that is not known.
    """

    layers: list[str]
    origin: str
    operation: CodeLine | None
    replay: Replay | None

    @classmethod
    def of(cls, run: Observations) -> "ChangedGradients | None":
        """Returns the cause if the run has it."""
        if run.format is not FLOAT16 or run.settings.train_step != "keras":
            return None
        facts, replay, origin = run.settings.step_facts, run.passes.last_comparison, ""
        is_in_graph = facts is not None and facts.scaling == "nonlinear"
        unscaled = replay.unscaled if replay else None
        if unscaled and unscaled.layers:
            layers = [run.model.created_layer(layer) for layer in unscaled.layers]
            origin = run.model.created_layer(unscaled.origin) if unscaled.origin else ""
        elif facts is not None and is_in_graph and run.has_step_of_keras:
            replay = None
            layers = [run.model.layer_of(path) for path in facts.variables]
        else:
            return None
        paths = list(dict.fromkeys(layers))
        return cls(
            run=run,
            name="unscaled_loss",
            severity=ERROR if replay else WARNING,
            location=origin or next(iter(paths), ""),
            layers=paths,
            origin=origin,
            operation=facts.operation if facts is not None and is_in_graph else None,
            replay=replay,
        )

    @property
    def code(self) -> CodeLine | None:
        return self.operation

    @property
    def title(self) -> str:
        layers = first_few([self.run.model.describe(layer) for layer in self.layers])
        if self.replay is None:
            return (
                "A gradient function clips or normalizes gradients while they are multiplied by the"
                f" loss scale, before those of {layers}."
            )
        what, where = f"The gradients of {layers} do", "between the loss and their outputs"
        if self.origin:
            what = f"The backward pass of {self.run.model.describe(self.origin)} does"
            where = "in it"
        return (
            f"{what} not grow with the loss scale: a gradient function {where} clips, normalizes or"
            " adds."
        )

    @property
    def evidence(self) -> str:
        if self.replay is None:
            shown = f"{self.operation} gets scaled gradients, and is not linear"
            return f"in the graph of the training step, {shown}"
        graph = ""
        if self.operation:
            graph = f"; in the graph of the step, {self.operation} is not linear in them"
        return (
            f"{of_a_batch(self.replay)}, in float32, the gradients do not grow in proportion to the"
            f" loss scale; the optimizer divides all of them by it{graph}"
        )

    @property
    def note(self) -> str:
        note = (
            "clip in the optimizer, with its clipnorm or clipvalue: it gets gradients without the"
            " loss scale"
        )
        return note if self.replay else f"{note}; what this did to the training was not measured"
