"""Layers that were set to float32 while the training ran."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kmp.diagnosis import changes
from kmp.diagnosis.cause import INFO, Cause
from kmp.diagnosis.edits import Change
from kmp.diagnosis.observations import Observations
from kmp.diagnosis.wording import of_a_batch
from kmp.records import Record


@dataclass(frozen=True, kw_only=True)
class Repaired(Cause):
    """Layers that were set to float32 while the training ran.

    Args:
        record: The record of the last repair.
        layers: The paths of the layers of all repairs.
    """

    names: ClassVar[Mapping[str, str]] = {
        "float32_fallback": "layers that kmp set to float32 while the training ran",
    }

    record: Record
    layers: list[str]

    @classmethod
    def of(cls, run: Observations) -> "Repaired | None":
        """Returns the cause if the run has it."""
        if run.repair is None:
            return None
        layers: list[str] = []
        for row in run.all_records.rows:
            layers += row.fallback or ()
        return cls(
            run=run,
            name="float32_fallback",
            severity=INFO,
            location=layers[-1],
            change=Change(changes.in_float32(run, layers), _tried(run, run.repair)),
            record=run.repair,
            layers=layers,
        )

    @property
    def title(self) -> str:
        layers = self.run.model.describe_repaired(self.layers)
        computes = "computes" if len(self.layers) == 1 else "compute"
        return (
            f"Since step {self.record.step}, {layers} {computes} in float32, and the training"
            " continued."
        )

    @property
    def evidence(self) -> str:
        return (self.record.fallback_reason or "").rstrip(".")


def _tried(run: Observations, repair: Record) -> str:
    """Returns what the replay with the layers of a repair in float32 showed."""
    replays = [replay for at, replay in run.records.replays if at == repair.step]
    proof = next((replay for replay in reversed(replays) if replay.is_finite), None)
    layers = run.model.describe_repaired(repair.fallback or [])
    if proof is None:
        return f"the training has gone on with it since step {repair.step}"
    were_finite = all(replay.is_finite for replay in replays)
    results = "agree with those in float32" if were_finite else "are finite"
    return f"with {layers} in float32 the results {of_a_batch(proof)} {results}"
