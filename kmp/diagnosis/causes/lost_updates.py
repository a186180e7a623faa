"""Weights in 16 bits that are too coarse for their updates."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kmp.diagnosis import changes, thresholds
from kmp.diagnosis.cause import Cause
from kmp.diagnosis.edits import Change, PrepareData
from kmp.diagnosis.model_names import name_of
from kmp.diagnosis.observations import Observations
from kmp.utils.float_formats import BFLOAT16, FLOAT16, FloatFormat


@dataclass(frozen=True, kw_only=True)
class LostUpdates(Cause):
    """Weights in 16 bits that are too coarse for their updates.

    Args:
        number_format: The format of these weights.
        share: The share of the weights with a nonzero gradient that stayed as they were.
        variables: The paths of the variables of which most did.
        layers: The paths of their layers, if only some layers have weights in 16 bits.
    """

    names: ClassVar[Mapping[str, str]] = {
        "lost_updates": "weights in 16 bits, and updates below half a step of them",
    }

    number_format: FloatFormat
    share: float
    variables: list[str]
    layers: list[str]

    @classmethod
    def of(cls, run: Observations) -> "LostUpdates | None":
        """Returns the cause if the run has it."""
        settings, formats = run.settings, (FLOAT16, BFLOAT16)
        in_16_bits = (each for each in formats if each.name in settings.variable_dtypes)
        number_format = next(in_16_bits, None)
        if number_format is None:
            return None

        # The weights with a nonzero gradient, and how many of them stayed, by variable.
        nonzero: Counter[str] = Counter()
        unchanged: Counter[str] = Counter()
        for sample in run.records.samples:
            if sample.has_update and sample.is_finite:
                counts = sample.elements - sample.zeros
                lost = np.maximum(counts - sample.updates, 0)
                nonzero.update(dict(zip(sample.names, counts.tolist(), strict=True)))
                unchanged.update(dict(zip(sample.names, lost.tolist(), strict=True)))
        share = sum(unchanged.values()) / max(1, sum(nonzero.values()))
        if share <= thresholds.MANY_LOST_UPDATES:
            return None
        shares = {name: unchanged[name] / count for name, count in nonzero.items() if count}
        variables = sorted(shares, key=shares.__getitem__, reverse=True)
        variables = [name for name in variables if shares[name] > thresholds.MOST]
        layers = []
        if (settings.policy or number_format.name) != number_format.name:
            layers = list(dict.fromkeys(map(run.model.layer_of, variables)))
        return cls(
            run=run,
            name="lost_updates",
            location=variables[0] if variables else "",
            change=Change(changes.weights_in_float32(run, variables, number_format)),
            number_format=number_format,
            share=share,
            variables=variables,
            layers=layers,
        )

    @property
    def title(self) -> str:
        where = "the weights"
        if self.layers:
            where += f" of {', '.join(repr(name_of(layer)) for layer in self.layers[:3])}"
        return (
            f"Updates are lost: {where} are in {self.number_format.name}, and many steps are too"
            " small to change them."
        )

    @property
    def evidence(self) -> str:
        number_format = self.number_format
        most = f", most of {self.variables[0]}" if self.variables else ""
        smallest = f"2^-{number_format.fraction_bits + 2} of its magnitude"
        return (
            f"{self.share:.0%} of the weights with a nonzero gradient stayed as they were in the"
            f" sampled updates{most}: a {number_format.name} weight does not change by less than"
            f" {smallest}"
        )

    @property
    def note(self) -> str:
        note = "keeps the weights in float32"
        if isinstance(self.change.edits[0], PrepareData):
            return (
                f"{note}: the layers have the dtype of the file or program that created them, which"
                " `kmp.enable` does not change. What the file rounded stays rounded"
            )
        if self.layers:
            statement = changes.convert_weights(self.number_format)
            return f"{note}; of a model from a file: {statement}"
        return note
