"""Plans which layers and operations stay float32, and why. A plan can be saved, reviewed, edited and applied."""

import json
import os
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import keras

from kmp.backend import is_keras_class, keras_internals
from kmp.conversion.constructor_arguments import obstacles_to_dtypes
from kmp.conversion.model_parts import Part, config_contains_sublayers, parts_of
from kmp.conversion.precision_rules import FOLLOWS_INPUTS, NEEDS_FLOAT32, OpRule, rule_for
from kmp.utils import FLOAT32, FORMATS_16_BIT, atomic_files, validation

Selector = str | type | Callable[[keras.Operation], bool]

_WRAPPERS = (keras.layers.Wrapper, keras.layers.Bidirectional, keras.layers.RNN, keras.layers.StackedRNNCells)

CONVERSION_POLICIES = ("mixed_float16", "mixed_bfloat16", "float16", "bfloat16")

_OUTPUT = "model output: {dtype} would round it to {bits} bits"
_BETWEEN = "all its inputs are float32"
_INSIDE = "inside {path}"
_AROUND = "wraps {path}"
_REQUESTED = "selected by keep_float32"
_STATISTICS = "its statistics are weights, and 16 bits would round their updates away"


@dataclass(frozen=True)
class Plan:
    """The dtype policies of a model's layers and operations.

    Args:
        policy: The dtype policy of everything that is not in `float32`: `"mixed_float16"`, `"mixed_bfloat16"`,
            `"float16"` or `"bfloat16"`.
        float32: Maps the path of each layer or operation that stays float32, as `kmp.audit` shows it, to the reason.
            Its sublayers stay float32 too. May be edited.

    Raises:
        TypeError: If `policy` is not a string, or `float32` is not a dict.
        ValueError: If `policy` is not one of these strings.

    Example:
    >>> plan = Plan("mixed_float16", {"softmax": "selected by keep_float32"})
    >>> plan.policy_of("dense"), plan.policy_of("softmax")
    ('mixed_float16', 'float32')
    """

    policy: str
    float32: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "policy", validation.one_of("policy", self.policy, CONVERSION_POLICIES))
        if not isinstance(self.float32, dict):
            raise TypeError(f"`float32` must map paths to reasons. Received: float32={self.float32!r}")

    @property
    def compute_dtype(self) -> str:
        """The compute dtype of everything that is not in `float32`."""
        return self.policy.removeprefix("mixed_")

    def policy_of(self, path: str) -> str:
        """Returns the dtype policy at a path: float32 if the path or one of its parents is in `float32`."""
        names = path.split("/")
        path_and_parents = ("/".join(names[:count]) for count in range(len(names), 0, -1))
        return FLOAT32.name if any(prefix in self.float32 for prefix in path_and_parents) else self.policy

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
            ValueError: If the file is not a valid plan, or `path` is empty or a URL.
        """
        file = validation.local_path("path", path)
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(content, dict) or set(content) != {"policy", "float32"}:
                raise ValueError("it must have exactly the keys 'policy' and 'float32'")
            plan = cls(**content)
            if not all(isinstance(reason, str) for reason in plan.float32.values()):
                raise ValueError("`float32` must map paths to reasons")
        except (ValueError, TypeError) as error:
            raise ValueError(f"{file} is not a valid plan: {error}") from error
        return plan


def make_plan(model: keras.Model, policy: str, keep_float32: Any = None, float32_layers: bool = True) -> Plan:
    """Returns the plan for a model according to kmp's precision rules.

    Args:
        model: A built model.
        policy: See `Plan`.
        keep_float32: What stays float32 in addition to the rules: a path, pattern or name, a layer or operation, a
            class, a predicate on layers, or a list of these.
        float32_layers: Whether kmp's rules for float32 layers apply, in addition to `keep_float32`.

    Raises:
        TypeError: If `keep_float32` has another type.
        ValueError: If a pattern, class or layer in it matches no layer of the model, or `policy` is invalid.
    """
    plan = Plan(policy)
    parts = configurable_parts(model)
    float32 = dict.fromkeys(_selected_paths(parts, keep_float32), _REQUESTED)
    float32 |= obstacles_to_dtypes(parts)
    if float32_layers:
        rules = {part.path: rule_for(part, plan.compute_dtype) for part in parts}
        if not plan.policy.startswith("mixed_"):
            statistics = keras.layers.BatchNormalization
            float32 |= {part.path: _STATISTICS for part in parts if isinstance(part.operation, statistics)}
        needs_float32 = {path: rule.reason for path, rule in rules.items() if rule.category == NEEDS_FLOAT32}
        outputs = {id(operation) for operation in output_operations(model)}
        # The rightmost reason of a path applies.
        float32 = _with_tied_weights(parts, outputs, plan.compute_dtype) | needs_float32 | float32
        _add_followers(model, parts, rules, float32)
    _add_wrappers_and_sublayers(parts, float32)
    return replace(plan, float32={part.path: float32[part.path] for part in parts if part.path in float32})


def complete_plan(plan: Plan, model: keras.Model) -> Plan:
    """Adds the wrappers and sublayers of a plan's float32 layers, for a given model.

    Raises:
        ValueError: If the model has no layer or operation at one of the plan's paths.
    """
    parts = configurable_parts(model)
    known_paths = [part.path for part in parts]
    unknown_paths = sorted(set(plan.float32) - set(known_paths))
    if unknown_paths:
        raise ValueError(
            f"The plan contains {unknown_paths[0]!r}, but the model has no such layer. Keras numbers unnamed layers "
            "across all models: call keras.utils.clear_session() before you rebuild a model to restart the numbers. "
            f"The layers are: {', '.join(known_paths)}"
        )
    float32 = dict(plan.float32)
    _add_wrappers_and_sublayers(parts, float32)
    return replace(plan, float32=float32)


def configurable_parts(model: keras.Model) -> list[Part]:
    """Returns the layers and operations whose dtypes can be set.

    Excludes input layers, operations created in custom code, and sublayers that Keras' own layers create: these use
    their parent's policy.
    """
    parts = parts_of(model)
    unreachable = {id(part.operation) for part in unreachable_operations(parts)}
    internal: set[int] = set()
    configurable = []
    for part in parts:
        if id(part.parent) in internal or _creates_its_sublayers(part.parent):
            internal.add(id(part.operation))
        elif not isinstance(part.operation, keras.layers.InputLayer) and id(part.operation) not in unreachable:
            configurable.append(part)
    return configurable


def unreachable_operations(parts: list[Part]) -> list[Part]:
    """Returns the graph operations that custom classes create in code: no config contains them."""
    operations = [part for part in parts if not part.is_layer]
    parents = {id(part.parent): part.parent for part in operations}
    built_in_code = {key for key, parent in parents.items() if not config_contains_sublayers(parent)}
    return [part for part in operations if id(part.parent) in built_in_code]


def _creates_its_sublayers(layer: keras.Layer) -> bool:
    takes_sublayers = (keras.Model, *_WRAPPERS)
    return is_keras_class(type(layer)) and not isinstance(layer, takes_sublayers)


def _add_wrappers_and_sublayers(parts: list[Part], float32: dict[str, str]) -> None:
    for part in reversed(parts):
        if part.path in float32 and isinstance(part.parent, _WRAPPERS):
            float32.setdefault(part.path.rpartition("/")[0], _AROUND.format(path=part.path))
    for part in parts:
        parent_path = part.path.rpartition("/")[0]
        if parent_path in float32:
            float32.setdefault(part.path, _INSIDE.format(path=parent_path))


def _selected_paths(parts: list[Part], selectors: Any) -> list[str]:
    if selectors is None:
        return []
    selected: list[str] = []
    for selector in selectors if isinstance(selectors, list | tuple | set) else [selectors]:
        matches = _predicate_of(selector)
        paths = [part.path for part in parts if matches(part)] or [
            part.path for part in parts if isinstance(selector, str) and part.operation.name == selector
        ]
        if not paths and isinstance(selector, str | type | keras.Operation):
            selector_name = getattr(selector, "__name__", repr(selector))
            known_paths = ", ".join(part.path for part in parts)
            raise ValueError(f"`keep_float32`: no layer matches {selector_name}. The layers are: {known_paths}")
        selected += paths
    return selected


def _predicate_of(selector: Selector) -> Callable[[Part], bool]:
    if isinstance(selector, str):
        return lambda part: fnmatchcase(part.path, selector)
    if isinstance(selector, type):
        return lambda part: isinstance(part.operation, selector)
    if isinstance(selector, keras.Operation):
        return lambda part: part.operation is selector
    if callable(selector):
        return lambda part: part.is_layer and bool(selector(part.operation))
    raise TypeError(
        "`keep_float32` must be a path, pattern, layer, class, function that takes a layer, or a list of these. "
        f"Received: {selector!r}"
    )


def output_operations(model: keras.Model) -> Iterable[keras.Operation]:
    """Yields the operations that produce a model's outputs; none for a subclassed model, which Keras does not trace."""
    for tensor in keras_internals.graph_tensors(model, "outputs"):
        operation = keras_internals.producer_of(tensor)
        nested = list(output_operations(operation)) if isinstance(operation, keras.Model) else []
        yield from nested or [operation]


def _with_tied_weights(parts: list[Part], outputs: AbstractSet[int], dtype: str) -> dict[str, str]:
    """Returns the output operations, with the reason, by path; and the layers that these are sublayers of."""
    reason = _OUTPUT.format(dtype=dtype, bits=FORMATS_16_BIT[dtype].fraction_bits + 1)
    float32 = {part.path: reason for part in parts if id(part.operation) in outputs}
    for part in parts:
        if part.path in float32 and not isinstance(part.parent, keras.Model):
            float32.setdefault(part.path.rpartition("/")[0], _AROUND.format(path=part.path))
    return float32


def _add_followers(model: keras.Model, parts: list[Part], rules: dict[str, OpRule], float32: dict[str, str]) -> None:
    """Adds layers that follow their inputs if these are all float32.

    So nothing is rounded to float16 between two float32 layers, or before the first one.
    """
    inputs = {id(keras_internals.producer_of(tensor)) for tensor in keras_internals.graph_tensors(model, "inputs")}
    float32_ids = inputs | {id(part.operation) for part in parts if part.path in float32}

    def is_float32(source: keras.Operation) -> bool:
        outputs = list(output_operations(source)) if isinstance(source, keras.Model) else []
        return id(source) in float32_ids or (bool(outputs) and all(id(output) in float32_ids for output in outputs))

    for part in parts:  # in graph order, nested models before the layers that they feed
        sources = _sources(part.operation)
        if rules[part.path].category == FOLLOWS_INPUTS and sources and all(map(is_float32, sources)):
            float32_ids.add(id(part.operation))
            # Operations, and layers with integer or string dtypes, need no entry in the plan.
            if part.is_layer and keras.backend.is_float_dtype(part.operation.compute_dtype):
                float32.setdefault(part.path, _BETWEEN)


def _sources(operation: keras.Operation) -> list[keras.Operation]:
    return [
        keras_internals.producer_of(tensor)
        for node in keras_internals.calls_of(operation)
        for tensor in node.input_tensors
    ]
