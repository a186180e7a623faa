"""Gradients on the device: unscaling, flags, exponents, norms, and the effects of updates."""

from kmp.gradients.gradient_sampler import NEVER, GradientSampler, UpdateWatch, paths_of, with_weight_norms
from kmp.gradients.tensor_groups import Gradients, Variables, values_of
from kmp.gradients.tensor_statistics import gradient_statistics, update_statistics
from kmp.gradients.unscaling import (
    multiply_gradients,
    nonfinite_flag,
    nonfinite_flags,
    unscale_for_update,
)

__all__ = [
    "NEVER",
    "GradientSampler",
    "Gradients",
    "UpdateWatch",
    "Variables",
    "gradient_statistics",
    "multiply_gradients",
    "nonfinite_flag",
    "nonfinite_flags",
    "paths_of",
    "unscale_for_update",
    "update_statistics",
    "values_of",
    "with_weight_norms",
]
