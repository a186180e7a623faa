"""The rules that update the loss scale: pure functions of the current state and the outcome of a step."""

from kmp.scaling.dynamic_scale import DynamicScale
from kmp.scaling.fixed_scale import FixedScale
from kmp.scaling.scale_state import LARGEST_SCALE as LARGEST_SCALE
from kmp.scaling.scale_state import ScaleState, StepOutcome
from kmp.scaling.settings import LossScaleSettings as LossScaleSettings
from kmp.scaling.settings import Rule
from kmp.scaling.settings import make_rule as make_rule
from kmp.scaling.settings import override as override

__all__ = ["DynamicScale", "FixedScale", "Rule", "ScaleState", "StepOutcome"]
