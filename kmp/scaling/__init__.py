"""The rules of the loss scale: pure functions of its state and the outcome of a step."""

from kmp.scaling.rules import LARGEST_APPLIED_SCALE as LARGEST_APPLIED_SCALE
from kmp.scaling.rules import LARGEST_SCALE as LARGEST_SCALE
from kmp.scaling.rules import DynamicScale, FixedScale, Rule, ScaleState, StepOutcome
from kmp.scaling.settings import LossScaleSettings as LossScaleSettings
from kmp.scaling.settings import is_dynamic as is_dynamic
from kmp.scaling.settings import loss_scale_rule as loss_scale_rule
from kmp.scaling.settings import override as override

__all__ = ["DynamicScale", "FixedScale", "Rule", "ScaleState", "StepOutcome"]
