"""Replays a batch that the training saw, to find what float16 loses."""

from kmp.replay.batch_capture import BatchCapture, CapturedBatch
from kmp.replay.batch_replay import Failure, replay
from kmp.replay.eager_pass import tensor_float_32

__all__ = ["BatchCapture", "CapturedBatch", "Failure", "replay", "tensor_float_32"]
