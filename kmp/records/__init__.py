"""Records of a training run, in memory and as JSON Lines. Needs no Keras.

A log has one JSON object per line. The first line is a header. Every other line is a record with
`step` and some of the other keys of a `Record`. Settings that are the defaults are omitted.
Non-finite numbers are written as null.

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

from kmp.records.exponent_histogram import BIN_COUNT, ExponentHistogram
from kmp.records.gradient_sample import GradientSample
from kmp.records.log_schema import Header, Record, Settings
from kmp.records.replay import Replay
from kmp.records.run import Run, load_run
from kmp.records.snapshot import Snapshot

__all__ = [
    "BIN_COUNT",
    "ExponentHistogram",
    "GradientSample",
    "Header",
    "Record",
    "Replay",
    "Run",
    "Settings",
    "Snapshot",
    "load_run",
]
