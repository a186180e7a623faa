"""Records of a training run, in memory and as JSON Lines. Needs no Keras.

A log has one JSON object per line. The first line is a header. Every other line is a record with
`step` and some of the other keys, which `kmp.records.log_schema` lists. Non-finite numbers are
written as null.

Some numbers of a sample are texts: in little-endian order, first the lowest byte of each number,
then the next; these bytes compressed by zlib; in base64. Norms and magnitudes are rounded down to
eight significant bits. A key is omitted if its numbers are all zero or NaN. So this reads them:

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
from kmp.records.jsonl import RECORD_KEYS as RECORD_KEYS
from kmp.records.jsonl import SAMPLE_KEYS as SAMPLE_KEYS
from kmp.records.jsonl import LogEncoder as LogEncoder
from kmp.records.jsonl import check_record as check_record
from kmp.records.jsonl import to_line as to_line
from kmp.records.layer_names import stable_name as stable_name
from kmp.records.layer_names import stable_names as stable_names
from kmp.records.log_schema import SCHEMA as SCHEMA
from kmp.records.log_types import HIGHEST_NUMBER as HIGHEST_NUMBER
from kmp.records.log_types import MOST_METRICS as MOST_METRICS
from kmp.records.replay import BATCH_PARTS as BATCH_PARTS
from kmp.records.replay import BATCH_X as BATCH_X
from kmp.records.replay import BATCH_Y as BATCH_Y
from kmp.records.replay import LOSS_FUNCTION as LOSS_FUNCTION
from kmp.records.replay import BatchCheck as BatchCheck
from kmp.records.replay import Comparison as Comparison
from kmp.records.replay import GradientError as GradientError
from kmp.records.replay import GradientRange as GradientRange
from kmp.records.replay import InvalidTargets as InvalidTargets
from kmp.records.replay import LayerError as LayerError
from kmp.records.replay import LayerSearch as LayerSearch
from kmp.records.replay import LostWeight as LostWeight
from kmp.records.replay import NonfiniteOperation as NonfiniteOperation
from kmp.records.replay import NonfinitePart as NonfinitePart
from kmp.records.replay import Overflow as Overflow
from kmp.records.replay import Replay
from kmp.records.replay import StateError as StateError
from kmp.records.replay import UnscaledGradients as UnscaledGradients
from kmp.records.run import RUN_EXPECTED as RUN_EXPECTED
from kmp.records.run import Run, load_run
from kmp.records.run import log_file as log_file
from kmp.records.run import scalars as scalars
from kmp.records.snapshot import Snapshot

__all__ = [
    "BIN_COUNT",
    "ExponentHistogram",
    "GradientSample",
    "Replay",
    "Run",
    "Snapshot",
    "load_run",
]
