"""Replays a batch that the training saw, to find what float16 loses."""

from kmp.replay.batch_capture import BatchCapture
from kmp.replay.batch_replay import replay
from kmp.replay.eager_pass import tensor_float_32

__all__ = ["BatchCapture", "replay", "tensor_float_32"]
