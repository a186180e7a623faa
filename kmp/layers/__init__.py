"""Layers that compute in float32 where 16 bits do not do, and the table of those that need it."""

from kmp.layers.batch_normalization import BatchNormalization
from kmp.layers.float32 import Float32, Softmax
from kmp.layers.float32 import Float32Operation as Float32Operation
from kmp.layers.float32_classes import keep_in_float32 as keep_in_float32
from kmp.layers.float32_classes import only_in_float32 as only_in_float32
from kmp.layers.float32_classes import selected_classes as selected_classes
from kmp.layers.float32_rules import SIGMOID as SIGMOID
from kmp.layers.float32_rules import SOFTMAX as SOFTMAX
from kmp.layers.float32_rules import TOO_FEW_BITS as TOO_FEW_BITS
from kmp.layers.float32_rules import Float32Rule as Float32Rule
from kmp.layers.float32_rules import Moment as Moment
from kmp.layers.float32_rules import float32_rule as float32_rule
from kmp.layers.float32_rules import reason_for_float32 as reason_for_float32
from kmp.layers.fused_normalization import fuse_normalization as fuse_normalization
from kmp.layers.fused_normalization import unfuse_normalization as unfuse_normalization

__all__ = ["BatchNormalization", "Float32", "Softmax"]
