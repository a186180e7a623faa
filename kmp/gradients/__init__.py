"""Gradient statistics computed on the device: exponents, norms, effects of updates, and a float32 reference."""

from kmp.gradients import tensor_statistics
from kmp.gradients.gradient_sampler import NEVER, GradientSampler, extended_sampler, paths_of
from kmp.gradients.tensor_packing import ROW_SIZE, pack_tensors
from kmp.gradients.tensor_statistics import values_of, with_values
from kmp.gradients.update_statistics import UpdateWatch, with_weight_norms

__all__ = [
    "NEVER",
    "ROW_SIZE",
    "GradientSampler",
    "UpdateWatch",
    "extended_sampler",
    "pack_tensors",
    "paths_of",
    "tensor_statistics",
    "values_of",
    "with_values",
    "with_weight_norms",
]
