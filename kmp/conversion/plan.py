"""Decides which layers and operations stay float32, and why. A plan can be saved, reviewed, edited and applied."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import keras

from kmp.backend import keras_internals
from kmp.conversion.model_parts import WRAPPERS, Part, output_operations
from kmp.conversion.op_rule import FOLLOWS_INPUTS, NEEDS_FLOAT32
from kmp.utils import FLOAT32, FORMATS_16_BIT, atomic_files, path_and_parents, validation

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
        object.__setattr__(
            self, "policy", validation.one_of("policy", self.policy, CONVERSION_POLICIES)
        )
        is_dict = isinstance(self.float32, dict)
        if not is_dict or not all(
            isinstance(text, str) for item in self.float32.items() for text in item
        ):
            raise TypeError(
                f"`float32` must map paths to reasons. Received: float32={self.float32!r}"
            )

    @property
    def compute_dtype(self) -> str:
        """The compute dtype of everything that is not in `float32`."""
        return self.policy.removeprefix("mixed_")

    def policy_of(self, path: str) -> str:
        """Returns the dtype policy at a path: float32 if the path or one of its parents is in `float32`."""
        return (
            FLOAT32.name
            if any(each in self.float32 for each in path_and_parents(path))
            else self.policy
        )

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
    """Returns the pairs of a JSON object as a dict. JSON itself would keep only the last value of a repeated key."""
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(
            f"the key {next(name for name in names if names.count(name) > 1)!r} is repeated"
        )
    return result


def make_plan(
    model: keras.Model,
    parts: list[Part],
    plan: Plan,
    keep_float32: Any = None,
    float32_layers: bool = True,
) -> Plan:
    """Fills an empty plan according to kmp's precision rules; the other arguments are those of `convert`."""
    parts = [part for part in parts if part.is_planned]
    requested = _selected_paths(parts, keep_float32)
    outputs = {id(operation) for operation in output_operations(model)} if float32_layers else set()
    bits = FORMATS_16_BIT[plan.compute_dtype].fraction_bits + 1
    output_of: dict[
        str, str
    ] = {}  # by the path of a layer that uses an output layer, such as a tied embedding
    for part in parts:
        if id(part.operation) in outputs and not isinstance(part.parent, keras.Model):
            output_of.setdefault(part.parent_path, part.path)

    def reasons(part: Part) -> Iterator[str]:
        """Yields why a part stays float32, whatever its inputs; the first reason applies."""
        if part.obstacle:
            yield part.obstacle
        if part.path in requested:
            yield "selected by keep_float32"
        if float32_layers and part.rule.category == NEEDS_FLOAT32:
            yield part.rule.reason
        if id(part.operation) in outputs:
            yield f"model output: {plan.compute_dtype} would round it to {bits} bits"
        if part.path in output_of:
            yield _AROUND.format(path=output_of[part.path])

    float32 = {part.path: reason for part in parts if (reason := next(reasons(part), ""))}

    # A layer that follows its inputs is float32 if these all are: nothing is rounded to float16
    # between two float32 layers, or before the first one.
    inputs = map(keras_internals.producer_of, keras_internals.graph_tensors(model, "inputs"))
    float32_ids = {id(part.operation) for part in parts if part.path in float32} | set(
        map(id, inputs)
    )

    def is_float32(source: keras.Operation) -> bool:
        outputs = list(output_operations(source)) if isinstance(source, keras.Model) else []
        return id(source) in float32_ids or (
            bool(outputs) and all(id(output) in float32_ids for output in outputs)
        )

    for part in (
        parts if float32_layers else ()
    ):  # in graph order, nested models before the layers that they feed
        if part.path in float32 or part.rule.category != FOLLOWS_INPUTS:
            continue
        calls = keras_internals.calls_of(part.operation)
        sources = [
            keras_internals.producer_of(tensor) for call in calls for tensor in call.input_tensors
        ]
        if sources and all(map(is_float32, sources)):
            float32_ids.add(id(part.operation))
            # Operations, and layers with integer or string dtypes, need no entry in the plan.
            if part.is_layer and keras.backend.is_float_dtype(part.operation.compute_dtype):
                float32[part.path] = "all its inputs are float32"
    return complete_plan(replace(plan, float32=float32), parts)


def complete_plan(plan: Plan, parts: list[Part]) -> Plan:
    """Adds the wrappers and sublayers of a plan's float32 layers, for the parts of a given model.

    Raises:
        ValueError: If the model has no layer or operation at one of the plan's paths.
    """
    parts = [part for part in parts if part.is_planned]
    known_paths = [part.path for part in parts]
    unknown_paths = sorted(set(plan.float32) - set(known_paths))
    if unknown_paths:
        raise ValueError(
            f"The plan contains {unknown_paths[0]!r}, but the model has no such layer. Keras"
            " numbers unnamed layers across all models: call keras.utils.clear_session() before"
            f" you rebuild a model to restart the numbers. The layers are: {', '.join(known_paths)}"
        )
    float32 = dict(plan.float32)
    for part in reversed(parts):
        if part.path in float32 and isinstance(part.parent, WRAPPERS):
            float32.setdefault(part.parent_path, _AROUND.format(path=part.path))
    for part in parts:
        if part.parent_path in float32:
            float32.setdefault(part.path, f"inside {part.parent_path}")
    return replace(plan, float32={path: float32[path] for path in known_paths if path in float32})


def _selected_paths(parts: list[Part], selectors: Any) -> set[str]:
    """Returns the paths that `keep_float32` selects."""
    selected: set[str] = set()
    if selectors is None:
        return selected
    for selector in selectors if isinstance(selectors, list | tuple | set) else [selectors]:
        if isinstance(selector, str):
            found = [part for part in parts if fnmatchcase(part.path, selector)]
            found = found or [part for part in parts if part.operation.name == selector]
        elif isinstance(selector, type):
            found = [part for part in parts if isinstance(part.operation, selector)]
        elif isinstance(selector, keras.Operation):
            found = [part for part in parts if part.operation is selector]
        elif callable(selector):
            selected |= {part.path for part in parts if part.is_layer and selector(part.operation)}
            continue  # it may select none
        else:
            raise TypeError(
                "`keep_float32` must be a path, pattern, layer, class, function that takes a"
                f" layer, or a list of these. Received: {selector!r}"
            )
        if not found:
            name, known_paths = (
                getattr(selector, "__name__", repr(selector)),
                ", ".join(part.path for part in parts),
            )
            raise ValueError(
                f"`keep_float32`: no layer matches {name}. The layers are: {known_paths}"
            )
        selected |= {part.path for part in found}
    return selected
