"""Counts the float32 bytes of a training step, and finds out which layers move them, and why."""

import contextlib
import enum
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from kmp.backend import keras_internals, xla
from kmp.backend.compiled_parts import in_step
from kmp.backend.keras_internals import is_passthrough, sublayers
from kmp.backend.state_rollback import state_restored
from kmp.backend.thread_overrides import own_method
from kmp.layers.float32_rules import Moment, float32_rule
from kmp.traffic import Traffic, traffic_of
from kmp.utils.float_formats import DTYPES_16_BIT, computing_format

_BATCH_SIZE = 32  # of a model that takes any
OUTSIDE = "operations outside layers"
_MOST_CLASSES = 5
_MOST_LAYERS = 3
_SCOPE = "kmp_layer_"
_NUMBER = re.compile(rf"(?:^|/){_SCOPE}(\d+)(?=$|[/_])")  # TensorFlow adds `_1` to one of a name


@dataclass(frozen=True)
class Float32Cause:
    """Why layers of a class move float32 in a model that computes in 16 bits.

    Args:
        class_name: The class of the layers.
        reason: Why, as shown to users.
        share: The share of all bytes that these are, from 0 to 1.
        layers: The paths of the layers.
    """

    class_name: str
    reason: str
    share: float
    layers: tuple[str, ...]

    def __str__(self) -> str:
        listed = ", ".join(self.layers[:_MOST_LAYERS])
        more = len(self.layers) - _MOST_LAYERS
        return (
            f"{self.class_name} {self.share:.0%}: {self.reason}"
            f" ({listed}{f' and {more} more' if more > 0 else ''})"
        )


@dataclass(frozen=True)
class StepTraffic:
    """The float32 part of the bytes of a forward and backward pass in graph mode on a GPU.

    Counted in TensorFlow's graph: each operation reads its inputs and writes its outputs once.

    Args:
        float32_share: The share of the bytes that is float32, from 0 to 1.
        by_class: The share of each class of layers, the largest first; their sum is
            `float32_share`.
        batch_size: The size of the batch that was assumed.
        causes: Why the layers of these classes move float32, the largest share first.

    Example:
    >>> import keras, kmp
    >>> with kmp.enable():
    ...     layers = [keras.layers.Dense(64), keras.layers.Dense(2, dtype="float32")]
    ...     model = keras.Sequential([keras.Input((64,)), *layers])
    >>> print(kmp.audit(model).traffic)
    54% of the bytes of a forward and backward pass (batch size 32) are float32: Dense 54%.
    """

    float32_share: float
    by_class: dict[str, float]
    batch_size: int
    causes: tuple[Float32Cause, ...] = ()

    def __str__(self) -> str:
        largest = list(self.by_class.items())[:_MOST_CLASSES]
        listed = ", ".join(f"{name} {share:.0%}" for name, share in largest if share >= 0.005)
        return (
            f"{self.float32_share:.0%} of the bytes of a forward and backward pass "
            f"(batch size {self.batch_size}) are float32{': ' if listed else ''}{listed}."
        )

    @property
    def largest_causes(self) -> list[str]:
        """The causes of the largest shares, as text."""
        return [f"  {each}" for each in self.causes[:_MOST_CLASSES] if each.share >= 0.005]


def step_traffic(model: keras.Model) -> StepTraffic | None:
    """Returns the float32 part of the bytes that the forward and backward pass of a model move.

    Traces both in a graph that is not run, so no variable changes.

    Returns:
        `None` if the model is no graph of layers with inputs of known shapes, has nothing to train,
        or cannot be traced.
    """
    inputs = keras_internals.graph_tensors(model, "inputs")
    has_unknown_shape = any(None in tensor.shape[1:] for tensor in inputs)
    if not inputs or has_unknown_shape or not model.trainable_variables:
        return None
    batch_size = inputs[0].shape[0] or _BATCH_SIZE
    try:
        by_layer = _traced(model, batch_size)
    except Exception:  # the code of layers may raise anything, and the audit is complete without
        return None
    total = by_layer.traffic.bytes
    if not total:
        return None
    by_class: dict[str, float] = {}
    for (layer, _), bytes_of_layer in by_layer.float32_bytes.items():
        name = OUTSIDE if layer is None else type(layer).__name__
        by_class[name] = by_class.get(name, 0.0) + bytes_of_layer / total
    return StepTraffic(
        by_layer.traffic.float32_bytes / total,
        dict(sorted(by_class.items(), key=lambda item: -item[1])),
        batch_size,
        _causes(by_layer, computing_format(keras_internals.compute_dtypes(model)).name),
    )


def _traced(model: keras.Model, batch_size: int) -> "_ByLayer":
    # A Sequential model has no `input` before it was called.
    structure = model.inputs[0] if isinstance(model, keras.Sequential) else model.input

    def spec(tensor: keras.KerasTensor) -> tf.TensorSpec:
        return tf.TensorSpec((tensor.shape[0] or batch_size, *tensor.shape[1:]), tensor.dtype)

    scopes = _LayerScopes(model)

    def step(inputs: Any) -> Any:
        variables = [variable.value for variable in model.trainable_variables]
        with scopes.opened():
            with tf.GradientTape() as tape:
                outputs = keras.tree.flatten(model(inputs, training=True))
            outputs = [output for output in outputs if output.dtype.is_floating]
            # The gradients of the loss, which is not counted.
            upstream = [tf.compat.v1.placeholder(output.dtype, output.shape) for output in outputs]
            gradients = tape.gradient(outputs, variables, upstream)
        return outputs, [gradient for gradient in gradients if gradient is not None]

    with state_restored(model), xla.traced_for_gpu(), in_step():
        function = tf.function(step, autograph=False)
        graph = function.get_concrete_function(keras.tree.map_structure(spec, structure)).graph
        return _by_layer(graph, scopes)


class _Category(enum.Enum):
    """What an operation of a layer moves, or does."""

    WEIGHTS = enum.auto()
    INPUTS = enum.auto()  # of the model
    CASTS = enum.auto()
    CODE = enum.auto()


@dataclass(frozen=True)
class _ByLayer:
    """The cost of a step, and the float32 bytes by layer: `None` for operations outside layers."""

    traffic: Traffic
    float32_bytes: dict[tuple[keras.Layer | None, _Category], int]


def _by_layer(graph: tf.Graph, scopes: "_LayerScopes") -> _ByLayer:
    numbers = {layer: number for number, layer in enumerate(scopes.layers)}
    owners: dict[str, tuple[keras.Layer | None, _Category]] = {"": (None, _Category.CODE)}
    inputs = {tensor.name for tensor in graph.inputs}

    def owner(name: str, op: tf.Operation) -> str:
        layer = scopes.layer_of(name)
        if layer is None:
            return ""
        category = _Category.CODE
        if op.type == "Cast":
            # A layer in 16 bits casts its weights, and the backward pass their gradients.
            if tuple(op.outputs[0].shape) in [weight.shape for weight in layer.weights]:
                category = _Category.WEIGHTS
            elif op.graph is graph and op.inputs[0].name in inputs:
                category = _Category.INPUTS
            else:
                category = _Category.CASTS
        label = f"{numbers[layer]} {category.name}"
        owners[label] = layer, category
        return label

    traffic = traffic_of(graph, owner)
    float32_bytes = {
        owners[label]: cost.float32_bytes
        for label, cost in traffic.by_owner.items()
        if cost.float32_bytes
    }
    return _ByLayer(traffic, float32_bytes)


def _causes(by_layer: _ByLayer, dtype: str) -> tuple[Float32Cause, ...]:
    """Returns why layers of a model that computes in `dtype` move float32."""
    total = by_layer.traffic.bytes
    shares: dict[tuple[str, str], float] = {}
    paths: dict[tuple[str, str], dict[str, None]] = {}
    with_code = {layer for layer, each in by_layer.float32_bytes if each is _Category.CODE}
    for (layer, category), moved in by_layer.float32_bytes.items():
        if layer is None:
            continue
        is_cast = category in (_Category.INPUTS, _Category.CASTS)
        is_code = is_cast and layer in with_code  # casts for what it computes
        reason = _reason(layer, _Category.CODE if is_code else category, dtype)
        key = type(layer).__name__, reason
        shares[key] = shares.get(key, 0.0) + moved / total
        paths.setdefault(key, {})[layer.path or layer.name] = None
    causes = [Float32Cause(*key, share, tuple(paths[key])) for key, share in shares.items()]
    return tuple(sorted(causes, key=lambda cause: -cause.share))


def _reason(layer: keras.Layer, category: _Category, dtype: str) -> str:
    """Returns why a layer moves float32, as shown to users."""
    if layer.compute_dtype not in DTYPES_16_BIT:
        rule = float32_rule(layer, keras.DTypePolicy(f"mixed_{dtype}"), Moment.CREATION)
        return f"kmp keeps it in float32: {rule.reason(dtype)}" if rule else "its dtype is float32"
    if category is _Category.WEIGHTS:
        return "its weights and their gradients are float32"
    if category is _Category.INPUTS:
        return "it casts the inputs of the model, which have dtype float32"
    if category is _Category.CASTS:
        return "it casts from or to a layer in float32"
    return f"its code in {type(layer).__module__} computes in float32"


def traffic_by_class(
    model: keras.Model, function: Callable[..., Any], *specs: Any, on_replicas: bool = False
) -> Traffic:
    """Traces a function that calls a model, and returns what its operations cost.

    Args:
        model: The model.
        function: Such as its forward pass, or its training step. It is not run.
        specs: The specs of its arguments.
        on_replicas: Whether each replica of the model's strategy calls it. Its outputs then count
            as not needed.

    Returns:
        The cost, by the classes of the model's layers: `""` for what is in no layer.
    """
    scopes = _LayerScopes(model)

    def call(*args: Any) -> Any:
        with scopes.opened():  # in the thread of a replica
            return function(*args)

    def call_on_replicas(*args: Any) -> None:
        model.distribute_strategy.run(call, args=args)

    traced = call_on_replicas if on_replicas else call
    graph = tf.function(traced, autograph=False).get_concrete_function(*specs).graph
    return traffic_of(graph, scopes.class_of)


class _LayerScopes:
    """Gives the operations of each layer of a model a name scope with the number of the layer.

    Keras' own scopes have the names of layers, which TensorFlow numbers: `a_1` may be layer `a`.
    """

    def __init__(self, model: keras.Model) -> None:
        self.layers = list(sublayers(model))

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Opens the scope of each layer that is called in the context."""

        def scoped(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(call)
            def scoped_call(*args: Any, **kwargs: Any) -> Any:
                with tf.name_scope(name):
                    return call(*args, **kwargs)

            return scoped_call

        with contextlib.ExitStack() as stack:
            for number, layer in enumerate(self.layers):
                in_scope = functools.partial(scoped, f"{_SCOPE}{number}")
                stack.enter_context(own_method(layer, "call", in_scope))
            yield

    def layer_of(self, name: str) -> keras.Layer | None:
        """Returns the innermost layer of an operation, given its name; `None` if it is in none.

        It is `None` too if that layer only calls other layers.
        """
        numbers = _NUMBER.findall(name.rpartition("/")[0])
        layer = self.layers[int(numbers[-1])] if numbers else None
        return None if layer is None or is_passthrough(layer) else layer

    def class_of(self, name: str, op: tf.Operation) -> str:
        """Returns the class of that layer; empty if there is none."""
        del op  # the name has the layer
        layer = self.layer_of(name)
        return "" if layer is None else type(layer).__name__
