"""Which layers and operations of a model need float32 in place of a 16-bit policy, and why.

`kmp.numerics` says what functions do to numbers, and `kmp.layers.float32_rules` which classes of
layers need float32 for another reason. Layers that compute critical steps in float32 themselves,
such as `BatchNormalization`, may run in 16 bits.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import keras

from kmp.backend.keras_functions import function_of
from kmp.backend.keras_internals import is_passthrough, sublayers
from kmp.backend.layer_graph import calls_in
from kmp.conversion.keras_graph import ModelGraph, graph_of_model
from kmp.enabling import exact_indices
from kmp.layers.float32 import Float32Operation
from kmp.layers.float32_rules import Moment, float32_rule
from kmp.numerics import Needs, Problem, Value, needing_float32
from kmp.utils.float_formats import FORMATS_16_BIT, FloatFormat

RUNS_IN_16_BITS = "16 bits"
FOLLOWS_INPUTS = "follows its inputs"
NEEDS_FLOAT32 = "float32"
_MOST_REASONS = 3
NOT_EXAMINED = "kmp cannot look into its code"


@dataclass(frozen=True)
class Rule:
    """What a layer or operation computes in.

    Args:
        category: `RUNS_IN_16_BITS`, `FOLLOWS_INPUTS` (safe in the dtype of its inputs) or
            `NEEDS_FLOAT32`.
        reason: Why, as shown to users; may be empty.
        source: Where that can be looked up.
        unknown: What depends on the range of the data; empty if nothing does.
        amplified_by: The `id` of the operation that amplifies its rounding errors.
    """

    category: str = FOLLOWS_INPUTS
    reason: str = ""
    source: str = ""
    unknown: str = ""
    amplified_by: Hashable | None = None

    def category_in(self, dtype: str) -> str:
        """Returns the category as users see it, who ask for one of the 16-bit dtypes."""
        return dtype if self.category == RUNS_IN_16_BITS else self.category


@dataclass
class Precision:
    """The rules for one model.

    Args:
        policy: The policy of 16 bits.
        graph: What the model does to numbers.
        needs: What needs float32 by that.
        float_inputs: The name of an `Input` of floats that a layer gets, by the `id` of the layer.
    """

    policy: keras.DTypePolicy
    graph: ModelGraph = field(default_factory=ModelGraph)
    needs: Needs = field(default_factory=Needs)
    float_inputs: Mapping[int, str] = field(default_factory=dict)

    def rule_of(self, operation: keras.Operation) -> Rule:
        """Returns the rule for a layer or operation."""
        number_format, key = FORMATS_16_BIT[self.policy.compute_dtype], id(operation)
        rule = _rule_of_class(operation, self.policy, self.float_inputs)
        if rule is not None:
            return rule
        if key in self.needs.own:
            problems = self.needs.own[key]
            reason = "; ".join(reasons_of(problems, number_format)[:_MOST_REASONS])
            return Rule(NEEDS_FLOAT32, reason, problems[0].source)
        category, reason, source, unknown = FOLLOWS_INPUTS, "", "", ""
        if key in self.graph.with_products or getattr(operation, "weights", None):
            category = RUNS_IN_16_BITS
        function = function_of(operation)
        if function is not None and function.in_16_bits:
            reason, source = function.in_16_bits, function.source
        multiplies = any(key in each.units[:1] for each in self.needs.unknown)
        reasons = ["products of large values overflow float16"] if multiplies else []
        reasons += reasons_of(self.needs.left.get(key, []), number_format)
        unknown = "; ".join(reasons[:_MOST_REASONS])
        if key in self.needs.left:
            reason, source = f"with some data: {unknown}", "kmp"
        elif key in self.graph.not_traced:
            unknown, reason, source = NOT_EXAMINED, NOT_EXAMINED, "kmp"
            if _is_function(operation):
                category = NEEDS_FLOAT32
        return Rule(category, reason, source, unknown, self.needs.amplified.get(key))

    @property
    def notes(self) -> list[str]:
        """What a model of one's own computes beside its layers, and no policy sets to float32."""
        number_format = FORMATS_16_BIT[self.policy.compute_dtype]
        reasons = reasons_of(self.needs.left.get(None, []), number_format)
        return [f"The code of the model needs float32: {each}." for each in reasons]


def reasons_of(problems: Sequence[Problem], number_format: FloatFormat) -> list[str]:
    """Returns the different reasons of problems, the first of each line of code."""
    found: dict[str, str] = {}
    for problem in sorted(problems, key=lambda each: not each.is_certain):
        found.setdefault(problem.node.place(), problem.reason(number_format))
    return list(found.values())


def precision_of(
    model: keras.Model, policy: str, measured: Mapping[int, Value] = MappingProxyType({})
) -> Precision:
    """Returns which layers and operations of a model need float32.

    Args:
        model: A built model.
        policy: A 16-bit policy.
        measured: As in `graph_of_model`.
    """
    dtype_policy = keras.DTypePolicy(policy)
    graph = graph_of_model(model, policy, measured)
    float_inputs = _float_inputs(model)
    by_key = {id(each): each for each in sublayers(model)}
    by_class = {
        key
        for key, layer in by_key.items()
        if not is_passthrough(layer)
        and _rule_of_class(layer, dtype_policy, float_inputs) is not None
    }

    functions = {id(each) for each in graph.operations if _is_function(each)}
    float32 = by_class | (graph.not_traced & functions)
    number_format = FORMATS_16_BIT[dtype_policy.compute_dtype]
    needs = needing_float32(graph.nodes, number_format, float32, graph.with_products)
    return Precision(dtype_policy, graph, needs, float_inputs)


def _is_function(operation: keras.Operation) -> bool:
    """Whether an operation is no layer, or one that is made for a function."""
    return isinstance(operation, keras.layers.Lambda) or not isinstance(operation, keras.Layer)


def _rule_of_class(
    operation: keras.Operation, policy: keras.DTypePolicy, float_inputs: Mapping[int, str]
) -> Rule | None:
    """Returns the rule by the class of a layer or operation, if that needs float32."""
    if isinstance(operation, Float32Operation):
        reason = "always computes in float32, whatever the policy"
        return Rule(NEEDS_FLOAT32, reason, "kmp.layers")
    if not isinstance(operation, keras.Layer):
        return None
    needed = float32_rule(operation, policy, Moment.CONVERSION)
    if needed is not None:
        return Rule(NEEDS_FLOAT32, needed.reason(policy.compute_dtype), needed.source)
    if id(operation) not in float_inputs:
        return None
    return _rule_of_float_indices(operation, float_inputs[id(operation)], policy.compute_dtype)


def _rule_of_float_indices(layer: keras.Layer, input_name: str, dtype: str) -> Rule | None:
    """Returns the rule for a layer that may look up rows by an `Input` of floats.

    The layer would round the indices. Look-up layers themselves and functional models do not cast
    their arguments to their compute dtype.
    """
    rows = max(map(exact_indices.rows_of, sublayers(layer)))
    casts_no_arguments = exact_indices.rows_of(layer) or is_passthrough(layer)
    if casts_no_arguments or not exact_indices.rounds_indices(rows, dtype):
        return None
    looked_up = f"{rows} rows" if rows < math.inf else "any integer"
    reason = (
        f"it looks up {looked_up} and gets input {input_name!r} as floats: declare"
        f" keras.Input(..., name={input_name!r}, dtype='int32') if it holds the indices"
    )
    return Rule(NEEDS_FLOAT32, reason, "Keras' source")


def _float_inputs(model: keras.Model) -> dict[int, str]:
    """Returns the name of an `Input` of floats that a layer gets, by the `id` of the layer.

    It may be that of a nested model, also of one that the code of a model calls.
    """
    found: dict[int, str] = {}
    for each in sublayers(model):
        for call in calls_in(each).calls:
            for source in call.sources.values():
                is_float = keras.backend.is_float_dtype(source.tensor.dtype)
                if source.call.is_input and is_float:
                    found.setdefault(id(call.operation), source.call.operation.name)
    return found
