"""Layers that compute in float32 where 16 bits do not do, and the table of those that need it."""

from kmp.layers.batch_normalization import BatchNormalization
from kmp.layers.float32 import Float32, Softmax

__all__ = ["BatchNormalization", "Float32", "Softmax"]
