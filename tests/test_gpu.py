"""Tests that need a GPU; they are skipped if TensorFlow detects none."""

import os
import re
import subprocess
import sys
import textwrap
from collections import Counter

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import (
    OverflowsBackward,
    casts_of_optimized,
    compiled_model,
    fit,
    sequential,
    small_data,
    values,
)

import kmp
from kmp.gradients.tensor_statistics import gradient_statistics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not tf.config.list_physical_devices("GPU"), reason="TensorFlow detects no GPU."
    ),
]
# Patterns in the names of NVIDIA's Tensor Core kernels, from Volta to Blackwell, and of kernels
# without Tensor Cores.
TENSOR_CORES = re.compile(
    r"884|1688|16816|hmma|gmma|tensor\d+x|tensorop|warpgroup|nvjet_(?:sm\d+_)?h"
)
CUDA_CORES = re.compile(r"sgemm|scudnn|ffma|simt")


@pytest.fixture(params=[False, True], ids=["graph", "XLA"])
def jit_compile(request):
    return request.param


@pytest.fixture
def profile_on_gpu(tmp_path):
    """Returns a function that runs another and counts its GPU events.

    These are kernels and copies, by name and size in bytes.
    """
    # No public API reads a profile.
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    def profile(function, *arguments):
        with tf.profiler.experimental.Profile(str(tmp_path)):
            tf.nest.map_structure(lambda tensor: tensor.numpy(), function(*arguments))
        newest = max(tmp_path.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
        planes = xplane_pb2.XSpace.FromString(newest.read_bytes()).planes
        counts = Counter(
            event
            for plane in planes
            if plane.name.startswith("/device:GPU")
            for event in events(plane)
        )
        if not counts:
            pytest.fail(
                "TensorFlow's profiler recorded no GPU events: CUPTI is missing or not permitted."
            )
        return counts

    return profile


def events(plane):
    """Yields the name of each event and its size in bytes, which is 0 if it is not a copy."""
    for event in (event for line in plane.lines for event in line.events):
        texts = (stat.str_value or plane.stat_metadata[stat.ref_value].name for stat in event.stats)
        size = re.search(r"size:(\d+)", " ".join(texts))
        yield plane.event_metadata[event.metadata_id].name, int(size[1]) if size else 0


class SelfAttention(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.attention = keras.layers.MultiHeadAttention(8, 64)

    def call(self, x):
        return self.attention(x, x)


LAYERS = {
    "matrix product": (lambda: keras.layers.Dense(1024, use_bias=False), (256, 1024)),
    "convolution": (lambda: keras.layers.Conv2D(128, 3, use_bias=False), (16, 32, 32, 64)),
    "attention": (SelfAttention, (16, 128, 512)),
}


def gradient_function(layer, jit_compile=False):
    """Returns a function for the gradients of a loss by the inputs and the weights."""

    @tf.function(jit_compile=jit_compile, autograph=False)
    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = keras.ops.sum(keras.ops.square(keras.ops.cast(layer(x), "float32")))
        return tape.gradient(loss, [x, *layer.trainable_variables])

    return run


@pytest.mark.parametrize("name", LAYERS)
def test_float16_runs_on_tensor_cores_and_float32_does_not(name, profile_on_gpu):
    make_layer, shape = LAYERS[name]
    x = tf.random.normal(shape)

    def kernels():
        """Returns the names of all kernels and copies in one call."""
        function = gradient_function(make_layer())
        function(x)  # traces the function, and selects and loads its kernels
        return sorted({name for name, _ in profile_on_gpu(function, x)})

    tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        float32_kernels = kernels()
        with kmp.enable():
            float16_kernels = kernels()
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(True)
    assert not list(filter(TENSOR_CORES.search, float32_kernels)), float32_kernels
    assert list(filter(TENSOR_CORES.search, float16_kernels)), float16_kernels
    assert not list(filter(CUDA_CORES.search, float16_kernels)), float16_kernels


@pytest.mark.parametrize("name", LAYERS)
def test_xla_multiplies_in_float16(name):
    make_layer, shape = LAYERS[name]
    x = tf.random.normal(shape)
    with kmp.enable():
        layer = make_layer()
        layer(x)
    hlo = gradient_function(layer, jit_compile=True).experimental_get_compiler_ir(x)(
        stage="optimized_hlo"
    )
    dtypes = re.findall(r"= \(?(\w+)\[[^=]*? (?:dot|convolution|custom-call)\([^\n]*", hlo)
    assert len(dtypes) >= 3
    assert "f16" in dtypes


def test_float32_layers_are_bitwise_equal_to_a_float32_model(jit_compile):
    x = tf.cast(tf.random.normal((64, 32)), tf.float16)
    with kmp.enable():
        in_float32 = kmp.layers.Float32(keras.ops.log_softmax)
        mixed_layers = [kmp.layers.Softmax(), kmp.layers.BatchNormalization(), in_float32]
    keras_layers = [
        keras.layers.Softmax(),
        keras.layers.BatchNormalization(),
        keras.ops.log_softmax,
    ]

    def outputs(layer, input_dtype, output_dtype):
        options = {"training": True} if isinstance(layer, keras.layers.BatchNormalization) else {}

        # Both programs contain the casts, so that XLA sums in the same order in both; otherwise
        # results would differ.
        @tf.function(jit_compile=jit_compile, autograph=False)
        def run(x):
            return tf.cast(layer(tf.cast(x, input_dtype), **options), output_dtype)

        return run(x)

    for mixed, reference in zip(mixed_layers, keras_layers, strict=True):
        expected = outputs(reference, "float32", mixed.compute_dtype)
        np.testing.assert_array_equal(outputs(mixed, "float16", mixed.compute_dtype), expected)
    for mixed, reference in zip(
        values(mixed_layers[1].variables), values(keras_layers[1].variables), strict=True
    ):
        assert mixed.dtype == np.float32
        np.testing.assert_array_equal(mixed, reference)


def test_statistics_on_the_gpu_equal_those_on_the_cpu(jit_compile):
    random = np.random.default_rng(0)
    shapes = [(7, 33), (2**22 + 5,), (512,)]
    gradients = [np.exp2(random.uniform(-160, 127, shape)).astype("float32") for shape in shapes]
    gradients[0][0, :4] = np.inf, np.nan, 0.0, -1e-45
    measure = tf.function(
        lambda gradients: tuple(gradient_statistics(gradients)), jit_compile=jit_compile
    )
    with tf.device("CPU:0"):
        expected = gradient_statistics([tf.constant(gradient) for gradient in gradients])
    counts, amax, square_sum = measure([tf.constant(gradient) for gradient in gradients])
    np.testing.assert_array_equal(counts, expected.counts)
    np.testing.assert_array_equal(amax, expected.amax)
    np.testing.assert_allclose(square_sum, expected.square_sum, rtol=1e-6)


@pytest.mark.usefixtures("enabled")
def test_overflow_inside_a_compiled_fit_is_skipped_and_counted(jit_compile):
    layers = keras.layers.Dense(2), OverflowsBackward(), kmp.layers.Softmax()
    options = {"loss": "sparse_categorical_crossentropy", "jit_compile": jit_compile}
    model = sequential(
        *layers, optimizer=kmp.LossScaleOptimizer("adam", initial_scale=2.0**16), **options
    )
    x, y = small_data(10)
    options = {"batch_size": 8, "shuffle": False, "verbose": 0}
    model.fit(x[:40], y[:40], **options)
    before = values(model.trainable_variables)
    model.fit(np.full((8, 4), 1e4, "float32"), y[:8], **options)
    np.testing.assert_equal(values(model.trainable_variables), before)
    snapshot = model.optimizer.snapshot()
    assert (snapshot.step, snapshot.overflow_count, int(model.optimizer.iterations)) == (6, 1, 5)
    assert snapshot.loss_scale == 2.0**15


@pytest.mark.usefixtures("enabled")
def test_scale_and_counters_are_stored_on_the_gpu(jit_compile):
    model = compiled_model("adam", jit_compile=jit_compile)
    fit(model, kmp.callbacks.defaults())
    variables = [
        *model.optimizer.variables,
        *model.optimizer.counters.weights,
        model.optimizer.dynamic_scale,
    ]
    assert all("GPU:0" in variable.value.device for variable in variables)


@pytest.mark.usefixtures("enabled")
def test_steps_copy_only_branch_conditions_to_the_host(jit_compile, profile_on_gpu):
    model = compiled_model("adam", jit_compile=jit_compile)
    fit(model, kmp.callbacks.defaults())
    x, y = (tf.constant(part[:8]) for part in small_data())
    step = tf.function(
        lambda x, y: model.train_step((x, y)), jit_compile=jit_compile, autograph=False
    )
    step(x, y)

    def five_steps():
        return [step(x, y) for _ in range(5)][-1]["loss"]

    # There is at least the copy of the loss, which `profile_on_gpu` reads.
    sizes = [
        size
        for (name, size), _ in profile_on_gpu(five_steps).items()
        if "D2H" in name or "DtoH" in name
    ]
    assert 0 < max(sizes, default=0) <= 8


@pytest.mark.usefixtures("enabled")
def test_model_saved_on_the_gpu_loads_without_one(tmp_path):
    model = compiled_model("adam")
    fit(model)
    x = small_data()[0]
    model.save(tmp_path / "model.keras")
    code = f"""
        import keras, kmp, numpy as np, tensorflow as tf
        assert not tf.config.list_physical_devices("GPU")
        model = keras.models.load_model({str(tmp_path / "model.keras")!r})
        print(int(model.optimizer.snapshot().step), float(model.optimizer.snapshot().loss_scale))
        predicted = model.predict(np.load({str(tmp_path / "x.npy")!r}), verbose=0)
        np.save({str(tmp_path / "predicted.npy")!r}, predicted)
        """
    np.save(tmp_path / "x.npy", x)
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    snapshot = model.optimizer.snapshot()
    assert process.stdout.split() == [str(snapshot.step), str(snapshot.loss_scale)]
    np.testing.assert_allclose(
        np.load(tmp_path / "predicted.npy"), model.predict(x, verbose=0), atol=5e-3
    )


def test_graph_rewrite_to_float16_trains():
    kmp.graph_rewrite(True)
    try:
        model = compiled_model("adam")
        losses = fit(model, epochs=3)["loss"]
        casts = casts_of_optimized(tf.function(model.call), [tf.random.normal((64, 4))], tf.float16)
    finally:
        kmp.graph_rewrite(False)
    assert casts != []
    assert isinstance(model.optimizer, kmp.LossScaleOptimizer)
    assert losses[-1] < losses[0]
