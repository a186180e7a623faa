"""Variables that no gradient trains: it is zero, does not exist, or no optimizer gets it."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kmp.diagnosis.cause import INFO, WARNING, Cause
from kmp.diagnosis.observations import Observations
from kmp.diagnosis.wording import counted, first_few
from kmp.utils.float_formats import FLOAT16, FLOAT32


@dataclass(frozen=True, kw_only=True)
class WithoutGradient(Cause):
    """Variables that no gradient trains.

    Its name is `"dead"` if the gradient is zero, in float32 too; `"unused"` if there is none; and
    `"untrained"` if no optimizer of the model gets it.

    Args:
        variables: Their paths.
        samples: Of gradients that are zero, the number of samples in which they are.
        examples: The number of examples of the replay in float32; 0 without one.
    """

    names: ClassVar[Mapping[str, str]] = {
        "dead": "variables whose gradient is always 0",
        "unused": "variables that the loss does not depend on",
        "untrained": "variables that no optimizer of the model gets",
    }

    variables: list[str]
    samples: int = 0
    examples: int = 0

    @classmethod
    def dead(cls, run: Observations) -> "WithoutGradient | None":
        """Returns the variables whose gradient is zero."""
        zero, examples, replay = run.gradients.all_zero_variables, 0, run.passes.clean
        if run.format is not FLOAT32:  # of float32, the samples show it
            in_float32 = replay.gradients.zero if replay else []
            zero = [name for name in in_float32 if name in zero]
            examples = replay.examples if replay else 0
        if not zero:
            return None
        # In 16 bits, the question is what these do; and they do nothing here.
        are_most = 2 * len(zero) > len(run.gradients.finite[-1].names)
        return cls(
            run=run,
            name="dead",
            severity=WARNING if run.format is FLOAT32 and are_most else INFO,
            location=zero[0],
            variables=zero,
            samples=len(run.gradients.usable),
            examples=examples,
        )

    @classmethod
    def unused(cls, run: Observations) -> "WithoutGradient | None":
        """Returns the variables that no sample has a gradient of."""
        samples = run.gradients.finite
        used: Counter[str] = Counter()
        for sample in samples:
            used.update(sample.named(sample.totals > 0))
        names = [name for name in samples[-1].names if name not in used] if samples else []
        if not names:
            return None
        return cls(run=run, name="unused", severity=INFO, location=names[0], variables=names)

    @classmethod
    def untrained(cls, run: Observations) -> "WithoutGradient | None":
        """Returns the trainable variables that no optimizer of the model gets."""
        names = run.settings.untrained_variables
        if not names:
            return None
        return cls(run=run, name="untrained", severity=INFO, location=names[0], variables=names)

    @property
    def title(self) -> str:
        variables = first_few(self.variables)
        if self.name == "untrained":
            return f"The training does not pass {variables} to the optimizer."
        if self.name == "dead":
            too = "" if self.run.format is FLOAT32 else ", in float32 too"
            return f"The gradient of {variables} is zero{too}."
        if self.run.settings.train_step == "custom":  # which chooses what it passes on
            return f"The optimizer gets no gradient of {variables}."
        return f"The loss does not depend on {variables}."

    @property
    def evidence(self) -> str:
        count = len(self.variables)
        if self.name == "untrained":
            optimizer = self.run.settings.optimizer or "the optimizer"
            return (
                f"{count} of the model's trainable variables; {optimizer} is built on other"
                " variables"
            )
        if self.name == "unused":
            variables = "this variable" if count == 1 else "these variables"
            return f"no sample has a gradient of {variables}"
        variables = f"{count} variables have gradients that are"
        if count == 1:
            variables = "1 variable has a gradient that is"
        shown = f"{variables} all zero in {counted(self.samples, 'sample')}"
        if self.run.format is FLOAT32:
            return shown
        return f"{shown}, and for {self.examples} examples in float32"

    @property
    def note(self) -> str:
        if self.name == "untrained":
            return (
                "not a matter of precision: pass their gradients to `apply` too, or set"
                " `trainable=False`, unless another optimizer trains them"
            )
        no_underflow = "not underflow: " if self.run.format is FLOAT16 else ""
        if self.name == "dead":
            return (
                f"{no_underflow}units that are never active, or weights whose effect on the loss"
                " cancels out"
            )
        note = f"{no_underflow}layers that are not used, or an output without a loss"
        if self.run.settings.train_step == "custom":
            note += ", or variables that the training step does not pass to `apply`"
        return note
