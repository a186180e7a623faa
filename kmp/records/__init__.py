"""What was observed: readings of a training run, kept in memory and as JSON Lines. Needs NumPy alone.

A log is one JSON object a line. The first is a header, `{"schema": 3, "kind": "header", ...}`, with `started` (time, in
UTC), the versions of `keras`, `tensorflow` and `numpy`, and `settings` (object: the loss scale's rule and its numbers,
model, optimizer, dtypes; see `Run.settings`). Each later one is a reading with `"step"` (training steps done, skipped
ones included) and whatever was read then:

- `loss_scale`: float, the scale that the next step will use.
- `clean_steps`: integer, steps without an overflow since the scale last grew (or, at its highest, would have grown),
  or gradients of a finite loss last overflowed.
- `overflow_count`: integer, steps skipped since training began, because the loss or a gradient was not finite.
- `overflow_rate`: float, the share of the steps since the last reading that were skipped.
- `overflows_in_a_row`: integer, steps skipped since the last one that was applied.
- `nonfinite_loss_count`: integer, those in `overflow_count` whose loss was not finite before it was scaled.
- `nonfinite_losses_in_a_row`: integer, those in `overflows_in_a_row`.
- `overflows_by_variable`: object, from a variable's path to the number of steps in which its gradient was not finite;
  zeros are left out.
- `overflow_origins_by_variable`: object, from a variable's path to the number of skipped steps with a finite loss in which it
  was the one to blame.
- `overflow_origin`: string, in a reading with new such steps: path of the variable to blame for the last one (see `Snapshot`).
- `last_loss`: float, the loss of that step before it was scaled, summed over replicas.
- `highest_loss`: float, the highest magnitude of such a loss so far, of those that were finite.
- `nonfinite_activation`: string, in a reading with a new non-finite loss, where a `kmp.callbacks.ForwardProbe` looked:
  what was the first to be inf or nan in that step's forward pass.
- `grad_zeros`: float, the share of gradient elements that are exactly zero in the sampled step, which is `step`.
- `grad_norm`: float, the L2 norm of all gradients of that step, without the loss scale.
- `sample`: object with `loss_scale`, that step's; and `variables`: object from a variable's path, in the order from the
  input to the loss, to an object with `zero`, `inf`, `nan` (counts of elements of its loss-scaled gradient); `counts`
  (list of the others by binary exponent, floor(log2) of the magnitude, from exponent `first` on); `amax`, `norm`,
  `weight_norm`, `update_norm`, `updates`, `lost_updates` (see `GradientSample`; left out where not finite); and, where
  the loss scale is no power of two, `unscaled`: `zero` to `counts` for the gradient without it.
- `reference`: the same as `sample`, of a float32 pass over the batch that `kmp.callbacks.GradientHistogram` was given.

A number that is not finite is written as null.
"""

from kmp.records.batch_parts import BATCH_PARTS as BATCH_PARTS
from kmp.records.batch_parts import BATCH_WEIGHTS as BATCH_WEIGHTS
from kmp.records.batch_parts import BATCH_X as BATCH_X
from kmp.records.batch_parts import BATCH_Y as BATCH_Y
from kmp.records.batch_parts import LOSS_FUNCTION as LOSS_FUNCTION
from kmp.records.exponent_histogram import BIN_COUNT, ExponentHistogram
from kmp.records.exponent_histogram import FIRST_EXPONENT as FIRST_EXPONENT
from kmp.records.exponent_histogram import INF_BIN as INF_BIN
from kmp.records.exponent_histogram import NAN_BIN as NAN_BIN
from kmp.records.exponent_histogram import NEAR_OVERFLOW_BITS as NEAR_OVERFLOW_BITS
from kmp.records.exponent_histogram import ZERO_BIN as ZERO_BIN
from kmp.records.gradient_sample import GradientSample
from kmp.records.jsonl import FILE_NAME as FILE_NAME
from kmp.records.jsonl import SCHEMA as SCHEMA
from kmp.records.jsonl import to_line as to_line
from kmp.records.run import RUN_EXPECTED as RUN_EXPECTED
from kmp.records.run import Run, load_run
from kmp.records.run import scalars as scalars
from kmp.records.snapshot import Snapshot

__all__ = ["BIN_COUNT", "ExponentHistogram", "GradientSample", "Run", "Snapshot", "load_run"]
