"""The compact form of a gradient sample, in memory and in a log; `kmp.records` documents it. Needs no Keras."""

import base64
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from kmp.records.exponent_histogram import BIN_COUNT, FIRST_EXPONENT, INF_BIN, NAN_BIN, ZERO_BIN, pack, unpack
from kmp.records.gradient_sample import GradientSample
from kmp.records.log_errors import InvalidValueError
from kmp.records.value_types import HIGHEST_NORM, MOST_ELEMENTS

MOST_COUNTS = 2**24  # in one sample, variables times exponents: bounds the memory that a log can ask for
EXACT = 4  # counts through this one are exact
LEVELS = np.unique(np.append(0, np.round(2.0 ** (np.arange(2 * 36 + 1) / 2)))).astype(np.int64)
_BOUNDARIES = np.append(0.5, np.sqrt(LEVELS[1:-1].astype(float) * LEVELS[2:]))
_NORM_BITS = 8  # significant bits of a norm
_AMAX_STEPS = 64  # between two powers of two

_NO_EXPONENT = -1100  # 2 to this power is zero in float64

_SPECIAL_BINS = {"zero": ZERO_BIN, "inf": INF_BIN, "nan": NAN_BIN}
_NORMS = ("norm", "weight_norm", "update_norm")
_INTEGERS = ("updates", "lost_updates")


def compact(sample: GradientSample) -> dict[str, Any]:
    """Returns a sample in compact form, JSON-serializable; in the form of `to_dict` if it has too many counts."""
    elements, norms = sample.counts.sum(1), {key: _rounded(getattr(sample, key)) for key in _NORMS}
    order = np.lexsort((norms["norm"], elements))
    bins = _packed_bins(sample.counts, order)
    unscaled = None if sample.unscaled_counts is None else _packed_bins(sample.unscaled_counts, order)
    if len(sample) * max(len(part["total"]["counts"]) for part in (bins, unscaled or bins)) > MOST_COUNTS:
        return sample.to_dict()
    columns = {"elements": _packed(elements, "<i8"), "amax": _packed_or_none(_amax_steps(sample), "<u1")}
    columns |= {key: _packed_or_none(getattr(sample, key), "<i8") for key in _INTEGERS}
    for key, values in norms.items():
        columns[key] = None if np.isnan(values).all() else _packed(values, "<f8")
    present = {key: text for key, text in columns.items() if text is not None}
    data = {"loss_scale": sample.loss_scale} | bins | present
    return data | ({} if unscaled is None else {"unscaled": unscaled}) | {"names": list(sample.names)}


def expanded(step: int, data: Mapping[str, Any], path: str = "sample") -> GradientSample:
    """Returns the sample for a dictionary from `compact`.

    Args:
        step: The sampled training step.
        data: The dictionary, with the types and the ranges of `log_schema.Sample`.
        path: The key of the dictionary in its record, for messages.

    Raises:
        ValueError: If a value is missing or not valid. The message names its key.
    """
    names = tuple(data["names"])
    if len(set(names)) < len(names):
        raise InvalidValueError(f"`{path}.names` must not repeat a name")
    elements = _integers(data, "elements", len(names), path, is_required=True)
    norms = {key: _norms(data, key, len(names), path) for key in _NORMS}
    order = np.lexsort((norms["norm"], elements))
    counts, correction = _unpacked_bins(data, elements, order, path)
    unscaled, unscaled_correction = None, None
    if "unscaled" in data:
        unscaled, unscaled_correction = _unpacked_bins(data["unscaled"], elements, order, f"{path}.unscaled")
    return GradientSample(
        step,
        float(data["loss_scale"]),
        names,
        counts,
        _amax(counts, _unpacked(data, "amax", "<u1", len(names), path)),
        **norms,
        **{key: _integers(data, key, len(names), path) for key in _INTEGERS},
        unscaled_counts=unscaled,
        correction=correction,
        unscaled_correction=unscaled_correction,
    )


def _packed_bins(counts: np.ndarray, order: np.ndarray) -> dict[str, Any]:
    """Packs counts; their codes as differences between variables in `order`, which are small and so compress well."""
    total = pack(counts.sum(0))
    first = total["first"] - FIRST_EXPONENT + ZERO_BIN + 1
    codes = np.searchsorted(_BOUNDARIES, counts[:, first : first + len(total["counts"])])
    special = {key: _packed_or_none(counts[:, index], "<i8") for key, index in _SPECIAL_BINS.items()}
    present = {key: text for key, text in special.items() if text is not None}
    differences = np.diff(codes[order].astype(np.uint8), axis=0, prepend=np.uint8(0))
    return {"total": total} | present | {"counts": _packed(differences.T, "<u1")}


def _unpacked_bins(
    data: Mapping[str, Any], elements: np.ndarray, order: np.ndarray, path: str
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the counts, int64 of shape `(n, 280)`, and what rounding them took from their sum."""
    _require(data, ("total", "counts"), path)
    variables, span = len(elements), len(data["total"]["counts"])
    if variables * span > MOST_COUNTS:
        raise InvalidValueError(f"`{path}` must have at most {MOST_COUNTS} counts. Received: {variables} x {span}")
    first = data["total"]["first"] - FIRST_EXPONENT + ZERO_BIN + 1
    if first + span > INF_BIN:
        raise InvalidValueError(f"`{path}.total.counts` must end at exponent {FIRST_EXPONENT + INF_BIN - 2} or below")
    total = unpack(data["total"])
    # Most exponents have no count: in column order, the operating system does not allocate their pages.
    counts = np.zeros((variables, BIN_COUNT), np.int64, order="F")
    for key, index in _SPECIAL_BINS.items():
        counts[:, index] = _integers(data, key, variables, path)
    differences = _unpacked(data, "counts", "<u1", variables * span, path).reshape(span, variables)
    codes = np.empty((variables, span), np.uint8)
    codes[order] = np.cumsum(differences, axis=1, dtype=np.uint8).T
    if codes.size and codes.max() >= len(LEVELS):
        raise InvalidValueError(f"`{path}.counts` must be below {len(LEVELS)}. Received: {codes.max()}")
    _fill(counts[:, first : first + span], codes, elements - counts.sum(1), path)
    present = np.count_nonzero(codes, axis=0)
    found = np.concatenate([counts.sum(0)[list(_SPECIAL_BINS.values())], [elements.sum()]])
    expected = np.append(total[list(_SPECIAL_BINS.values())], total.sum())
    bounds = total[first : first + span]
    if (found != expected).any() or (present > bounds).any() or ((present == 0) != (bounds == 0)).any():
        raise InvalidValueError(f"`{path}.total` must be the sum of the counts of all variables")
    return counts, total - counts.sum(0)


def _fill(counts: np.ndarray, codes: np.ndarray, elements: np.ndarray, path: str) -> None:
    """Decodes counts so that each variable has the right number of elements, which is divided by the rounded counts."""
    exact, weight = np.zeros(len(codes), np.int64), np.zeros(len(codes))
    for column in codes.T:
        exact += np.minimum(LEVELS[column], EXACT)
        weight += np.maximum(LEVELS[column] - EXACT, 0)
    rest = elements - exact
    if (rest < 0).any() or (rest[weight == 0] > 0).any():
        raise InvalidValueError(f"`{path}.counts` must agree with `elements`, `zero`, `inf` and `nan`")
    before, sum_before = np.zeros(len(codes)), np.zeros(len(codes))
    for column, result in zip(codes.T, counts.T, strict=True):
        before += np.maximum(LEVELS[column] - EXACT, 0)
        sum_here = np.floor(before / np.maximum(weight, 1) * rest)
        result[:] = np.minimum(LEVELS[column], EXACT) + (sum_here - sum_before).astype(np.int64)
        sum_before = sum_here


def _highest_exponents(counts: np.ndarray) -> np.ndarray:
    is_filled = counts[:, INF_BIN - 1 : ZERO_BIN : -1] > 0
    return np.where(is_filled.any(1), FIRST_EXPONENT + INF_BIN - 2 - is_filled.argmax(1), _NO_EXPONENT)


def _amax_steps(sample: GradientSample) -> np.ndarray:
    with np.errstate(over="ignore"):
        fractions = np.ldexp(np.nan_to_num(sample.amax, posinf=0.0), -_highest_exponents(sample.counts)) - 1
    return np.clip(np.round(fractions * _AMAX_STEPS), 0, _AMAX_STEPS - 1)


def _amax(counts: np.ndarray, steps: np.ndarray) -> np.ndarray:
    amax = np.ldexp(1 + steps / _AMAX_STEPS, _highest_exponents(counts))
    amax[counts[:, INF_BIN] > 0] = np.inf
    amax[counts[:, NAN_BIN] > 0] = np.nan
    return amax


def _rounded(norms: np.ndarray) -> np.ndarray:
    significands, exponents = np.frexp(norms)
    rounded = np.ldexp(np.round(np.ldexp(significands, _NORM_BITS)), exponents - _NORM_BITS)
    return np.where(np.isfinite(norms), rounded, np.nan)


def _norms(data: Mapping[str, Any], key: str, size: int, path: str) -> np.ndarray:
    values = _unpacked(data, key, "<f8", size, path) if key in data else np.full(size, np.nan)
    if not (np.isnan(values) | ((values >= 0) & (values <= HIGHEST_NORM))).all():
        raise InvalidValueError(f"`{path}.{key}` must be NaN, or between 0 and {HIGHEST_NORM}")
    return values


def _integers(data: Mapping[str, Any], key: str, size: int, path: str, is_required: bool = False) -> np.ndarray:
    if is_required:
        _require(data, (key,), path)
    values = _unpacked(data, key, "<i8", size, path)
    if ((values < 0) | (values >= MOST_ELEMENTS)).any():
        raise InvalidValueError(f"`{path}.{key}` must be at least 0 and below {MOST_ELEMENTS}")
    return values


def _require(data: Mapping[str, Any], keys: tuple[str, ...], path: str) -> None:
    for key in keys:
        if key not in data:
            raise InvalidValueError(f"`{path}` has no `{key}`")


def _packed_or_none(values: np.ndarray, dtype: str) -> str | None:
    return _packed(values, dtype) if values.any() else None


def _packed(values: np.ndarray, dtype: str) -> str:
    """Returns numbers as text: first the lowest byte of each, then the next; compressed; in base64."""
    numbers = np.ascontiguousarray(values.ravel(), dtype)
    planes = numbers.view(np.uint8).reshape(numbers.size, numbers.itemsize).T.tobytes()
    compressor = zlib.compressobj(9, strategy=zlib.Z_FILTERED)
    return base64.b64encode(compressor.compress(planes) + compressor.flush()).decode()


def _unpacked(data: Mapping[str, Any], key: str, dtype: str, size: int, path: str) -> np.ndarray:
    """Returns `size` numbers for a text from `_packed`, zeros if there is none. Never expands more bytes than these."""
    item_size = np.dtype(dtype).itemsize
    expected = size * item_size
    if key not in data:
        return np.zeros(size, dtype)
    decompressor = zlib.decompressobj()
    try:
        content = decompressor.decompress(base64.b64decode(data[key], validate=True), expected + 1)
    except (ValueError, zlib.error) as error:
        raise InvalidValueError(f"`{path}.{key}` is not zlib data in base64 ({error})") from error
    if len(content) != expected or not decompressor.eof or decompressor.unused_data:
        found = "more" if len(content) > expected else str(len(content)) if decompressor.eof else "truncated data"
        found += " and more" * bool(decompressor.unused_data)
        raise InvalidValueError(f"`{path}.{key}` must expand to {expected} bytes. Received: {found}")
    return np.ascontiguousarray(np.frombuffer(content, np.uint8).reshape(item_size, size).T).view(dtype).reshape(size)
