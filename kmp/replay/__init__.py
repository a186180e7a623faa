"""Replays a batch that the training saw, to find what 16 bits lose."""

from kmp.replay.batch_capture import MOST_EXAMPLES, BatchCapture, CapturedBatch, is_ragged
from kmp.replay.batch_checks import nonfinite_part
from kmp.replay.batch_replay import Failure, StepContext, failing_part, replay_batch
from kmp.replay.eager_pass import Passes, PassResult, TrainStep
from kmp.replay.failure_reasons import reason_of
from kmp.replay.layer_search import DTYPE_ERRORS, Choices, find_float32_layers
from kmp.replay.other_format import OTHER_FORMATS, other_format_of
from kmp.replay.output_gradients import loop_step
from kmp.replay.replay_attempts import ReplayAttempts
from kmp.replay.tf32 import tensor_float_32

__all__ = [
    "DTYPE_ERRORS",
    "MOST_EXAMPLES",
    "OTHER_FORMATS",
    "BatchCapture",
    "CapturedBatch",
    "Choices",
    "Failure",
    "PassResult",
    "Passes",
    "ReplayAttempts",
    "StepContext",
    "TrainStep",
    "failing_part",
    "find_float32_layers",
    "is_ragged",
    "loop_step",
    "nonfinite_part",
    "other_format_of",
    "reason_of",
    "replay_batch",
    "tensor_float_32",
]
