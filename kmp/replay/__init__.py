"""Replays a batch that the training saw, to find what float16 loses."""

from kmp.replay.batch_capture import MOST_EXAMPLES, BatchCapture, CapturedBatch, is_ragged
from kmp.replay.batch_replay import Failure, StepContext, failing_part, replay_batch
from kmp.replay.eager_pass import Passes, PassResult, TrainStep, inference
from kmp.replay.failure_reasons import reason_of
from kmp.replay.replay_attempts import ReplayAttempts
from kmp.replay.tf32 import tensor_float_32

__all__ = [
    "MOST_EXAMPLES",
    "BatchCapture",
    "CapturedBatch",
    "Failure",
    "PassResult",
    "Passes",
    "ReplayAttempts",
    "StepContext",
    "TrainStep",
    "failing_part",
    "inference",
    "is_ragged",
    "reason_of",
    "replay_batch",
    "tensor_float_32",
]
