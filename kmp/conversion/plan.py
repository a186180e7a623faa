"""Decides which layers and operations stay float32, and why.

A plan can be saved, reviewed, edited and applied.
"""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import keras

from kmp.backend import keras_internals
from kmp.conversion.amplified import amplified_paths
from kmp.conversion.model_parts import WRAPPERS, Part, output_operations
from kmp.conversion.op_rule import FOLLOWS_INPUTS, NEEDS_FLOAT32
from kmp.utils import atomic_files, validation
from kmp.utils.float_formats import FLOAT32, FORMATS_16_BIT
from kmp.utils.names import path_and_parents

CONVERSION_POLICIES = ("mixed_float16", "mixed_bfloat16", "float16", "bfloat16")

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
    >>> plan = Plan("mixed_float16", {"softmax": "selected by keep_float32"})
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


@dataclass(frozen=True)
class _Facts:
    """What the reasons of a plan need to know besides the layer or operation itself.

    Args:
        compute_dtype: The 16-bit dtype of the plan.
        requested: The paths that the user selects.
        outputs: The ids of the operations that produce outputs of the model.
        output_inside: By the path of a layer that uses an output layer, such as a tied embedding,
            the path of the output layer.
    """

    compute_dtype: str
    requested: set[str]
    outputs: set[int]
    output_inside: dict[str, str]


def _obstacle(part: Part, facts: _Facts) -> str:
    return part.obstacle


def _is_selected(part: Part, facts: _Facts) -> str:
    return "selected by keep_float32" if part.path in facts.requested else ""


def _has_rule(part: Part, facts: _Facts) -> str:
    return part.rule.reason if part.rule.category == NEEDS_FLOAT32 else ""


def _is_output(part: Part, facts: _Facts) -> str:
    if id(part.operation) not in facts.outputs:
        return ""
    bits = FORMATS_16_BIT[facts.compute_dtype].fraction_bits + 1
    return f"model output: {facts.compute_dtype} would round it to {bits} bits"


def _uses_output(part: Part, facts: _Facts) -> str:
    inside = facts.output_inside.get(part.path)
    return _AROUND.format(path=inside) if inside else ""


# Why a part stays float32, whatever its inputs. The first that applies is the reason.
_REASONS = (_obstacle, _is_selected, _has_rule, _is_output, _uses_output)


def make_plan(model: keras.Model, parts: list[Part], policy: str, keep_float32: Any = None) -> Plan:
    """Returns the plan of kmp's precision rules for a model.

    Args:
        model: A built model.
        parts: Its parts, with their rules for the policy.
        policy: A 16-bit policy.
        keep_float32: What the user selects in addition, as in `convert`.
    """
    empty = Plan(policy)
    planned = [part for part in parts if part.is_planned]
    outputs = {id(operation) for operation in output_operations(model)}
    facts = _Facts(
        compute_dtype=empty.compute_dtype,
        requested=_selected_paths(planned, keep_float32),
        outputs=outputs,
        output_inside=_layers_around(planned, outputs),
    )
    float32: dict[str, str] = {}
    for part in planned:
        reasons = (find(part, facts) for find in _REASONS)
        first = next(filter(None, reasons), "")
        if first:
            float32[part.path] = first
    for path, reason in amplified_paths(planned):
        float32.setdefault(path, reason)
    for path in _paths_with_float32_inputs(model, planned, float32):
        float32[path] = "all its inputs are float32"
    return _completed(replace(empty, float32=float32), parts)


def _layers_around(parts: list[Part], outputs: set[int]) -> dict[str, str]:
    """Returns the layers, not models, that directly contain an output layer, each with its path."""
    around: dict[str, str] = {}
    for part in parts:
        if id(part.operation) in outputs and not isinstance(part.parent, keras.Model):
            around.setdefault(part.parent_path, part.path)
    return around


def _paths_with_float32_inputs(
    model: keras.Model, parts: list[Part], float32: dict[str, str]
) -> Iterator[str]:
    """Yields the layers that can follow their inputs and get them from float32 layers alone.

    Nothing is then rounded to 16 bits between two float32 layers, or before the first one.

    Args:
        model: The model.
        parts: Its planned parts, in graph order, nested models before the layers that they feed.
        float32: The parts that are float32 whatever their inputs, by path.
    """
    inputs = keras_internals.graph_tensors(model, "inputs")
    float32_ids = {id(keras_internals.producer_of(tensor)) for tensor in inputs}
    float32_ids |= {id(part.operation) for part in parts if part.path in float32}
    for part in parts:
        if part.path in float32 or part.rule.category != FOLLOWS_INPUTS:
            continue
        if not _gets_float32(part.operation, float32_ids):
            continue
        float32_ids.add(id(part.operation))
        # Operations, and layers with integer or string dtypes, need no entry in the plan.
        if part.is_layer and keras.backend.is_float_dtype(part.operation.compute_dtype):
            yield part.path


def _gets_float32(operation: keras.Operation, float32_ids: set[int]) -> bool:
    """Whether an operation has inputs, and gets all of them in float32, in all its calls."""
    tensors: list[keras.KerasTensor] = []
    for call in keras_internals.calls_of(operation):
        tensors += call.input_tensors
    sources = map(keras_internals.producer_of, tensors)
    return bool(tensors) and all(_is_float32(source, float32_ids) for source in sources)


def _is_float32(source: keras.Operation, float32_ids: set[int]) -> bool:
    """Whether the outputs of an operation are float32; those of a nested model may be."""
    if id(source) in float32_ids:
        return True
    outputs = list(output_operations(source)) if isinstance(source, keras.Model) else []
    return bool(outputs) and all(id(output) in float32_ids for output in outputs)


def extend_plan(plan: Plan, parts: list[Part], keep_float32: Any) -> Plan:
    """Adds what the user selects to a plan that is given."""
    planned = [part for part in parts if part.is_planned]
    float32 = dict.fromkeys(_selected_paths(planned, keep_float32), "selected by keep_float32")
    float32.update(plan.float32)  # with its own reasons
    return _completed(replace(plan, float32=float32), parts)


def _completed(plan: Plan, parts: list[Part]) -> Plan:
    """Adds the wrappers and sublayers of a plan's float32 layers, for the parts of a given model.

    Raises:
        ValueError: If the model has no layer or operation at one of the plan's paths.
    """
    parts = [part for part in parts if part.is_planned]
    known_paths = [part.path for part in parts]
    _check_paths(plan, known_paths)
    float32 = dict(plan.float32)
    for part in reversed(parts):  # a wrapper of a wrapper too
        if part.path in float32 and isinstance(part.parent, WRAPPERS):
            float32.setdefault(part.parent_path, _AROUND.format(path=part.path))
    for part in parts:
        if part.parent_path in float32:
            float32.setdefault(part.path, f"inside {part.parent_path}")
    in_graph_order = {path: float32[path] for path in known_paths if path in float32}
    return replace(plan, float32=in_graph_order)


def _check_paths(plan: Plan, known_paths: list[str]) -> None:
    """Raises an error if a plan names what the model does not have."""
    unknown_paths = sorted(set(plan.float32).difference(known_paths))
    if unknown_paths:
        raise ValueError(
            f"The plan contains {unknown_paths[0]!r}, but the model has no such layer. Keras"
            " numbers unnamed layers across all models: call keras.utils.clear_session() before"
            f" you rebuild a model to restart the numbers. The layers are: {', '.join(known_paths)}"
        )


def _selected_paths(parts: list[Part], selectors: Any) -> set[str]:
    """Returns the paths that `keep_float32` selects."""
    if selectors is None:
        return set()
    is_one = not isinstance(selectors, list | tuple | set)
    selected: set[str] = set()
    for selector in [selectors] if is_one else selectors:
        found = _matching(parts, selector)
        is_condition = callable(selector) and not isinstance(selector, type | keras.Operation)
        if not found and not is_condition:  # which may select none
            name = getattr(selector, "__name__", repr(selector))
            known_paths = ", ".join(part.path for part in parts)
            raise ValueError(
                f"`keep_float32`: no layer matches {name}. The layers are: {known_paths}"
            )
        selected.update(part.path for part in found)
    return selected


def _matching(parts: list[Part], selector: Any) -> list[Part]:
    """Returns the parts that one selector of `keep_float32` selects."""
    if not isinstance(selector, str):
        return list(filter(_condition(selector), parts))
    found = [part for part in parts if fnmatchcase(part.path, selector)]
    return found or [part for part in parts if part.operation.name == selector]


def _condition(selector: Any) -> Callable[[Part], bool]:
    """Returns whether a selector that is not a string selects a part."""
    if isinstance(selector, type):
        return lambda part: isinstance(part.operation, selector)
    if isinstance(selector, keras.Operation):
        return lambda part: part.operation is selector
    if callable(selector):
        return lambda part: part.is_layer and bool(selector(part.operation))
    raise TypeError(
        "`keep_float32` must be a path, pattern, layer, class, function that takes a layer, or a"
        f" list of these. Received: {selector!r}"
    )
