"""Gradients on the device: unscaling, flags, exponents, norms, and the effects of updates."""

from kmp.gradients.gradient_sampler import NEVER, GradientSampler, paths_of
from kmp.gradients.tensor_statistics import gradient_statistics
from kmp.gradients.unscaling import (
    Gradients,
    Variables,
    multiply_gradients,
    nonfinite_flag,
    nonfinite_flags,
    unscale_for_update,
    values_of,
)
from kmp.gradients.weight_updates import UpdateWatch, update_statistics, with_weight_norms

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
