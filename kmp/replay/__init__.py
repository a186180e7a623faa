"""Replays a batch that the training saw, to find what float16 loses."""

from kmp.replay.batch_capture import BatchCapture
from kmp.replay.batch_replay import replay
from kmp.replay.eager_pass import tensor_float_32
from kmp.replay.float32_reference import check_batch, float32_sample

__all__ = ["BatchCapture", "check_batch", "float32_sample", "replay", "tensor_float_32"]
