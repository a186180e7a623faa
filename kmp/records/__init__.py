"""Records of a training run, in memory and as JSON Lines. Needs no Keras.

A log has one JSON object per line. The first line is a header, `{"schema": 3, "kind": "header", ...}`, with `started`
(time, UTC), the versions of `keras`, `tensorflow` and `numpy`, and `settings` (object: the loss scale rule and its
arguments, model, optimizer, dtypes; see `Run.settings`). Every other line is a record with `"step"` (training steps
done, including skipped ones) and some of these keys:

- `loss_scale`: float, the scale of the next step.
- `clean_steps`: integer, steps without an overflow since the scale last grew (or would have grown, if it is at its
  maximum) or the gradients of a finite loss last overflowed.
- `overflow_count`: integer, steps skipped since training began because the loss or a gradient was non-finite.
- `overflow_rate`: float, the fraction of steps skipped since the previous record.
- `overflows_in_a_row`: integer, steps skipped since the last applied step.
- `nonfinite_loss_count`: integer, the steps in `overflow_count` whose loss was non-finite before scaling.
- `nonfinite_losses_in_a_row`: integer, the steps in `overflows_in_a_row` whose loss was non-finite before scaling.
- `unscaled_steps`: integer, steps whose loss was not multiplied by the loss scale, because the training loop did not
  call `scale_loss`; omitted if zero.
- `overflows_by_variable`: object, from a variable's path to the number of steps in which its gradient was non-finite;
  zeros are omitted.
- `overflow_origins_by_variable`: object, from a variable's path to the number of skipped steps with a finite loss in
  which the variable was the overflow origin; zeros are omitted.
- `overflow_origin`: string, in records after new such steps: the path of the last step's overflow origin (see
  `Snapshot`).
- `last_loss`: float, the loss of the last step before scaling, summed over replicas.
- `highest_loss`: float, the largest magnitude of a finite loss so far, before scaling and summed over replicas.
- `nonfinite_activation`: string, in records after a new non-finite loss, if a `kmp.callbacks.ForwardProbe` was active:
  the origin of the first NaN or Inf in that step's forward pass.
- `grad_zeros`: float, the fraction of gradient elements that are exactly zero in the sampled step, which is `step`.
- `grad_norm`: float, the L2 norm of all gradients of that step, without the loss scale.
- `sample`: object with `loss_scale`, the scale of that step, and `variables`: object from a variable's path, in the
  order from the input to the loss, to an object with `zero`, `inf`, `nan` (element counts of its loss-scaled gradient);
  `counts` (list of counts of the other elements by binary exponent, floor(log2|g|), starting with exponent `first`);
  `amax`, `norm`, `weight_norm`, `update_norm`, `updates`, `lost_updates` (see `GradientSample`; omitted if non-finite);
  and, if the loss scale is not a power of two, `unscaled`: `zero` to `counts` of the gradient without the loss scale.
- `reference`: same as `sample`, of a float32 pass over the batch passed to `kmp.callbacks.GradientHistogram`.

Non-finite numbers are written as null. While a training holds its records in memory, `sample` and `reference` are
compressed mappings: `dict(row["sample"].items())` is the object.

A log is validated when it is loaded: the types of all values, their ranges (steps and counts are below 2^48, element
counts below 2^36, loss scales positive float32 numbers, other numbers at most 1e100), the lengths of strings (4,096
characters), and the number of variables (262,144). Keys that this version does not know, which a later one may write,
are kept if the key is an identifier and its value a number or null (in the header and its settings, also a string or a
list of strings); their other values are dropped. A log may have 100 such keys.
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
from kmp.records.gradient_sample import layer_of as layer_of
from kmp.records.jsonl import FILE_NAME as FILE_NAME
from kmp.records.jsonl import SCHEMA as SCHEMA
from kmp.records.jsonl import to_line as to_line
from kmp.records.run import RUN_EXPECTED as RUN_EXPECTED
from kmp.records.run import Run, load_run
from kmp.records.run import iterate_samples as iterate_samples
from kmp.records.run import log_file as log_file
from kmp.records.run import scalars as scalars
from kmp.records.snapshot import Snapshot

__all__ = ["BIN_COUNT", "ExponentHistogram", "GradientSample", "Run", "Snapshot", "load_run"]
