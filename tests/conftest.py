import contextlib
import fcntl
import gc
import os
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("MPLBACKEND", "agg")
# Its float16 is many times slower on newer CPUs.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")  # several test processes share one GPU
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # makes matrix products deterministic

import keras
import matplotlib.pyplot as plt
import numpy as np
import pytest
import tensorflow as tf
from operation_trace import optimized_graphs
from packaging.version import Version
from tensorflow.python.framework import ops as tensorflow_ops

import kmp
from kmp.callbacks import replay_time

# MirroredStrategy needs two devices for two replicas. This must run before TensorFlow initializes
# its devices.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
HAS_GPU = bool(tf.config.list_physical_devices("GPU"))
COUNTS_CPU_OPERATIONS = [
    pytest.mark.skipif(HAS_GPU, reason="Counts operations of a CPU."),
    pytest.mark.skipif(
        Version(tf.__version__) < Version("2.20"),
        reason="The profiler of TensorFlow 2.18 also has events of control flow.",
    ),
]


def pytest_collection_finish():
    """Lets garbage collections skip what is imported, which takes most of a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def two_replicas():
    """A strategy with two replicas, which all tests share.

    TensorFlow mixes up the collectives of two such strategies.
    """
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.fixture(scope="session")
def one_replica():
    """A strategy with one replica, on the default device."""
    return tf.distribute.MirroredStrategy(["GPU:0" if HAS_GPU else "CPU:0"])


@pytest.fixture(autouse=True)
def time_to_compare(monkeypatch):
    """Replays of a training do not depend on how busy the machine is."""
    monkeypatch.setattr(replay_time, "_FREE_SECONDS", 600.0)
    monkeypatch.setattr(replay_time, "_MOST_SECONDS", 60.0)


@pytest.fixture(autouse=True)
def clean_state():
    """Starts each test with the float32 policy and a fixed seed.

    Removes patches, figures and graphs after it.
    """
    keras.config.set_dtype_policy("float32")
    keras.utils.set_random_seed(0)
    # A GPU would use TF32 by default.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    yield
    kmp.disable()
    keras.config.set_dtype_policy("float32")
    plt.close("all")
    # TensorFlow never removes the gradient of a `tf.custom_gradient` in a graph, and with it keeps
    # the whole graph. With two thousand tests, memory grows by gigabytes and each garbage
    # collection takes seconds.
    registry = tensorflow_ops.gradient_registry._registry
    for name in [name for name in registry if name.startswith("CustomGradient-")]:
        del registry[name]


@pytest.fixture
def enabled():
    with kmp.enable() as handle:
        yield handle


@pytest.fixture
def without_figures(monkeypatch):
    """Draws nothing in a report, which takes most of the time that it takes."""
    monkeypatch.setattr("kmp.report.figures._svg", lambda *_: "data:,")


MODES = {
    "eager": {"run_eagerly": True},
    "graph": {"jit_compile": False},  # Keras uses XLA by default on a GPU
    "compiled step": {"jit_compile": False},  # and the optimizer's `jit_compile` is true
    "xla": {"jit_compile": True},
    "steps_per_execution": {"steps_per_execution": 8, "jit_compile": False},
}


@pytest.fixture(params=["eager", "graph", "xla"])
def run_step(request):
    """Decorates a step function for each execution mode of TensorFlow."""
    if request.param == "eager":
        return lambda step: step
    return tf.function(jit_compile=request.param == "xla")


def exhaustive_unless(chosen, values, *marks):
    """Returns the values as parameters: the chosen ones with these marks, the others exhaustive."""
    return [
        pytest.param(value, marks=marks if value in chosen else pytest.mark.exhaustive)
        for value in values
    ]


def small_data(batches=20, batch_size=8):
    random = np.random.default_rng(0)
    x = random.normal(size=(batches * batch_size, 4)).astype("float32")
    return x, (x.sum(1) > 0).astype("int32")


def small_model():
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.Dense(2),
            kmp.layers.Softmax(),
        ]
    )


def compiled_model(optimizer="sgd", **arguments):
    model = small_model()
    model.compile(optimizer, "sparse_categorical_crossentropy", **arguments)
    return model


def optimizer_for(*variables, inner=None, build=True, **arguments):
    """Returns kmp's optimizer, around SGD with a learning rate of 1 by default."""
    optimizer = kmp.LossScaleOptimizer(inner or keras.optimizers.SGD(1.0), **arguments)
    if build:
        optimizer.build(list(variables))
    return optimizer


def take_step(optimizer, variables, loss_of):
    """A step of a custom training loop; returns its loss."""
    with tf.GradientTape() as tape:
        loss = loss_of()
        scaled = optimizer.scale_loss(loss)
    optimizer.apply(tape.gradient(scaled, [variable.value for variable in variables]), variables)
    return loss


def sequential(*layers, shape=(4,), optimizer="sgd", loss="mse", **arguments):
    """Returns a compiled model of these layers."""
    model = keras.Sequential([keras.Input(shape), *layers])
    model.compile(optimizer, loss, **arguments)
    return model


def without_replays(*args, **arguments):
    """Returns `kmp.callbacks.defaults` without replays, which take most of the time."""
    return kmp.callbacks.defaults(*args, **{"replay": False} | arguments)


def fit(model, callbacks=(), batches=20, epochs=1, **arguments):
    return model.fit(
        *small_data(batches),
        batch_size=8,
        epochs=epochs,
        verbose=0,
        callbacks=callbacks,
        **arguments,
    ).history


def fit_data(model, data, callbacks=(), **arguments):
    """Trains on batches of 8 rows, in the order of the data; returns the history."""
    return model.fit(
        *data, batch_size=8, shuffle=False, verbose=0, callbacks=callbacks, **arguments
    ).history


class Interrupt(keras.callbacks.Callback):
    """Interrupts training within an epoch, as Ctrl+C does."""

    def __init__(self, epoch=0):
        super().__init__()
        self.epoch = self.current_epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        self.current_epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.current_epoch, batch) == (self.epoch, 5):
            raise KeyboardInterrupt


@keras.saving.register_keras_serializable("tests")
class OverflowsBackward(keras.Layer):
    """Returns its input; the gradient is Inf where the input is large."""

    def call(self, x):
        @tf.custom_gradient
        def identity(x):
            return tf.identity(x), lambda gradient: tf.where(tf.abs(x) > 32, np.inf, 1.0) * gradient

        return identity(keras.ops.cast(x, "float32"))


def casts_of_optimized(function, arguments, dtype):
    """Returns the names of the casts to a dtype in a graph that Grappler optimized."""
    with optimized_graphs() as graphs:
        function(*arguments)
    nodes = [node for graph in graphs for node in graph.node]
    nodes += [
        node
        for graph in graphs
        for function in graph.library.function
        for node in function.node_def
    ]
    return [
        node.name
        for node in nodes
        if node.op == "Cast" and node.attr["DstT"].type == dtype.as_datatype_enum
    ]


def training_rates(float16, bfloat16, xla=1.0):
    """Returns comparisons as `measure_machine` yields them, with ratios to float32."""
    from kmp_bench import measurement, precision

    rates = {"float32": [100.0], "float16": [100.0 * float16], "bfloat16": [100.0 * bfloat16]}
    compiled = {name: [xla * rate for rate in turns] for name, turns in rates.items()}
    return [
        measurement.comparison("operations", "matrix product", "graph", rates, "GFLOP/s"),
        measurement.comparison(precision.TRAINING, "block", "graph", rates, "tokens/s"),
        measurement.comparison(precision.TRAINING, "block", "XLA", compiled, "tokens/s"),
    ]


@contextlib.contextmanager
def another_thread():
    """Yields a function that calls functions in another thread and returns their results."""
    with ThreadPoolExecutor(1) as executor:
        yield lambda function, *args, **kwargs: executor.submit(function, *args, **kwargs).result()


def tensorboard(folder, tag):
    """Returns the events with this tag in a folder's event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), {"tensors": 0}).Reload().Tensors(tag)


def is_locked(folder):
    """Whether the folder is locked, by this process or another."""
    with (folder / ".kmp.lock").open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@contextlib.contextmanager
def folder_locked_by_another_process(folder):
    """A context in which another process uses a folder, as in training. Yields that process."""
    lock = "lock = filelock.FileLock(sys.argv[1] + '/.kmp.lock'); lock.acquire()"
    code = f"import filelock, sys; {lock}; print('locked', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            process.stdout.readline()
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def file_size_limit(size):
    """Limits the size of the files that this process writes, as a quota does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def user_warnings(warned):
    """Returns the warnings for users: those of NumPy for developers differ between versions."""
    return [each for each in warned if issubclass(each.category, UserWarning)]


def values(variables):
    return [np.asarray(variable.value) for variable in variables]


def assert_trained_alike(actual, expected):
    """Checks that lists of arrays are bitwise equal.

    On a GPU they may differ by the order in which its kernels sum.
    """
    if not HAS_GPU:
        np.testing.assert_equal([*map(np.asarray, actual)], [*map(np.asarray, expected)])
        return
    for value, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-6, atol=1e-9)


def assert_equal(actual, expected):
    """Checks that two lists hold equal arrays, tensors or variables, in the same order."""
    for value, other in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(value, other)
