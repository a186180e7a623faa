"""Replays a batch that the training saw, to find what float16 loses."""

from kmp.replay.batch_capture import MOST_EXAMPLES, BatchCapture, CapturedBatch, is_ragged
from kmp.replay.batch_replay import Failure, failing_part, parts_of, replay
from kmp.replay.eager_pass import TrainStep, tensor_float_32

__all__ = [
    "MOST_EXAMPLES",
    "BatchCapture",
    "CapturedBatch",
    "Failure",
    "TrainStep",
    "failing_part",
    "is_ragged",
    "parts_of",
    "replay",
    "tensor_float_32",
]
