"""Reads replays of the first version of the log, in which all values stood in one object."""

from collections.abc import Mapping
from typing import Any

MARK = b'"is_part_finite":'  # in each such object, and in no other

# The keys of the values in the parts of a `Replay`, by their names there.
_BATCH = {
    "invalid_targets": "invalid_targets",
    "has_sample_weight": "has_sample_weight",
    "nonfinite_variables": "nonfinite_variables",
    "lost_weights": "lost_weights",
    "float16_states": "states_in_16_bits",
}
_GRADIENTS = {
    "usable_scale": "usable_scale",
    "activation_gradients": "of_activations",
    "flushed": "flushed",
    "zero": "zero",
}
_OVERFLOW = {
    "nonfinite": "operations",
    "lost_constants": "lost_constants",
    "nonfinite_outputs": "outputs",
    "underflows": "underflows",
}
_COMPARISON = {
    "output_error": "output_error",
    "layer_errors": "layers",
    "gradient_errors": "gradients",
    "state_errors": "states",
}
_UNSCALED = {"unscaled_layers": "layers", "is_unscaled": "are_all", "unscaled_by": "origin"}


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the decoded JSON of a `Replay` for that of a flat one."""
    if flat.get("is_finite_compiled"):  # only operation by operation it was not
        flat = {**flat, "is_finite": True, **dict.fromkeys(_OVERFLOW)}
    batch = _renamed(flat, _BATCH)
    if flat.get("nonfinite_part") is not None:
        batch["nonfinite"] = {
            "part": flat["nonfinite_part"],
            "key": flat.get("nonfinite_key", ""),
            "is_too_large": flat.get("is_part_finite", False),
        }
    return {
        **flat,
        "batch": batch,
        "gradients": _renamed(flat, _GRADIENTS),
        "overflow": _renamed(flat, _OVERFLOW) if any(map(flat.get, _OVERFLOW)) else None,
        "comparison": _comparison(flat),
        "unscaled": _renamed(flat, _UNSCALED) if flat.get("unscaled_layers") else None,
        "search": _search(flat),
    }


def _renamed(flat: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {name: flat[key] for key, name in names.items() if key in flat}


def _comparison(flat: Mapping[str, Any]) -> dict[str, Any] | None:
    return None if flat.get("output_error") is None else _renamed(flat, _COMPARISON)


def _search(flat: Mapping[str, Any]) -> dict[str, Any]:
    layers = flat.get("float32_layers")
    return {"is_found": layers is not None, "layers": layers or []}
