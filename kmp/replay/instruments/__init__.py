"""The instruments of an eager pass: each has one subject, and is a context around the step."""

from kmp.replay.instruments.operation_watch import OperationWatch
from kmp.replay.instruments.other_precision import computing_in
from kmp.replay.instruments.received_gradients import ReceivedGradients, StepIsDone
from kmp.replay.instruments.unchanged_weights import weights_unchanged

__all__ = [
    "OperationWatch",
    "ReceivedGradients",
    "StepIsDone",
    "computing_in",
    "weights_unchanged",
]
