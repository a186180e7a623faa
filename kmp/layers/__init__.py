"""Layers that compute in float32 where float16 loses precision or overflows; they stay float32 after save and load."""

from kmp.layers.batch_normalization import BatchNormalization
from kmp.layers.float32 import Float32
from kmp.layers.float32_operation import Float32Operation as Float32Operation
from kmp.layers.softmax import Softmax

__all__ = ["BatchNormalization", "Float32", "Softmax"]
