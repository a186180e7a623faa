"""Histograms of binary exponents in TensorBoard's event files."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from kmp.records import ExponentHistogram


def write_histograms(step: int, by_tag: Mapping[str, ExponentHistogram]) -> int:
    """Writes histograms, by tag, to the default summary writer. Returns their bytes."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    # One event for all histograms: one tf.summary.write call for each takes ten times as long.
    summary = Summary(value=[_histogram_value(tag, histogram) for tag, histogram in by_tag.items()])
    content = summary.SerializeToString()
    tf.summary.experimental.write_raw_pb(content, step=step)
    return len(content)


def _histogram_value(tag: str, histogram: ExponentHistogram) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.histogram import metadata
    from tensorboard.util.tensor_util import make_tensor_proto

    # A row of TensorBoard's histogram is left edge, right edge, count. The edges here are binary exponents.
    filled = np.flatnonzero(histogram.by_exponent)
    span = slice(filled[0], filled[-1] + 1) if filled.size else slice(0, 0)
    left = histogram.exponents[span].astype(np.float64)
    buckets = np.stack([left, left + 1, histogram.by_exponent[span]], axis=1)
    plugin = metadata.create_summary_metadata(display_name=None, description="log2 of loss-scaled gradient magnitudes")
    return Summary.Value(tag=tag, tensor=make_tensor_proto(buckets), metadata=plugin)
