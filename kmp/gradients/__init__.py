"""Gradients on the device: unscaling, flags, exponents, norms, and the effects of updates."""

from kmp.gradients.gradient_sampler import NEVER, GradientSampler, extended_sampler, paths_of
from kmp.gradients.tensor_statistics import gradient_statistics, nonfinite_flag, update_statistics, values_of
from kmp.gradients.unscaling import multiply_gradients, nonfinite_flags, unscale
from kmp.gradients.weight_updates import UpdateWatch, with_weight_norms

__all__ = [
    "NEVER",
    "GradientSampler",
    "UpdateWatch",
    "extended_sampler",
    "gradient_statistics",
    "multiply_gradients",
    "nonfinite_flag",
    "nonfinite_flags",
    "paths_of",
    "unscale",
    "update_statistics",
    "values_of",
    "with_weight_norms",
]
