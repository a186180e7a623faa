"""Keras' private names that kmp reads or sets.

Where a public name comes close, a function says what it lacks. `inventory` says what kmp does
without each name.
"""

import contextlib
import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

import keras
import numpy as np
import tensorflow as tf

from kmp.backend import marked_policy
from kmp.backend.private_names import attribute, find, required
from kmp.backend.undo import Undos
from kmp.utils.float_formats import DTYPES_16_BIT, FLOAT32

Method = TypeVar("Method", bound=Callable[..., Any])


def is_keras_class(cls: type) -> bool:
    """Whether a class is defined in Keras."""
    return cls.__module__.startswith("keras.")


def is_library_class(cls: type) -> bool:
    """Whether a class is defined in Keras or kmp, and not by the user."""
    return is_keras_class(cls) or cls.__module__.startswith("kmp.")


def defining_class(cls: type, name: str) -> type:
    """Returns the class in the MRO of `cls` that defines `name`."""
    return next(base for base in cls.__mro__ if name in vars(base))


def sublayers(layer: keras.Layer) -> Iterable[keras.Layer]:
    """Returns the layer and all its sublayers.

    `model.layers` lacks those in wrappers, custom layers and lists.
    """
    flatten = attribute(layer, "keras:Layer._flatten_layers")
    if flatten is not None:
        return flatten()
    found = {id(layer): layer}
    for child in _children(layer):
        found.update((id(inner), inner) for inner in sublayers(child))
    return list(found.values())


def layers_in_16_bits(layers: Iterable[keras.Layer]) -> list[keras.Layer]:
    """Returns those of the layers and their sublayers that compute in 16 bits, each once."""
    every = {id(inner): inner for layer in layers for inner in sublayers(layer)}
    return [layer for layer in every.values() if layer.compute_dtype in DTYPES_16_BIT]


def direct_sublayers(layer: keras.Layer) -> Iterable[keras.Layer]:
    """Returns the sublayers of a layer, without their own sublayers."""
    flatten = attribute(layer, "keras:Layer._flatten_layers")
    if flatten is not None:
        return flatten(recursive=False, include_self=False)
    return _children(layer)


def _children(layer: keras.Layer) -> list[keras.Layer]:
    """Returns the layers in the attributes of a layer, and in the lists and dictionaries there."""
    values = [getattr(layer, "layers", []), *vars(layer).values()]
    if isinstance(layer, keras.Sequential):  # without the functional model that Keras makes of it
        values = [layer.layers]
    found = [value for value in keras.tree.flatten(values) if isinstance(value, keras.Layer)]
    return list({id(child): child for child in found if child is not layer}.values())


def calls_of(operation: keras.Operation) -> list[Any]:
    """Returns a node per call of an operation in a graph.

    The public `input` and `output` belong to the first call.
    """
    return list(required(operation, "keras:Operation._inbound_nodes"))


def graph_tensors(model: keras.Model, name: str) -> list[keras.KerasTensor]:
    """Returns the `"inputs"` or `"outputs"` of a functional or Sequential model, in order.

    Other models have none. A subclassed model has no such attributes, or its own with other values.
    """
    tensors = keras.tree.flatten(getattr(model, name, None) or [])
    return tensors if all(isinstance(tensor, keras.KerasTensor) for tensor in tensors) else []


def call_of(tensor: keras.KerasTensor) -> Any:
    """Returns the node of the call that produces a tensor of a graph."""
    history = required(tensor, "keras:KerasTensor._keras_history")
    return calls_of(history.operation)[history.node_index]


def producer_of(tensor: keras.KerasTensor) -> keras.Operation:
    """Returns the operation that produces a tensor of a graph."""
    return call_of(tensor).operation


def without_wrong_sparsity(tensors: Any) -> Any:
    """Returns a structure with the `KerasTensor`s that are not sparse marked as dense.

    Keras 3.15 takes each number for a sparse tensor, so a dense `x * 2.0` too.
    """

    def marked(value: Any) -> Any:
        if not isinstance(value, keras.KerasTensor) or not value.sparse or _is_sparse(value):
            return value
        return keras.KerasTensor(value.shape, value.dtype)

    return keras.tree.map_structure(marked, tensors)


def _is_sparse(tensor: keras.KerasTensor) -> bool:
    """Whether a tensor that is marked as sparse comes from a sparse one."""
    history = attribute(tensor, "keras:KerasTensor._keras_history")
    # What a layer returned was traced.
    if history is None or isinstance(history.operation, keras.Layer):
        return True
    sources = calls_of(history.operation)[history.node_index].input_tensors
    return any(source.sparse and _is_sparse(source) for source in sources)


def is_input_of(layer: keras.Layer, consumer: keras.Layer) -> bool:
    """Whether another layer, and nothing else, takes the outputs of a layer in a graph."""
    nodes = attribute(layer, "keras:Layer._outbound_nodes", [])
    consumers = {id(node.operation) for node in nodes}
    return consumers == {id(consumer)}


def functional_outputs(
    model: keras.Model, inputs: Any, replace: Callable[[keras.Operation], Any]
) -> Any:
    """Returns a functional model's outputs for other inputs, with each operation replaced.

    The public `keras.models.clone_model` clones the operations instead.
    """
    return required(model, "keras:Model._run_through_graph")(inputs, operation_fn=replace)


def unconnected_copy(operation: keras.Operation) -> keras.Operation:
    """Returns a copy of an operation that is in no graph; it shares the arguments of the original.

    `copy.copy` would save and load it. The config of an operation lacks arguments such as arrays
    and functions.
    """
    result = object.__new__(type(operation))
    vars(result).update(vars(operation), _inbound_nodes=[], _outbound_nodes=[])
    return result


def with_logits(output: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Returns the output of a softmax, to which its logits are attached as Keras does."""
    output._keras_logits = logits
    return output


def in_float32(values: Any) -> Any:
    """Returns a structure with its 16-bit tensors, arrays and `KerasTensor`s in float32.

    Other values are unchanged. So is a list, dictionary or other container without such a value,
    which the receiver may fill. A tensor keeps its mask, which no public name has.
    """

    def replacement(node: Any) -> Any:
        leaves = keras.tree.flatten(node)
        if not any(map(_is_16_bit, leaves)):
            return node
        # With `None`, the values of a container are replaced instead.
        return _in_float32(node) if leaves[0] is node else None

    return keras.tree.traverse(replacement, values)


def _is_16_bit(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    # `standardize_dtype` would raise an error for arrays of strings and objects.
    return getattr(dtype, "name", dtype) in DTYPES_16_BIT


def _in_float32(value: Any) -> Any:
    if isinstance(value, keras.KerasTensor):
        return keras.KerasTensor(value.shape, "float32", sparse=value.sparse)
    if isinstance(value, np.ndarray | np.generic):
        return value.astype("float32")
    result = keras.ops.cast(value, "float32")
    mask = getattr(value, "_keras_mask", None)
    if mask is not None:
        result._keras_mask = mask
    return result


def uncast_value(variable: keras.Variable) -> tf.Tensor:
    """Returns a copy of a variable's value.

    In the call of a layer, the public `value` is cast to its compute dtype.
    """
    value = attribute(variable, "keras:Variable._value")
    return tf.identity(variable.value if value is None else value)


def build_metrics(model: keras.Model, batch_spec: Any) -> None:
    """Creates the variables of compiled metrics and losses.

    Keras 3.15 creates them in the first trace of a step, which it then traces again. This runs the
    model once symbolically for inference, a small part of a trace: only a functional or
    Sequential model, whose outputs are the same in training. An error of the user's code is raised
    by the trace.
    """
    if not is_keras_class(type(model)) or model.run_eagerly:
        return
    outputs = graph_tensors(model, "outputs")
    metrics = attribute(model, "keras:Model._compile_metrics")
    build = attribute(model, "keras:Model._symbolic_build")
    if not outputs or (len(outputs) == 1 and metrics is None) or build is None:
        return
    with contextlib.suppress(Exception):
        build(data_batch=batch_spec)


def without_tracking(method: Method) -> Method:
    """Decorates `build` of an optimizer as Keras does.

    Variables in plain attributes are not added to `variables`.
    """
    decorate = find("keras.src.utils.tracking:no_automatic_dependency_tracking")
    return method if decorate is None else cast(Method, decorate(method))


def check_variables_are_known(
    optimizer: keras.optimizers.Optimizer, variables: Iterable[keras.Variable]
) -> None:
    """Raises the error of Keras if an optimizer was built on other variables."""
    optimizer._check_variables_are_known(variables)


def learning_rate_of(optimizer: keras.optimizers.Optimizer) -> Any:
    """Returns the schedule or variable of a learning rate.

    The public `learning_rate` is a schedule's current value.
    """
    rate = attribute(optimizer, "keras:optimizers.Optimizer._learning_rate")
    return optimizer.learning_rate if rate is None else rate


def variables_to_train(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns the variables that an optimizer was built with.

    The public `variables` are its state.
    """
    return list(attribute(optimizer, "keras:optimizers.Optimizer._trainable_variables", []))


def optimizer_state(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns all state variables of an optimizer, in the order of its attributes.

    The public `variables` lists only the variables that Keras tracks. Keras builds an inner
    optimizer of a `LossScaleOptimizer` without tracking, so variables in plain attributes are
    missing: Nadam's momentum product and Adafactor's placeholders.
    """
    # The attributes in which Keras and TensorFlow track variables are left out.
    is_tracking = re.compile("_variables|_trainable_variables|_self_.*").fullmatch
    attributes = {name: value for name, value in vars(optimizer).items() if not is_tracking(name)}
    trained_ids = set(map(id, variables_to_train(optimizer)))
    variables = {
        id(variable): variable for variable in (*_variables_in(attributes), *optimizer.variables)
    }
    return [variable for key, variable in variables.items() if key not in trained_ids]


def _variables_in(value: Any) -> Iterator[keras.Variable]:
    if isinstance(value, keras.Variable):
        yield value
    elif isinstance(value, keras.optimizers.Optimizer):  # such as those in a MultiOptimizer
        yield from optimizer_state(value)
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _variables_in(item)


def compile_arguments(model: keras.Model) -> dict[str, Any]:
    """Returns the arguments that a model was compiled with.

    The public `get_compile_config` has only their configs.
    """
    config = attribute(model, "keras:Model._compile_config")
    if config is not None:
        return config.config
    names = ("optimizer", "loss", "run_eagerly", "steps_per_execution", "jit_compile")
    return {name: getattr(model, name) for name in names}


@contextlib.contextmanager
def global_policy(policy: str | keras.DTypePolicy) -> Iterator[None]:
    """Sets Keras' global dtype policy of this thread in the context."""
    previous = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(previous)


@contextlib.contextmanager
def instance_attribute(instance: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an attribute in the context; `None` removes it.

    Keras' `__setattr__`, which would track the value, is not called. The attribute is the same for
    all threads: `own_method` sets a method for one.
    """
    previous = vars(instance).get(name)

    def restore() -> None:
        vars(instance).pop(name, None)
        if previous is not None:
            vars(instance)[name] = previous

    with Undos() as undos, undos.first_attempt():
        undos.add(restore)
        vars(instance).pop(name, None)
        if value is not None:
            vars(instance)[name] = value
        yield


@contextlib.contextmanager
def around_steps(
    model: keras.Model, around: Callable[[Any], contextlib.AbstractContextManager[Any]]
) -> Iterator[None]:
    """Has a train function that is made in this context call each step in a context of its own.

    It is outside of what XLA compiles, in each turn of the loop of `steps_per_execution`.

    Args:
        model: The model.
        around: Returns the context of a step, for its batch.
    """
    convert = attribute(model, "keras:Model._autoconvert_optionals")
    if convert is None:
        yield
        return

    def converted(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(data: Any) -> Any:
            with around(data):
                return step(data)

        return cast(Callable[[Any], Any], convert(run))

    with instance_attribute(model, "_autoconvert_optionals", converted):
        yield


def declared_trainable(layer: keras.Layer) -> list[keras.Variable]:
    """Returns the trainable variables that a layer itself created.

    The public list is empty if the layer is frozen.
    """
    declared = attribute(layer, "keras:Layer._trainable_variables")
    if declared is None:
        return [each for each in _own_variables(layer) if each.trainable]
    return list(declared)


def declared_not_trainable(layer: keras.Layer) -> list[keras.Variable]:
    """Returns the non-trainable variables that a layer itself created.

    The public list has all of a frozen layer.
    """
    declared = attribute(layer, "keras:Layer._non_trainable_variables")
    if declared is None:
        return [each for each in _own_variables(layer) if not each.trainable]
    return list(declared)


def _own_variables(layer: keras.Layer) -> list[keras.Variable]:
    """Returns the variables of a layer that are in none of its sublayers."""
    of_others = {id(each) for child in direct_sublayers(layer) for each in child.variables}
    return [each for each in layer.variables if id(each) not in of_others]


def is_symbolic() -> bool:
    """Whether Keras may call a layer only for the shapes and dtypes of its outputs."""
    in_symbolic_scope = find("keras.src.backend.common.symbolic_scope:in_symbolic_scope")
    return in_symbolic_scope is None or bool(in_symbolic_scope())


def variables_uncast() -> contextlib.AbstractContextManager[Any]:
    """Returns a context without the cast of variables to the dtype of the layer that is called."""
    scope = find("keras.src.backend.common.variables:AutocastScope")
    return contextlib.nullcontext() if scope is None else scope(None)


def layers_by_path(model: keras.Model) -> dict[str, keras.Layer]:
    """Returns a model's layers by path, with those in nested models and custom layers.

    The cell of an RNN is not among them.
    """
    found: dict[str, keras.Layer] = {}
    for layer in direct_sublayers(model):
        if not isinstance(layer, keras.layers.InputLayer):
            found[layer.path or layer.name] = layer
            if isinstance(layer, keras.Model) or not is_keras_class(type(layer)):
                found |= layers_by_path(layer)
    return found


def computing_layers(
    model: keras.Model, beside: Iterable[keras.Layer] = ()
) -> dict[str, keras.Layer]:
    """Returns those of `layers_by_path`, and the model, that compute something themselves.

    The layers `beside` the model, such as a network in its loss, are treated as the model is.
    """
    layers: dict[str, keras.Layer] = {}
    for root in (*beside, model):
        layers |= {root.name: root, **layers_by_path(root)}  # a layer may have the model's name
    return {path: layer for path, layer in layers.items() if not is_passthrough(layer)}


def created_layers(model: keras.Model) -> dict[str, keras.Layer]:
    """Returns those of `layers_by_path` that a program can create.

    It cannot create the parts of keras-hub's layers.
    """
    layers = layers_by_path(model)
    blocks = (path for path, layer in layers.items() if not isinstance(layer, keras.Model))
    closed = tuple(
        f"{path}/" for path in blocks if type(layers[path]).__module__.startswith("keras_hub.")
    )
    return {path: layer for path, layer in layers.items() if not path.startswith(closed)}


def output_layers(layer: keras.Layer) -> list[keras.Layer]:
    """Returns the layers that produce a model's outputs, in order.

    Without a graph, that is the last sublayer of a layer or model.
    """
    graph = graph_tensors(layer, "outputs") if isinstance(layer, keras.Model) else []
    if not graph:
        return list(direct_sublayers(layer))[-1:]
    histories = [attribute(tensor, "keras:KerasTensor._keras_history") for tensor in graph]
    producers = [history.operation for history in histories if history is not None]
    return [producer for producer in producers if isinstance(producer, keras.Layer)]


def compute_dtypes(layer: keras.Layer) -> set[str]:
    """Returns the float dtypes that a layer and its sublayers compute in.

    The dtype of a look-up, such as string, is no float dtype.
    """
    dtypes = {
        sublayer.compute_dtype for sublayer in sublayers(layer) if not is_passthrough(sublayer)
    }
    return set(filter(keras.backend.is_float_dtype, dtypes))


def float32_policy(layer: keras.Layer) -> keras.DTypePolicy:
    """Returns the policy of a layer with float32 in place of 16 bits.

    A quantized layer stays quantized: without that policy it takes its integers for weights.
    """
    policy = layer.dtype_policy
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        policy = policy[layer.path]
    if policy.quantization_mode is None:
        return marked_policy.renamed(policy, FLOAT32.name)
    return type(policy).from_config({**policy.get_config(), "source_name": FLOAT32.name})


def has_float8_gradients(layer: keras.Layer) -> bool:
    """Whether a layer or a sublayer trains in float8, which Keras 3.15 does in graphs only.

    Eagerly, TensorFlow raises a `ValueError` in the backward pass.
    """
    return any(getattr(each, "quantization_mode", None) == "float8" for each in sublayers(layer))


def is_passthrough(layer: keras.Layer) -> bool:
    """Whether a layer computes nothing itself.

    That is an `InputLayer`, or a Sequential or functional model.
    """
    is_model = isinstance(layer, keras.Model) and is_keras_class(
        defining_class(type(layer), "call")
    )
    return is_model or isinstance(layer, keras.layers.InputLayer)


def rnn_states(layer: keras.Layer) -> list[keras.Variable]:
    """Returns the states that a stateful RNN keeps between batches.

    Keras lists them in no layer's variables.
    """
    is_stateful = isinstance(layer, keras.layers.RNN) and layer.stateful and layer.built
    return keras.tree.flatten(layer.states) if is_stateful else []


def tensorflow_variables(layer: keras.Layer) -> list[tf.Variable]:
    """Returns the variables in the attributes of a layer that are TensorFlow's, not Keras'.

    Those in its lists, dictionaries and `tf.Module`s are included. Keras lists them nowhere.
    """
    found: list[tf.Variable] = []
    for value in objects_in(layer, (tf.Variable, tf.Module)).values():
        found.extend(value.variables if isinstance(value, tf.Module) else [value])
    return found


class _Search(NamedTuple):
    """What a search of an attribute found.

    Attributes:
        of: The `id` of the value of the attribute.
        items: How many items of it were searched.
        found: Weak references to what was found, by name.
    """

    of: int
    items: int
    found: dict[str, weakref.ref[Any]]


# By object, the classes that are searched for, and the attribute.
_searches: WeakKeyDictionary[Any, dict[Any, dict[str, _Search]]] = WeakKeyDictionary()


def objects_in(owner: Any, kinds: tuple[type, ...]) -> dict[str, Any]:
    """Returns the objects of these classes in the attributes of an object, by name.

    Items of lists and dictionaries there are included: `"totals[0]"`, `"optimizers['d']"`. A step
    that runs eagerly asks each time, and a list may have many items: only attributes that were set
    since and items that were added to a list or dictionary are searched, and all after
    `search_again`.
    """
    searches = _searches.setdefault(owner, {}).setdefault(kinds, {})
    found: dict[str, Any] = {}
    for name, value in list(vars(owner).items()):
        if name.startswith("_self_"):  # TensorFlow's own record of the attributes
            continue
        items = len(value) if isinstance(value, list | tuple | dict) else 0
        search = searches.get(name)
        is_known = search is not None and search.of == id(value) and search.items <= items
        if search is None or not is_known:
            search = _Search(id(value), 0, {})
        if not is_known or search.items < items:
            new = _named(name, value, kinds, search.items)
            found_here = search.found | {key: weakref.ref(each) for key, each in new}
            search = searches[name] = _Search(id(value), items, found_here)
        found |= {key: each() for key, each in search.found.items()}
    return {name: each for name, each in found.items() if each is not None}


def search_again(owner: Any) -> None:
    """Makes `objects_in` search all attributes of an object again."""
    _searches.pop(owner, None)


def _named(
    name: str, value: Any, kinds: tuple[type, ...], first: int = 0
) -> Iterator[tuple[str, Any]]:
    """Yields the objects of these classes in a value, from an item on, with their names."""
    if isinstance(value, kinds):
        yield name, value
    elif isinstance(value, dict):
        for key, item in islice(value.items(), first, None):
            yield from _named(f"{name}[{key!r}]", item, kinds)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(islice(value, first, None), start=first):
            yield from _named(f"{name}[{index}]", item, kinds)
