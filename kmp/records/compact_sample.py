"""The form of a gradient sample in a log; `kmp.records` documents it. Needs no Keras."""

import base64
import binascii
import functools
import math
import zlib
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from kmp.records.gradient_sample import COLUMNS, GradientSample, Kind
from kmp.records.log_types import HIGHEST_NUMBER, MOST_ELEMENTS

_SIGNIFICANT_BITS = 8  # of magnitudes and norms

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
    for key, kind in COLUMNS.items():
        values = getattr(sample, key)
        if kind == "count":
            if values.any():
                data[key] = _packed(values, "<i8")
            continue
        # Rounded down, so that each number stays in its power of two.
        significands, exponents = np.frexp(values)
        kept = np.trunc(np.ldexp(significands, _SIGNIFICANT_BITS))
        values = np.ldexp(kept, exponents - _SIGNIFICANT_BITS)
        if kind == "norm":
            values[np.isinf(values)] = math.nan
        if not np.isnan(values).all():
            data[key] = _packed(values, "<f8")
    data["names"] = sample.names
    return data


def expanded(step: int, data: dict[str, Any]) -> GradientSample:
    """Returns the sample for a dictionary from `compact`.

    The dictionary has the types and ranges of `log_schema.Sample`, and no name twice. What equals
    that of other samples is shared with them: a log may have hundreds of thousands of small ones.

    Raises:
        ValueError: If a value is not valid. The message names its key.
    """
    names = tuple(data["names"])
    size = len(names)
    columns = {key: _column(data, key, kind, size) for key, kind in COLUMNS.items()}
    bins, data["bins"] = _bins(tuple(data["bins"]))
    counts = _integers(data, "counts", size * len(bins)).reshape(len(bins), size).T
    sample = GradientSample(step, data["loss_scale"], names, counts, **columns, bins=bins)
    _encodings[sample] = data
    return sample


@functools.lru_cache(maxsize=256)
def _bins(bins: tuple[int, ...]) -> tuple[np.ndarray, tuple[int, ...]]:
    """Returns bins as an array and as they are, which samples share.

    Raises:
        ValueError: If they do not ascend.
    """
    array = np.array(bins, np.int64)
    if (array[1:] <= array[:-1]).any():
        raise ValueError("`bins` must ascend")
    array.flags.writeable = False
    return array, bins


@functools.lru_cache(maxsize=16)
def _constant(value: float, size: int) -> np.ndarray:
    """Returns what all variables have of a key that a sample omits, which samples share."""
    return np.broadcast_to(value, size)


def _column(data: Mapping[str, Any], key: str, kind: Kind, size: int) -> np.ndarray:
    if key not in data:
        return _constant(0 if kind == "count" else math.nan, size)
    if kind == "count":
        return _integers(data, key, size)
    values = _unpacked(data, key, "<f8", size)
    is_accepted = (values >= 0) & (values <= HIGHEST_NUMBER)
    if is_accepted.all():
        return values
    is_accepted |= np.isnan(values)
    if kind == "magnitude":
        is_accepted |= np.isposinf(values)
    if not is_accepted.all():
        raise ValueError(f"`{key}` must hold NaN, or numbers between 0 and {HIGHEST_NUMBER}")
    return values


def _integers(data: Mapping[str, Any], key: str, size: int) -> np.ndarray:
    values = _unpacked(data, key, "<i8", size)
    if values.view(np.uint64).max(initial=0) >= MOST_ELEMENTS:  # also of negative integers
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
    expected = size * item_size
    decompressor = zlib.decompressobj()
    try:
        compressed = binascii.a2b_base64(data[key], strict_mode=True)
        content = decompressor.decompress(compressed, expected + 1)
    except (ValueError, zlib.error) as error:
        raise ValueError(f"`{key}` is not zlib data in base64 ({error})") from error
    is_complete = decompressor.eof and not decompressor.unused_data
    if len(content) != expected or not is_complete:
        raise ValueError(f"`{key}` must expand to {expected} bytes")
    values = np.empty(size, dtype)
    planes = np.frombuffer(content, np.uint8).reshape(item_size, size)
    values.view(np.uint8).reshape(size, item_size)[:] = planes.T
    return values
