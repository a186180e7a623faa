"""Records of a training run, in memory and as JSON Lines. Needs no Keras.

A log has one JSON object per line. The first line is a header, `{"schema": 1, "kind": "header",
...}`, with `started` (time, UTC), the versions of `keras`, `tensorflow` and `numpy`, and `settings`
(object: the loss scale rule and its arguments, model, optimizer, dtypes; see `Run.settings`). Every
other line is a record with `"step"` (training steps done, including skipped ones) and some of these
keys:

- `loss_scale`: float, the scale of the next step.
- `clean_steps`: integer, steps without an overflow since the scale last grew (or would have grown,
  if it is at its maximum) or the gradients of a finite loss last overflowed.
- `overflow_count`: integer, steps skipped since training began because the loss or a gradient was
  non-finite.
- `overflow_rate`: float, the fraction of steps skipped since the previous record.
- `overflows_in_a_row`: integer, steps skipped since the last applied step.
- `nonfinite_loss_count`: integer, the steps in `overflow_count` whose loss was non-finite before
  scaling.
- `nonfinite_losses_in_a_row`: integer, the steps in `overflows_in_a_row` whose loss was non-finite
  before scaling.
- `overflows_by_variable`: object, from a variable's path to the number of steps in which its
  gradient was non-finite; zeros are omitted. In records in which this or the next key has changed,
  in a long run in some of them.
- `overflow_origins_by_variable`: object, from a variable's path to the number of skipped steps with
  a finite loss in which the variable was the overflow origin; zeros are omitted.
- `overflow_origin`: string, in records after new such steps: the path of the last step's overflow
  origin (see `Snapshot`).
- `last_loss`: float, the loss of the last step before scaling, summed over replicas.
- `highest_loss`: float, the largest magnitude of a finite loss so far, before scaling and summed
  over replicas.
- `metrics`: object, at the end of an epoch: each number of Keras' `logs`, such as `loss` and
  `val_accuracy`, and `learning_rate`. `epoch`: integer, the number of the epoch from 0, as in
  Keras.
- `grad_zeros`: float, the fraction of gradient elements that are exactly zero in the sampled step,
  which is `step`.
- `grad_norm`: float, the L2 norm of all gradients of that step, without the loss scale.
- `sample`: object with the gradient statistics of that step, see below.
- `reference`: same as `sample`, of the float32 pass of `replay`.
- `replay`: object, what two passes over a batch of the training showed, one in the precision of the
  model and one in float32; see `Replay`.
- `replay_error`: string, why such a batch could not be replayed.
- `fallback`: list of the paths of layers that compute in float32 since this step, and
  `fallback_reason`: string; see `kmp.callbacks.Float32Fallback`.
- `loss_dtype`: string, the dtype of the loss that `scale_loss` got, in the first record and where
  it changed.

Non-finite numbers are written as null.

A `sample` has these keys:

- `loss_scale`: float, the scale of that step.
- `names`: list of the variables' paths, in the order from the input to the loss. A log omits it if
  it equals that of the `sample` or `reference` before.
- `bins`: list of the bins of `ExponentHistogram` that have an element, in ascending order, and
  `counts` (int64): the number of elements of the loss-scaled gradients in each, one row per bin and
  one column per variable. Exact.
- One number per variable, see `GradientSample`: `amax`, `norm`, `weight_norm`, `update_norm`
  (float64, rounded down to eight significant bits), `updates` and `lost_updates` (int64). A key is
  omitted if its numbers are all zero or NaN.

Numbers are texts: in little-endian order, first the lowest byte of each number, then the next;
these bytes compressed by zlib; in base64. So this reads them:

    def numbers(text, dtype):
        content = np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8)
        return content.reshape(np.dtype(dtype).itemsize, -1).T.copy().view(dtype).ravel()

    counts = numbers(sample["counts"], "<i8").reshape(len(sample["bins"]), -1)
    norms = numbers(sample["norm"], "<f8")

A log is validated when it is loaded: the types of all values, their ranges (steps and counts are
below 2^48, element counts below 2^36, loss scales positive float32 numbers, other numbers at most
1e100), the lengths of strings (4,096 characters) and of texts (no more than needed is
decompressed), and the number of variables (262,144). Unknown keys are ignored.
"""

from kmp.records.compact_sample import compact as compact
from kmp.records.exponent_histogram import BIN_COUNT, ExponentHistogram
from kmp.records.exponent_histogram import FIRST_EXPONENT as FIRST_EXPONENT
from kmp.records.exponent_histogram import INF_BIN as INF_BIN
from kmp.records.exponent_histogram import NAN_BIN as NAN_BIN
from kmp.records.exponent_histogram import NEAR_OVERFLOW_BITS as NEAR_OVERFLOW_BITS
from kmp.records.exponent_histogram import ZERO_BIN as ZERO_BIN
from kmp.records.gradient_sample import GradientSample
from kmp.records.gradient_sample import layer_of as layer_of
from kmp.records.jsonl import FILE_NAME as FILE_NAME
from kmp.records.jsonl import MOST_METRICS as MOST_METRICS
from kmp.records.jsonl import RECORD_KEYS as RECORD_KEYS
from kmp.records.jsonl import SAMPLE_KEYS as SAMPLE_KEYS
from kmp.records.jsonl import LogEncoder as LogEncoder
from kmp.records.jsonl import check_record as check_record
from kmp.records.jsonl import to_line as to_line
from kmp.records.layer_names import stable_name as stable_name
from kmp.records.layer_names import stable_names as stable_names
from kmp.records.log_schema import HIGHEST_NUMBER as HIGHEST_NUMBER
from kmp.records.log_schema import SCHEMA as SCHEMA
from kmp.records.replay import BATCH_PARTS as BATCH_PARTS
from kmp.records.replay import BATCH_X as BATCH_X
from kmp.records.replay import BATCH_Y as BATCH_Y
from kmp.records.replay import HARMFUL_GRADIENT_ERROR as HARMFUL_GRADIENT_ERROR
from kmp.records.replay import HARMFUL_OUTPUT_ERROR as HARMFUL_OUTPUT_ERROR
from kmp.records.replay import HARMFUL_OUTPUT_ERROR_ALONE as HARMFUL_OUTPUT_ERROR_ALONE
from kmp.records.replay import LOSS_FUNCTION as LOSS_FUNCTION
from kmp.records.replay import GradientError as GradientError
from kmp.records.replay import InvalidTargets as InvalidTargets
from kmp.records.replay import LayerError as LayerError
from kmp.records.replay import LostWeight as LostWeight
from kmp.records.replay import NonfiniteOperation as NonfiniteOperation
from kmp.records.replay import Replay as Replay
from kmp.records.replay import StateError as StateError
from kmp.records.replay import is_harmful as is_harmful
from kmp.records.run import RUN_EXPECTED as RUN_EXPECTED
from kmp.records.run import Run, load_run
from kmp.records.run import log_file as log_file
from kmp.records.run import scalars as scalars
from kmp.records.snapshot import Snapshot

__all__ = ["BIN_COUNT", "ExponentHistogram", "GradientSample", "Run", "Snapshot", "load_run"]
