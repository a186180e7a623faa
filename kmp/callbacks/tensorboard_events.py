"""What TensorBoard shows of a record: scalars, histograms of binary exponents and texts.

All scalars, and all histograms, of a record are one event: `tf.summary` would write one each, which
takes ten times as long. Each function writes to the default summary writer.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from msgspec import UNSET

from kmp.records import ExponentHistogram, GradientSample, Record, Run
from kmp.records.exponent_histogram import FIRST_EXPONENT
from kmp.records.layer_names import stable_name, stable_names
from kmp.records.run import scalars

SUFFIX = ".kmp"  # of the event files

_DESCRIPTION = (
    "log2 of the magnitudes of the finite nonzero gradient elements, times the loss scale if the "
    "run has one; "
    f"at {FIRST_EXPONENT - 1}, all finite elements are zero"
)


def write(record: Record, run: Run) -> int:
    """Writes a record. Returns the bytes of its histograms.

    Args:
        record: The record.
        run: Its run. Without a loss scale, as in float32, there is no curve of one.
    """
    from tensorboard.plugins.scalar.summary_v2 import scalar_pb

    values = dict(scalars(record))
    values.pop("epoch", None)
    scale = values.pop("loss_scale", 0.0)
    if scale > 0 and run.has_loss_scale:  # a power of two: its axis is that of log2
        values["log2_loss_scale"] = math.log2(scale)
    _write(record.step, [scalar_pb(f"kmp/{key}", value).value[0] for key, value in values.items()])
    if record.fallback is not UNSET:
        names = ", ".join(map(repr, record.fallback))
        write_text("kmp/fallback", f"Set to float32: {names}\n{record.fallback_reason or ''}")
    if record.sample is UNSET:
        return 0
    by_tag = histograms_by_tag(record.sample, run.settings.layers)
    return write_histograms(record.step, by_tag)


def write_text(tag: str, text: str) -> None:
    """Writes a text, as it is, at the default step."""
    tf.summary.text(tag, f"```\n{text}\n```")


def write_histograms(step: int, by_tag: Mapping[str, ExponentHistogram]) -> int:
    """Writes histograms, by tag. Returns their bytes."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.histogram import metadata
    from tensorboard.util.tensor_util import make_tensor_proto

    values = []
    for tag, histogram in by_tag.items():
        edges, counts = histogram.log2_buckets()
        # Left edge, right edge, count.
        buckets = np.stack([edges[:-1], edges[1:], counts], axis=1).astype(np.float64)
        plugin = metadata.create_summary_metadata(display_name=None, description=_DESCRIPTION)
        values.append(Summary.Value(tag=tag, tensor=make_tensor_proto(buckets), metadata=plugin))
    return _write(step, values)


def histograms_by_tag(
    sample: GradientSample, layers: Mapping[str, str]
) -> dict[str, ExponentHistogram]:
    """Returns the histograms of a sample by tag: of all gradients, and of layers.

    Those of layers only if the sample has the weight update. Without those that have no finite
    element. Histograms by layer of all samples would take most of the disk.
    """
    by_tag = {"kmp/gradient_exponents": sample.histogram}
    if np.isfinite(sample.update_norm).any():
        names, by_layer = stable_names(layers), sample.by_layer()
        by_tag |= {f"kmp_by_layer/{stable_name(name, names)}": by_layer[name] for name in by_layer}
    return {tag: each for tag, each in by_tag.items() if each.zeros or each.by_exponent.any()}


def _write(step: int, values: Sequence[Any]) -> int:
    from tensorboard.compat.proto.summary_pb2 import Summary

    content = Summary(value=values).SerializeToString()
    tf.summary.experimental.write_raw_pb(content, step=step)
    return len(content)
