"""Which parts of a model stay float32, and why: data that can be saved, reviewed, edited and applied."""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import keras

from kmp.backend import is_keras_class, keras_internals
from kmp.conversion.model_parts import Part, parts_of
from kmp.conversion.precision_rules import FOLLOWS_INPUTS, NEEDS_FLOAT32, OpRule, rule_for
from kmp.utils import FLOAT32, atomic_files, validation

Choice = str | type | Callable[[keras.Operation], bool]

_WRAPPERS = (keras.layers.Wrapper, keras.layers.Bidirectional, keras.layers.RNN, keras.layers.StackedRNNCells)

MIXED = ("mixed_float16", "mixed_bfloat16", "float16", "bfloat16")

_OUTPUT = "the model's output: float16 rounds it to 11 bits"
_BETWEEN = "all its inputs are float32"
_INSIDE = "inside {path}"
_AROUND = "around {path}"
_ASKED = "asked for"
_STATISTICS = "its statistics are weights, which 16 bits would round away"
NO_DTYPE = "its config has no dtype, so it cannot be told one"


@dataclass(frozen=True)
class Plan:
    """What a model's parts compute in.

    Args:
        policy: The dtype policy of all parts but those in `float32`: `"mixed_float16"`, `"mixed_bfloat16"`,
            `"float16"` or `"bfloat16"`.
        float32: For each part that stays float32, with what is inside, its path as `kmp.audit` shows it, and the
            reason. May be edited.

    Raises:
        TypeError: If `policy` is not a string.
        ValueError: If it is another.

    Example:
    >>> plan = Plan("mixed_float16", {"softmax": "asked for"})
    >>> plan.policy_of("dense"), plan.policy_of("softmax")
    ('mixed_float16', 'float32')
    """

    policy: str
    float32: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        validation.one_of("policy", self.policy, MIXED)
        if not isinstance(self.float32, dict):
            raise TypeError(f"`float32` must map paths to reasons. Received: float32={self.float32!r}")

    @property
    def compute_dtype(self) -> str:
        """What all parts but those in `float32` compute in."""
        return self.policy.removeprefix("mixed_")

    def policy_of(self, path: str) -> str:
        """Returns the dtype policy of the part at a path: float32 also inside of what is."""
        names = path.split("/")
        outward = ("/".join(names[:count]) for count in range(len(names), 0, -1))
        return FLOAT32.name if any(one in self.float32 for one in outward) else self.policy

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as JSON has it."""
        return {"policy": self.policy, "float32": dict(self.float32)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to a JSON file.

        Raises:
            OSError: If it cannot be written.
        """
        atomic_files.write_json(Path(path), self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Plan":
        """Reads a plan that `save` wrote, or somebody edited.

        Raises:
            OSError: If the file cannot be read.
            ValueError: If it holds no plan.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if not isinstance(content, dict) or set(content) != {"policy", "float32"}:
                raise ValueError("it must have the keys 'policy' and 'float32', and no other")
            plan = cls(**content)
            if not all(isinstance(reason, str) for reason in plan.float32.values()):
                raise ValueError("`float32` must map paths to reasons")
        except (ValueError, TypeError) as error:
            raise ValueError(f"{os.fspath(path)} holds no plan: {error}") from error
        return plan


def planned(model: keras.Model, policy: str, keep_float32: Any = None, float32_layers: bool = True) -> Plan:
    """Returns the plan that kmp's rules make for a model.

    Args:
        model: A model that is built.
        policy: See `Plan`.
        keep_float32: What is to stay float32 beside what the rules say: a path, pattern or name, a layer or operation,
            a class, a predicate on layers, or a list of these.
        float32_layers: Whether the rules apply; otherwise only `keep_float32` does.

    Raises:
        TypeError: If `keep_float32` holds something else.
        ValueError: If a pattern or class in it matches no part of the model, or `policy` is not one of `Plan`'s.
    """
    plan = Plan(policy)
    parts = configurable_parts(model)
    float32 = dict.fromkeys(_chosen(parts, keep_float32), _ASKED)
    float32 |= {part.path: NO_DTYPE for part in parts if not takes_dtype(part.operation)}
    if float32_layers:
        rules = {part.path: rule_for(part) for part in parts}
        if not policy.startswith("mixed_"):
            statistics = keras.layers.BatchNormalization
            float32 |= {part.path: _STATISTICS for part in parts if isinstance(part.operation, statistics)}
        endangered = {path: rule.reason for path, rule in rules.items() if rule.category == NEEDS_FLOAT32}
        at_end = {id(operation) for operation in _outputs(model)}
        float32 = {part.path: _OUTPUT for part in parts if id(part.operation) in at_end} | endangered | float32
        _spread(model, parts, rules, float32)
    _widen(parts, float32)
    return replace(plan, float32={part.path: float32[part.path] for part in parts if part.path in float32})


def completed(plan: Plan, model: keras.Model) -> Plan:
    """Returns a plan with the wrappers of what it names, and all that is inside, for a model that has it all.

    Raises:
        ValueError: If the model has no part at one of its paths.
    """
    parts = configurable_parts(model)
    known = [part.path for part in parts]
    unknown = sorted(set(plan.float32) - set(known))
    if unknown:
        raise ValueError(
            f"The plan names {unknown[0]!r}, and there is no such layer. Keras numbers what has no name of its own; "
            "keras.utils.clear_session() before a model is made anew has it count from the start. "
            f"The layers are: {', '.join(known)}"
        )
    float32 = dict(plan.float32)
    _widen(parts, float32)
    return replace(plan, float32=float32)


def takes_dtype(operation: keras.Operation) -> bool:
    """Whether an operation, made from its config, can be told a dtype. Those of graphs follow their inputs."""
    if not isinstance(operation, keras.Layer) or isinstance(operation, keras.Model):
        return True
    try:
        return is_keras_class(type(operation)) or "dtype" in operation.get_config()
    except Exception:  # it may raise what it likes, and is told of when the model is made anew
        return True


def configurable_parts(model: keras.Model) -> list[Part]:
    """Returns the parts whose dtypes can be chosen: those that Keras' own layers make inside take the layer's."""
    parts = parts_of(model)
    untold = {id(part.operation) for part in unreachable_operations(parts)}
    made_inside: set[int] = set()
    told = []
    for part in parts:
        if id(part.holder) in made_inside or _makes_its_own(part.holder):
            made_inside.add(id(part.operation))
        elif not isinstance(part.operation, keras.layers.InputLayer) and id(part.operation) not in untold:
            told.append(part)
    return told


def unreachable_operations(parts: list[Part]) -> list[Part]:
    """Returns the operations of graphs that classes make in their own code: no config holds them."""
    operations = [part for part in parts if not part.is_layer]
    holders = {id(part.holder): part.holder for part in operations}
    in_code = {key for key, holder in holders.items() if not _has_its_graph_in_its_config(holder)}
    return [part for part in operations if id(part.holder) in in_code]


def _has_its_graph_in_its_config(holder: keras.Model) -> bool:
    try:
        return is_keras_class(type(holder)) or "layers" in holder.get_config()
    except Exception:  # as above
        return False


def _makes_its_own(holder: keras.Layer) -> bool:
    given = (keras.Model, *_WRAPPERS)
    return is_keras_class(type(holder)) and not isinstance(holder, given)


def _widen(parts: list[Part], float32: dict[str, str]) -> None:
    """Adds wrappers of what is float32, and all that is inside of what is."""
    for part in reversed(parts):
        if part.path in float32 and isinstance(part.holder, _WRAPPERS):
            float32.setdefault(part.path.rpartition("/")[0], _AROUND.format(path=part.path))
    for part in parts:
        around = part.path.rpartition("/")[0]
        if around in float32:
            float32.setdefault(part.path, _INSIDE.format(path=around))


def _chosen(parts: list[Part], choices: Any) -> list[str]:
    if choices is None:
        return []
    found: list[str] = []
    for choice in choices if isinstance(choices, list | tuple | set) else [choices]:
        fits = _fits(choice)
        paths = [part.path for part in parts if fits(part)] or [
            part.path for part in parts if isinstance(choice, str) and part.operation.name == choice
        ]
        if not paths and isinstance(choice, str | type | keras.Operation):
            what = getattr(choice, "__name__", repr(choice))
            known = ", ".join(part.path for part in parts)
            raise ValueError(f"`keep_float32`: no layer matches {what}. The layers are: {known}")
        found += paths
    return found


def _fits(choice: Choice) -> Callable[[Part], bool]:
    if isinstance(choice, str):
        return lambda part: fnmatchcase(part.path, choice)
    if isinstance(choice, type):
        return lambda part: isinstance(part.operation, choice)
    if isinstance(choice, keras.Operation):
        return lambda part: part.operation is choice
    if callable(choice):
        return lambda part: part.is_layer and bool(choice(part.operation))
    raise TypeError(
        "`keep_float32` must be a path or pattern, a layer, a class, a function of a layer, or a list of these. "
        f"Received: {choice!r}"
    )


def _outputs(model: keras.Model) -> Iterable[keras.Operation]:
    """Yields what makes the outputs of a model, as far as Keras knows it: of a subclassed model it does not."""
    for tensor in keras.tree.flatten(getattr(model, "outputs", None) or []):
        operation = keras_internals.producer_of(tensor)
        nested = list(_outputs(operation)) if isinstance(operation, keras.Model) else []
        yield from nested or [operation]


def _spread(model: keras.Model, parts: list[Part], rules: dict[str, OpRule], float32: dict[str, str]) -> None:
    """Adds what only follows float32 parts, so that nothing is rounded between two of them, or before the first."""
    tensors = keras.tree.flatten(getattr(model, "inputs", None) or [])
    inputs = {id(keras_internals.producer_of(tensor)) for tensor in tensors}
    wide = inputs | {id(part.operation) for part in parts if part.path in float32}

    def is_wide(source: keras.Operation) -> bool:
        ends = list(_outputs(source)) if isinstance(source, keras.Model) else []
        return id(source) in wide or (bool(ends) and all(id(end) in wide for end in ends))

    for part in parts:  # graphs are in their order, and nested ones come before what they feed
        sources = _sources(part.operation)
        if rules[part.path].category == FOLLOWS_INPUTS and sources and all(map(is_wide, sources)):
            wide.add(id(part.operation))
            if part.is_layer and keras.backend.is_float_dtype(part.operation.compute_dtype):  # others do by themselves
                float32.setdefault(part.path, _BETWEEN)


def _sources(operation: keras.Operation) -> list[keras.Operation]:
    return [
        keras_internals.producer_of(tensor)
        for node in keras_internals.calls_of(operation)
        for tensor in node.input_tensors
    ]
