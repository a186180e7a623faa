"""The operations of a pass, one by one."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from kmp.backend.tensorflow_internals import watching_operations
from kmp.replay.instruments.received_gradients import ReceivedGradients
from kmp.replay.layer_marks import LayerMarks
from kmp.replay.lossy_operations import LossyOperations
from kmp.replay.nonfinite_operations import NonfiniteOperations
from kmp.utils.float_formats import DTYPES_16_BIT


class OperationWatch:
    """Ends a pass at a deadline, and notes operations that are random or not finite.

    Args:
        marks: The layers of the pass.
        received: What the optimizers of the pass receive: what follows is not watched.
        deadline: The time of `time.monotonic` after which an operation raises a `TimeoutError`.
        finds_nonfinite: Whether to look for these operations, which takes a few times as long.

    Attributes:
        nonfinite: The operations that return NaN or Inf.
        lossy: The operations for whose finite results 16 bits are too few.
        is_random: Whether the forward pass drew random numbers that differ between passes or
            dtypes.
    """

    def __init__(
        self,
        marks: LayerMarks,
        received: ReceivedGradients,
        deadline: float,
        *,
        finds_nonfinite: bool,
    ) -> None:
        self.nonfinite = NonfiniteOperations(marks)
        self.lossy = LossyOperations(marks)
        self.is_random = False
        self._marks = marks
        self._received = received
        self._deadline = deadline
        self._finds_nonfinite = finds_nonfinite

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Watches the operations of this thread in the context."""
        with watching_operations(self._observe):
            yield

    def _observe(self, operation: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        if time.monotonic() > self._deadline:
            raise TimeoutError("the replay of a batch takes too long")
        if self._received.is_done:
            return
        is_backward = self._received.is_backward
        if not is_backward and _varies_by_pass(operation, outputs):
            self.is_random = True
        if self._finds_nonfinite and not self._marks.is_measuring:
            self.nonfinite.is_backward = is_backward
            self.nonfinite.observe(operation, inputs, outputs)
            if not is_backward:
                self.lossy.observe(operation, inputs, outputs)


def _varies_by_pass(operation: str, outputs: Sequence[Any]) -> bool:
    """Whether an operation draws other numbers in each pass, or in each dtype.

    Keras' normal numbers are the same in each.
    """
    if operation.startswith("StatelessRandom"):
        if "Normal" in operation or "Get" in operation:
            return False
        return any(output.dtype.name in DTYPES_16_BIT for output in outputs)
    return operation.startswith(("Random", "Stateful")) and operation != "StatefulPartitionedCall"
