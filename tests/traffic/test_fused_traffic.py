"""The estimate of what XLA makes of a function, beside what it makes for an H100.

Counted there by `benchmarks/xla_gpu.py` with JAX 0.10.2, from the HLO that
`experimental_get_compiler_ir(...)(stage="hlo_serialized")` returns for these functions.
"""

from typing import NamedTuple

import keras
import pytest
import tensorflow as tf

from kmp.traffic import Cost, traffic_of


class Update(NamedTuple):
    """An optimizer's update, and what XLA makes of it for an H100: kernels, and megabytes."""

    optimizer: type
    settings: dict
    shapes: list
    sparse: bool
    kernels: int
    megabytes: float


DENSE = [(512, 512), (512, 512), (512, 512), (512,), (512,), (512,)]
TABLES = [(20_000, 32)] * 4
ROWS = 128
CLIPPED = {"weight_decay": 0.01, "global_clipnorm": 1.0}
UPDATES = {
    "muon": Update(keras.optimizers.Muon, {}, DENSE, False, 103, 575.7),
    "global_clipnorm": Update(keras.optimizers.AdamW, CLIPPED, DENSE, False, 16, 25.2),
    "tables": Update(keras.optimizers.AdamW, {}, TABLES, True, 14, 143.5),
    "lamb": Update(keras.optimizers.Lamb, {}, DENSE, False, 26, 31.5),
}


def compiled_update(update):
    """Returns a compiled update of dense or sparse gradients, and the specs of its arguments."""
    variables = [keras.Variable(tf.zeros(shape)) for shape in update.shapes]
    optimizer = update.optimizer(learning_rate=0.01, **update.settings)
    optimizer.build(variables)

    @tf.function(jit_compile=True, autograph=False)
    def function(rows, *gradients):
        if update.sparse:
            shapes = zip(gradients, update.shapes, strict=True)
            gradients = [tf.IndexedSlices(each, rows, shape) for each, shape in shapes]
        optimizer.apply(gradients, variables)

    shapes = [(ROWS, shape[-1]) if update.sparse else shape for shape in update.shapes]
    return function, [tf.TensorSpec((ROWS,), tf.int32), *map(tf.TensorSpec, shapes)]


def compiled(function, specs):
    """Returns the traffic of a step that calls a compiled function."""

    @tf.function(autograph=False)
    def step(*args):
        return function(*args)

    return traffic_of(step.get_concrete_function(*specs).graph)


@pytest.mark.parametrize("name", UPDATES)
def test_estimate_of_an_update_is_near_what_xla_makes_of_it(name):
    update = UPDATES[name]
    counted = compiled(*compiled_update(update))
    assert (counted.compiled_calls, counted.compiled.kernels) == (1, counted.kernels)
    assert 0.8 <= counted.compiled.kernels / update.kernels <= 1.2
    assert 0.6 <= counted.compiled.bytes / 1e6 / update.megabytes <= 1.5


def normalized(x):
    x = tf.cast(x, tf.float32)
    centered = x - tf.reduce_mean(x, -1, keepdims=True)
    variance = tf.reduce_mean(tf.square(centered), -1, keepdims=True)
    return tf.cast(centered * tf.math.rsqrt(variance + 1e-6), tf.float16)


def activated(x):
    return tf.cast(tf.nn.gelu(tf.cast(x, tf.float32)), tf.float16)


def softmax(x):
    return tf.cast(tf.nn.softmax(tf.cast(x, tf.float32)), tf.float16)


@pytest.mark.parametrize("function", [normalized, activated, softmax])
def test_rows_and_elements_are_read_and_written_once(function):
    def gradient(x, upstream):
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = function(x)
        return tape.gradient(outputs, x, upstream)

    spec, size = tf.TensorSpec((4096, 768), tf.float16), 4096 * 768 * 2
    for passed, tensors in ((function, 2), (gradient, 3)):
        specs = [spec] * (tensors - 1)
        counted = compiled(tf.function(passed, jit_compile=True, autograph=False), specs)
        assert counted.compiled == Cost(1, tensors * size, 0)
