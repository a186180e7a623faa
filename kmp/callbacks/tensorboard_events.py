"""Scalars and histograms of binary exponents in TensorBoard's event files.

All of a record are one event: `tf.summary` would write one each, which takes ten times as long.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kmp.records import FIRST_EXPONENT, ExponentHistogram, GradientSample, stable_name, stable_names

_DESCRIPTION = (
    "log2 of the magnitudes of the finite nonzero loss-scaled gradient elements; "
    f"at {FIRST_EXPONENT - 1}, all finite elements are zero"
)


def write_scalars(step: int, by_tag: Mapping[str, float]) -> None:
    """Writes scalars, by tag, to the default summary writer."""
    from tensorboard.plugins.scalar.summary_v2 import scalar_pb

    _write(step, [scalar_pb(tag, value).value[0] for tag, value in by_tag.items()])


def write_histograms(step: int, by_tag: Mapping[str, ExponentHistogram]) -> int:
    """Writes histograms, by tag, to the default summary writer. Returns their bytes."""
    return _write(step, [_histogram_value(tag, histogram) for tag, histogram in by_tag.items()])


def histograms_by_tag(sample: GradientSample, layers: Mapping[str, str]) -> dict[str, ExponentHistogram]:
    """Returns the histogram of all gradients of a sample and, if it has the weight update, those of the layers, by tag.

    Without those that have no finite element. Histograms by layer of all samples would take most of the disk.

    Args:
        sample: The sample.
        layers: The class of each layer by path, as in the settings of a run.
    """
    by_tag = {"kmp/gradient_exponents": sample.histogram}
    if np.isfinite(sample.update_norm).any():
        names, by_layer = stable_names(layers), sample.by_layer()
        by_tag |= {f"kmp_by_layer/{stable_name(name, names)}": by_layer[name] for name in by_layer}
    return {tag: histogram for tag, histogram in by_tag.items() if _finite_elements(histogram)}


def _finite_elements(histogram: ExponentHistogram) -> int:
    return histogram.zeros + int(histogram.by_exponent.sum())


def _write(step: int, values: Sequence[Any]) -> int:
    from tensorboard.compat.proto.summary_pb2 import Summary

    content = Summary(value=values).SerializeToString()
    tf.summary.experimental.write_raw_pb(content, step=step)
    return len(content)


def _histogram_value(tag: str, histogram: ExponentHistogram) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.histogram import metadata
    from tensorboard.util.tensor_util import make_tensor_proto

    edges, counts = histogram.log2_buckets()
    buckets = np.stack([edges[:-1], edges[1:], counts], axis=1).astype(np.float64)  # left edge, right edge, count
    plugin = metadata.create_summary_metadata(display_name=None, description=_DESCRIPTION)
    return Summary.Value(tag=tag, tensor=make_tensor_proto(buckets), metadata=plugin)
