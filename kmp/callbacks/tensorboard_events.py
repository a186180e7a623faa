"""Scalars and histograms of binary exponents in TensorBoard's event files.

All of a record are one event: `tf.summary` would write one each, which takes ten times as long.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kmp.records import FIRST_EXPONENT, ExponentHistogram

_ZERO_EXPONENT = FIRST_EXPONENT - 1.0
_DESCRIPTION = f"log2 of loss-scaled gradient magnitudes; at {_ZERO_EXPONENT:g}, all elements are zero"


def write_scalars(step: int, by_tag: Mapping[str, float]) -> None:
    """Writes scalars, by tag, to the default summary writer."""
    from tensorboard.plugins.scalar.summary_v2 import scalar_pb

    _write(step, [scalar_pb(tag, value).value[0] for tag, value in by_tag.items()])


def write_histograms(step: int, by_tag: Mapping[str, ExponentHistogram]) -> int:
    """Writes histograms, by tag, to the default summary writer. Returns their bytes."""
    return _write(step, [_histogram_value(tag, histogram) for tag, histogram in by_tag.items()])


def _write(step: int, values: Sequence[Any]) -> int:
    from tensorboard.compat.proto.summary_pb2 import Summary

    content = Summary(value=values).SerializeToString()
    tf.summary.experimental.write_raw_pb(content, step=step)
    return len(content)


def _histogram_value(tag: str, histogram: ExponentHistogram) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.histogram import metadata
    from tensorboard.util.tensor_util import make_tensor_proto

    # A row of TensorBoard's histogram is left edge, right edge, count. The edges here are binary exponents.
    filled = np.flatnonzero(histogram.by_exponent)
    if filled.size:
        span = slice(filled[0], filled[-1] + 1)
        left, counts = histogram.exponents[span].astype(np.float64), histogram.by_exponent[span]
    else:  # TensorBoard draws a histogram without buckets as if all values were 1
        left, counts = np.array([_ZERO_EXPONENT]), np.array([histogram.zeros])
    buckets = np.stack([left, left + 1, counts], axis=1)
    plugin = metadata.create_summary_metadata(display_name=None, description=_DESCRIPTION)
    return Summary.Value(tag=tag, tensor=make_tensor_proto(buckets), metadata=plugin)
