"""The rules of the loss scale: pure functions of its state and the outcome of a step."""

from kmp.scaling.rules import DynamicScale, FixedScale, Rule, ScaleState, StepOutcome

__all__ = ["DynamicScale", "FixedScale", "Rule", "ScaleState", "StepOutcome"]
