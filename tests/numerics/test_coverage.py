"""Every function, activation and layer of Keras has a row in the table, or a reason to have none.

A function has a row by its name, or all operations have one that TensorFlow traces it to. So a new
version of Keras shows what the table lacks.
"""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops
from tensorflow.core.framework import types_pb2
from tensorflow.python.framework import op_def_registry

from kmp.numerics.functions import keras_function, tensorflow_function

FLOATS = {types_pb2.DT_HALF, types_pb2.DT_BFLOAT16, types_pb2.DT_FLOAT}
# What they compute is in functions, which are followed.
CONTROL_FLOW = {
    "Case",
    "If",
    "PartitionedCall",
    "StatefulPartitionedCall",
    "StatelessCase",
    "StatelessIf",
    "StatelessWhile",
    "While",
}
# They have no result, or one that is not computed.
NOT_COMPUTED = {"Assert", "Const", "NoOp", "Placeholder"}
REASONS = {
    "it computes nothing with floats": (
        "convert_to_numpy custom_gradient dtype is_tensor ndim shape size vectorize"
    ),
    "Keras 3.15 cannot trace it": "associative_scan bartlett isin",
}
REASON_OF_FUNCTION = {name: reason for reason, names in REASONS.items() for name in names.split()}
LAYER_REASONS = {
    "the layer or function in it decides": (
        "Activation Bidirectional Lambda Layer Pipeline TimeDistributed Wrapper"
    ),
    "it computes nothing": "InputLayer InputSpec",
    "it is of another framework, or exported": "FlaxLayer JaxLayer TFSMLayer TorchModuleWrapper",
    "it looks up integers or strings": (
        "CategoryEncoding Discretization HashedCrossing Hashing IntegerLookup StringLookup"
        " TextVectorization"
    ),
}
REASON_OF_LAYER = {
    name: reason for reason, names in LAYER_REASONS.items() for name in names.split()
}


def floats(*shape):
    return tf.TensorSpec(shape, "float32")


def integers(*shape):
    return tf.TensorSpec(shape, "int32")


VECTOR, MATRIX, SQUARE = floats(8), floats(2, 8), floats(3, 3)
IMAGE, IDS = floats(1, 16, 16, 3), integers(2)
# The arguments of functions that take others than one or two tensors of floats.
ARGUMENTS = {
    "affine_transform": lambda: (IMAGE, floats(1, 8)),
    "arange": lambda: (0.0, 4.0, 0.5),
    "argpartition": lambda: (VECTOR, 2),
    "blackman": lambda: (4,),
    "clip": lambda: (VECTOR, 0.0, 1.0),
    "cond": lambda: (tf.TensorSpec((), "bool"), lambda: 1.0, lambda: 2.0),
    "correlate": lambda: (VECTOR, floats(3)),
    "ctc_decode": lambda: (floats(2, 4, 5), integers(2)),
    "digitize": lambda: (VECTOR, np.array([0.0, 1.0])),
    "einsum": lambda: ("bij,bjk,bkl->bil", *[floats(1, 2, 2)] * 3),
    "elastic_transform": lambda: (IMAGE,),
    "empty": lambda: ((2,),),
    "extract_patches": lambda: (IMAGE, 2),
    "extract_patches_3d": lambda: (floats(1, 8, 8, 8, 3), 2),
    "eye": lambda: (3,),
    "fori_loop": lambda: (0, 3, lambda i, x: x * 2.0, VECTOR),
    "full": lambda: ((2,), 1.0),
    "full_like": lambda: (VECTOR, 1.0),
    "gaussian_blur": lambda: (IMAGE,),
    "geomspace": lambda: (1.0, 2.0, 4),
    "hamming": lambda: (4,),
    "hanning": lambda: (4,),
    "histogram": lambda: (VECTOR,),
    "in_top_k": lambda: (integers(2), MATRIX, 1),
    "jvp": lambda: (ops.square, (VECTOR,), (VECTOR,)),
    "kaiser": lambda: (4, 1.0),
    "linspace": lambda: (0.0, 1.0, 4),
    "logspace": lambda: (0.0, 1.0, 4),
    "map": lambda: (ops.square, VECTOR),
    "moments": lambda: (MATRIX, 0),
    "norm": lambda: (MATRIX, 3, 1),
    "ones": lambda: ((2,),),
    "psnr": lambda: (VECTOR, VECTOR, 1.0),
    "rgb_to_grayscale": lambda: (IMAGE,),
    "scan": lambda: (lambda total, x: (total + x, total), floats(), VECTOR),
    "sobel_edges": lambda: (IMAGE,),
    "ssim": lambda: (IMAGE, IMAGE, 1.0),
    "switch": lambda: (integers(), [ops.square, ops.exp], VECTOR),
    "trace": lambda: (SQUARE,),
    "tri": lambda: (3,),
    "unravel_index": lambda: (integers(2), (2, 2)),
    "vander": lambda: (VECTOR,),
    "vectorized_map": lambda: (ops.square, VECTOR),
    "view": lambda: (VECTOR, "int32"),
    "view_as_complex": lambda: (floats(4, 2),),
    "view_as_real": lambda: (tf.TensorSpec((4,), "complex64"),),
    "while_loop": lambda: (lambda x: ops.sum(x) < 3.0, lambda x: (x * 2.0,), (VECTOR,)),
    "zeros": lambda: ((2,),),
}


def public_functions():
    """The functions of `keras.ops`, those in its submodules too, by name."""
    found = {}
    modules = [each for each in vars(ops).values() if inspect.ismodule(each)]
    for module in (*modules, ops):
        for name, value in vars(module).items():
            if not name.startswith("_") and callable(value):
                found[name] = value
    return found


FUNCTIONS = public_functions()


def traced_types(function, arguments):
    """The types of the operations that a call is traced to, and those in its branches and loops."""
    is_tensor = [isinstance(each, tf.TensorSpec) for each in tf.nest.flatten(arguments)]

    def call(*tensors):
        remaining = iter(tensors)
        flat = [
            next(remaining) if is_one else each
            for is_one, each in zip(is_tensor, tf.nest.flatten(arguments), strict=True)
        ]
        results = function(*tf.nest.pack_sequence_as(arguments, flat))
        return [each for each in tf.nest.flatten(results) if each is not None]

    specs = [each for each in tf.nest.flatten(arguments) if isinstance(each, tf.TensorSpec)]
    graph = tf.function(call).get_concrete_function(*specs).graph.as_graph_def()
    nodes = [*graph.node, *(node for each in graph.library.function for node in each.node_def)]
    return {node.op for node in nodes}


def has_float_result(kind):
    definition = op_def_registry.get(kind)
    for result in definition.output_arg:
        attribute = next((each for each in definition.attr if each.name == result.type_attr), None)
        allowed = set(attribute.allowed_values.list.type) if attribute else {result.type}
        if not allowed or allowed & FLOATS:
            return True
    return False


def lacking_rows(name):
    """The types without a row of what a function is traced to; `None` if no call is known."""
    candidates = [(MATRIX,), (MATRIX, MATRIX), (VECTOR, VECTOR), (IDS,), (IDS, IDS)]
    if name in ARGUMENTS:
        candidates = [ARGUMENTS[name]()]
    for arguments in candidates:
        try:
            types = traced_types(FUNCTIONS[name], arguments)
        except (TypeError, ValueError, tf.errors.InvalidArgumentError):
            continue
        known = CONTROL_FLOW | NOT_COMPUTED
        return sorted(
            kind
            for kind in types - known
            if has_float_result(kind) and not tensorflow_function(kind)
        )
    return None


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_function_has_a_row_or_is_traced_to_operations_that_have_one(name):
    if keras_function(name) or name in REASON_OF_FUNCTION:
        return
    lacking = lacking_rows(name)
    assert lacking is not None, f"keras.ops.{name} has no row, and no call of it is known here"
    assert lacking == []


def test_every_activation_has_a_row():
    helpers = {"deserialize", "get", "serialize"}
    names = {name for name in vars(keras.activations) if not name.startswith("_")} - helpers
    assert [name for name in sorted(names) if not keras_function(name)] == []


def test_every_layer_has_a_row_or_a_reason():
    classes = {each.__name__: each for each in vars(keras.layers).values() if inspect.isclass(each)}
    lacking = [
        name
        for name, layer_class in classes.items()
        if not keras_function(name)
        and name not in REASON_OF_LAYER
        and not issubclass(layer_class, keras.src.layers.preprocessing.data_layer.DataLayer)
    ]
    assert lacking == []


def test_row_by_a_name_of_keras_does_not_depend_on_how_the_name_is_written():
    assert keras_function("LogSoftmax") is keras_function("log_softmax") is not None
    assert keras_function("Var") is None  # composite, and traced
