"""Replays a batch that the training saw, to find what 16 bits lose."""

from kmp.replay.batch_capture import MOST_EXAMPLES, BatchCapture, CapturedBatch, is_ragged
from kmp.replay.batch_checks import NonfiniteRows, nonfinite_rows
from kmp.replay.batch_replay import Failure, StepContext, failing_part, replay_batch
from kmp.replay.criteria import Criteria
from kmp.replay.failure_reasons import reason_of
from kmp.replay.kept_batches import KeptBatches
from kmp.replay.layer_search import Choices, find_float32_layers
from kmp.replay.other_format import OTHER_FORMATS, other_format_of
from kmp.replay.passes import Passes, PassResult
from kmp.replay.replay_attempts import ReplayAttempts
from kmp.replay.step_program import StepPrograms
from kmp.replay.step_trace import objects_of_step, traced_step
from kmp.replay.tf32 import tensor_float_32

__all__ = [
    "MOST_EXAMPLES",
    "OTHER_FORMATS",
    "BatchCapture",
    "CapturedBatch",
    "Choices",
    "Criteria",
    "Failure",
    "KeptBatches",
    "NonfiniteRows",
    "PassResult",
    "Passes",
    "ReplayAttempts",
    "StepContext",
    "StepPrograms",
    "failing_part",
    "find_float32_layers",
    "is_ragged",
    "nonfinite_rows",
    "objects_of_step",
    "other_format_of",
    "reason_of",
    "replay_batch",
    "tensor_float_32",
    "traced_step",
]
