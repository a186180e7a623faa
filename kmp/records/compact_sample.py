"""The form of a gradient sample in a log; `kmp.records` documents it. Needs no Keras."""

import base64
import zlib
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from kmp.records.gradient_sample import NORMS, UPDATE_COUNTS, GradientSample
from kmp.records.log_types import HIGHEST_NUMBER, MOST_ELEMENTS

_SIGNIFICANT_BITS = 8  # of norms and magnitudes

# Kept with a sample, so that it is encoded once.
_encodings: WeakKeyDictionary[GradientSample, dict[str, Any]] = WeakKeyDictionary()


def compact(sample: GradientSample) -> dict[str, Any]:
    """Returns the JSON-serializable form of a sample.

    It is computed once and must not be changed.
    """
    if sample not in _encodings:
        _encodings[sample] = _encoded(sample)
    return _encodings[sample]


def _encoded(sample: GradientSample) -> dict[str, Any]:
    data: dict[str, Any] = {"loss_scale": sample.loss_scale, "bins": sample.bins.tolist()}
    data["counts"] = _packed(sample.bin_counts.T, "<i8")
    for key in ("amax", *NORMS):
        significands, exponents = np.frexp(getattr(sample, key))
        # Down, so that a magnitude stays in its power of two.
        rounded = np.ldexp(
            np.trunc(np.ldexp(significands, _SIGNIFICANT_BITS)), exponents - _SIGNIFICANT_BITS
        )
        values = rounded if key == "amax" else np.where(np.isfinite(rounded), rounded, np.nan)
        if not np.isnan(values).all():
            data[key] = _packed(values, "<f8")
    counts = {key: getattr(sample, key) for key in UPDATE_COUNTS}
    data |= {key: _packed(values, "<i8") for key, values in counts.items() if values.any()}
    return data | {"names": sample.names}


def expanded(step: int, data: dict[str, Any]) -> GradientSample:
    """Returns the sample for a dictionary from `compact`.

    The dictionary has the types and ranges of `log_schema.Sample`.

    Raises:
        ValueError: If a value is not valid. The message names its key.
    """
    names = tuple(data["names"])
    size = len(names)
    if len(set(names)) < size:
        raise ValueError("`names` must not repeat a name")
    numbers = {}
    for key in ("amax", *NORMS):
        numbers[key] = values = (
            _unpacked(data, key, "<f8", size) if key in data else np.full(size, np.nan)
        )
        is_accepted = np.isnan(values) | ((values >= 0) & (values <= HIGHEST_NUMBER))
        if not (is_accepted | (np.isposinf(values) & (key == "amax"))).all():
            raise ValueError(f"`{key}` must hold NaN, or numbers between 0 and {HIGHEST_NUMBER}")
    updates = {key: _integers(data, key, size) for key in UPDATE_COUNTS if key in data}
    bins = np.array(data["bins"], np.int64)
    if (np.diff(bins) <= 0).any():
        raise ValueError("`bins` must ascend")
    counts = _integers(data, "counts", size * len(bins)).reshape(len(bins), size).T
    sample = GradientSample(
        step, data["loss_scale"], names, counts, **numbers, **updates, bins=bins
    )
    _encodings[sample] = data
    return sample


def _integers(data: Mapping[str, Any], key: str, size: int) -> np.ndarray:
    values = _unpacked(data, key, "<i8", size)
    if ((values < 0) | (values >= MOST_ELEMENTS)).any():
        raise ValueError(f"`{key}` must hold integers at least 0 and below {MOST_ELEMENTS}")
    return values


def _packed(values: np.ndarray, dtype: str) -> str:
    """Returns numbers as text: their bytes, compressed, in base64.

    First the lowest byte of each number, then the next.
    """
    numbers = np.ascontiguousarray(values.ravel(), dtype)
    planes = numbers.view(np.uint8).reshape(numbers.size, numbers.itemsize).T.tobytes()
    compressor = zlib.compressobj(9, strategy=zlib.Z_FILTERED)
    return base64.b64encode(compressor.compress(planes) + compressor.flush()).decode()


def _unpacked(data: Mapping[str, Any], key: str, dtype: str, size: int) -> np.ndarray:
    """Returns `size` numbers for a text from `_packed`. Never expands more bytes than these."""
    item_size = np.dtype(dtype).itemsize
    decompressor = zlib.decompressobj()
    try:
        content = decompressor.decompress(
            base64.b64decode(data[key], validate=True), size * item_size + 1
        )
    except (ValueError, zlib.error) as error:
        raise ValueError(f"`{key}` is not zlib data in base64 ({error})") from error
    if len(content) != size * item_size or not decompressor.eof or decompressor.unused_data:
        raise ValueError(f"`{key}` must expand to {size * item_size} bytes")
    return (
        np.ascontiguousarray(np.frombuffer(content, np.uint8).reshape(item_size, size).T)
        .view(dtype)
        .reshape(size)
    )
