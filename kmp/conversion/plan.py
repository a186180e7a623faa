"""Decides which layers and operations stay float32, and why.

A plan can be saved, reviewed, edited and applied.
"""

import json
import os
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import keras

from kmp.backend.layer_graph import LayerGraph, calls_in, output_operations
from kmp.conversion.model_parts import WRAPPERS, Part, has_float_dtype
from kmp.conversion.precision import FOLLOWS_INPUTS, NEEDS_FLOAT32
from kmp.utils import atomic_files, validation
from kmp.utils.float_formats import FLOAT32, FORMATS_16_BIT
from kmp.utils.names import path_and_parents

CONVERSION_POLICIES = ("mixed_float16", "mixed_bfloat16", "float16", "bfloat16")

_SELECTED = "selected by keep_float32"
_AROUND = "wraps {path}"


@dataclass(frozen=True)
class Plan:
    """The dtype policies of a model's layers and operations.

    Args:
        policy: The dtype policy of everything that is not in `float32`: `"mixed_float16"`,
            `"mixed_bfloat16"`, `"float16"` or `"bfloat16"`.
        float32: Maps the path of each layer or operation that stays float32, as `kmp.audit` shows
            it, to the reason. Its sublayers stay float32 too. May be edited.

    Raises:
        TypeError: If `policy` is not a string, or `float32` is not a dict of strings.
        ValueError: If `policy` is not one of these strings.

    Example:
    >>> import kmp
    >>> plan = kmp.Plan("mixed_float16", {"softmax": "selected by keep_float32"})
    >>> plan.policy_of("dense"), plan.policy_of("softmax")
    ('mixed_float16', 'float32')
    """

    policy: str
    float32: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        policy = validation.one_of("policy", self.policy, CONVERSION_POLICIES)
        object.__setattr__(self, "policy", policy)
        message = f"`float32` must map paths to reasons. Received: float32={self.float32!r}"
        if not isinstance(self.float32, dict):
            raise TypeError(message)
        for path, reason in self.float32.items():
            if not (isinstance(path, str) and isinstance(reason, str)):
                raise TypeError(message)

    @property
    def compute_dtype(self) -> str:
        """The compute dtype of everything that is not in `float32`."""
        return self.policy.removeprefix("mixed_")

    def policy_of(self, path: str) -> str:
        """Returns the dtype policy at a path.

        It is float32 if the path or one of its parents is in `float32`.
        """
        is_float32 = any(each in self.float32 for each in path_and_parents(path))
        return FLOAT32.name if is_float32 else self.policy

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as a dict for JSON."""
        return {"policy": self.policy, "float32": dict(self.float32)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to a JSON file.

        Raises:
            TypeError: If `path` is not a string or path.
            ValueError: If `path` is empty or a URL.
            OSError: If the file cannot be written.
        """
        atomic_files.write_json(validation.local_path("path", path), self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Plan":
        """Reads a plan from a JSON file that `save` wrote, edited or not.

        Raises:
            TypeError: If `path` is not a string or path.
            OSError: If the file cannot be read.
            ValueError: If the file is not a valid plan, such as one with a repeated key or a pipe,
                or `path` is empty or a URL.
        """
        file = validation.local_path("path", path)
        if file.exists() and not file.is_file():
            raise ValueError(f"{file} is not a valid plan: it is not a regular file")
        try:
            content = json.loads(
                file.read_text(encoding="utf-8"), object_pairs_hook=_without_repeated_keys
            )
            if not isinstance(content, dict) or set(content) != {"policy", "float32"}:
                raise ValueError("it must have exactly the keys 'policy' and 'float32'")
            return cls(**content)
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{file} is not a valid plan: {error}") from error


def _without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the pairs of a JSON object as a dict.

    JSON itself would keep only the last value of a repeated key.
    """
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"the key {name!r} is repeated")
        result[name] = value
    return result


def make_plan(model: keras.Model, parts: list[Part], policy: str, keep_float32: Any = None) -> Plan:
    """Returns the plan of kmp's precision rules for a model.

    Args:
        model: A built model.
        parts: Its parts, with their rules for the policy.
        policy: A 16-bit policy.
        keep_float32: What the user selects in addition, as in `convert`.
    """
    dtype = Plan(policy).compute_dtype
    planned = [part for part in parts if part.is_planned]
    requested = _selected_paths(planned, keep_float32)
    graph = calls_in(model)
    outputs = {id(operation) for operation in output_operations(graph)}
    # The layers, not models, that directly contain an output layer, such as a tied embedding.
    output_inside: dict[str, str] = {}
    for part in planned:
        if id(part.operation) in outputs and not isinstance(part.parent, keras.Model):
            output_inside.setdefault(part.parent_path, part.path)

    # What stays float32 whatever its inputs. The first reason that applies is shown.
    float32: dict[str, str] = {}
    for part in planned:
        if part.obstacle:
            reason = part.obstacle
        elif part.path in requested:
            reason = _SELECTED
        elif part.rule.category == NEEDS_FLOAT32:
            reason = part.rule.reason
        elif id(part.operation) in outputs:
            bits = FORMATS_16_BIT[dtype].fraction_bits + 1
            reason = f"model output: {dtype} would round it to {bits} significant bits"
        elif part.path in output_inside:
            reason = _AROUND.format(path=output_inside[part.path])
        else:
            continue
        float32[part.path] = reason

    # What is float32 because of others.
    path_of: dict[Hashable, str] = {id(part.operation): part.path for part in parts}
    for part in planned:
        amplifier = path_of.get(part.rule.amplified_by)
        if amplifier is not None:
            float32.setdefault(
                part.path, f"{amplifier} amplifies the rounding errors of what it returns"
            )
    for path in _paths_with_float32_inputs(graph, planned, float32):
        float32[path] = "all its inputs are float32"
    return _completed(Plan(policy, float32), parts)


def _paths_with_float32_inputs(
    graph: LayerGraph, parts: list[Part], float32: dict[str, str]
) -> Iterator[str]:
    """Yields the layers that can follow their inputs and get them from float32 layers alone.

    Nothing is then rounded to 16 bits between two float32 layers, or before the first one.

    Args:
        graph: The calls in the model.
        parts: Its planned parts.
        float32: The parts that are float32 whatever their inputs, by path.
    """
    called_ids = {id(call.operation) for call in graph.calls}
    inputs = [call for call in graph.calls if call.is_input]
    following_ids = {id(call.operation) for call in inputs if call.sources}
    float32_ids = {id(call.operation) for call in inputs} - following_ids
    for part in parts:
        if not float32.keys().isdisjoint(path_and_parents(part.path)):
            float32_ids.add(id(part.operation))
        elif part.rule.category == FOLLOWS_INPUTS and id(part.operation) in called_ids:
            following_ids.add(id(part.operation))

    # A shared layer follows the inputs of all its calls, also of those after what it feeds.
    rounding_ids, known = called_ids - float32_ids - following_ids, -1
    while known < len(rounding_ids):
        known = len(rounding_ids)
        for call in graph.calls:
            ids_before = {id(each.operation) for each in call.calls_before}
            if id(call.operation) in following_ids and ids_before & rounding_ids:
                rounding_ids.add(id(call.operation))
    following_ids -= rounding_ids
    for part in parts:
        # Operations, and layers with integer or string dtypes, need no entry in the plan.
        if id(part.operation) in following_ids and has_float_dtype(part.operation):
            yield part.path


def extend_plan(plan: Plan, parts: list[Part], keep_float32: Any) -> Plan:
    """Adds what the user selects to a plan that is given."""
    planned = [part for part in parts if part.is_planned]
    float32 = dict.fromkeys(_selected_paths(planned, keep_float32), _SELECTED)
    float32.update(plan.float32)  # with its own reasons
    return _completed(replace(plan, float32=float32), parts)


def _completed(plan: Plan, parts: list[Part]) -> Plan:
    """Adds the wrappers and sublayers of a plan's float32 layers, for the parts of a given model.

    Raises:
        ValueError: If the model has no layer or operation at one of the plan's paths.
    """
    parts = [part for part in parts if part.is_planned]
    known_paths = [part.path for part in parts]
    unknown_paths = sorted(set(plan.float32).difference(known_paths))
    if unknown_paths:
        raise ValueError(
            f"The plan contains {unknown_paths[0]!r}, but the model has no such layer. Keras"
            " numbers unnamed layers across all models: call keras.utils.clear_session() before"
            f" you rebuild a model to restart the numbers. The layers are: {', '.join(known_paths)}"
        )
    float32 = dict(plan.float32)
    for part in reversed(parts):  # a wrapper of a wrapper too
        if part.path in float32 and isinstance(part.parent, WRAPPERS):
            float32.setdefault(part.parent_path, _AROUND.format(path=part.path))
    for part in parts:
        if part.parent_path in float32:
            float32.setdefault(part.path, f"inside {part.parent_path}")
    in_graph_order = {path: float32[path] for path in known_paths if path in float32}
    return replace(plan, float32=in_graph_order)


def _selected_paths(parts: list[Part], selectors: Any) -> set[str]:
    """Returns the paths that `keep_float32` selects."""
    if selectors is None:
        return set()
    is_one = not isinstance(selectors, list | tuple | set)
    selected: set[str] = set()
    for selector in [selectors] if is_one else selectors:
        found = _matching(parts, selector)
        is_condition = callable(selector) and not isinstance(selector, type | keras.Operation)
        if not found and not is_condition:  # a condition may select none
            name = getattr(selector, "__name__", repr(selector))
            known_paths = ", ".join(part.path for part in parts)
            raise ValueError(
                f"`keep_float32`: no layer matches {name}. The layers are: {known_paths}"
            )
        selected.update(part.path for part in found)
    return selected


def _matching(parts: list[Part], selector: Any) -> list[Part]:
    """Returns the parts that one selector of `keep_float32` selects."""
    if isinstance(selector, str):
        found = [part for part in parts if fnmatchcase(part.path, selector)]
        return found or [part for part in parts if part.operation.name == selector]
    if isinstance(selector, type):
        return [part for part in parts if isinstance(part.operation, selector)]
    if isinstance(selector, keras.Operation):
        return [part for part in parts if part.operation is selector]
    if callable(selector):
        return [part for part in parts if part.is_layer and selector(part.operation)]
    raise TypeError(
        "`keep_float32` must be a path, pattern, layer, class, function that takes a layer, or a"
        f" list of these. Received: {selector!r}"
    )
