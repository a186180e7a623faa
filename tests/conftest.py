import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("MPLBACKEND", "agg")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")  # several processes test on one GPU
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # products that are bit for bit the same each time

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context  # what a function was optimized to is told nowhere else

import kmp

# Two devices, so that MirroredStrategy has two replicas; must come before TensorFlow makes its devices.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)


@pytest.fixture(scope="session")
def two_replicas():
    """The one strategy of two replicas: TensorFlow mixes up the collectives of a second one in the same process."""
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.fixture(scope="session")
def one_replica():
    """A strategy of one replica, on the device that a step is on which names none."""
    return tf.distribute.MirroredStrategy(["GPU:0" if tf.config.list_physical_devices("GPU") else "CPU:0"])


@pytest.fixture(autouse=True)
def clean_state():
    """Every test starts from the float32 policy and leaves no trace in Keras."""
    keras.config.set_dtype_policy("float32")
    keras.utils.set_random_seed(0)
    tf.config.experimental.enable_tensor_float_32_execution(False)  # float32 is float32, on a GPU too
    yield
    kmp.disable()
    keras.config.set_dtype_policy("float32")


@pytest.fixture
def enabled():
    with kmp.enable() as handle:
        yield handle


MODES = {
    "eager": {"run_eagerly": True},
    "graph": {"jit_compile": False},  # by default Keras takes XLA where there is a GPU
    "xla": {"jit_compile": True},
    "steps_per_execution": {"steps_per_execution": 8, "jit_compile": False},
}


@pytest.fixture(params=MODES)
def compile_mode(request):
    """Arguments of `compile` for each way that Keras runs a training step."""
    return MODES[request.param]


@pytest.fixture(params=["eager", "graph", "xla"])
def run_step(request):
    """Decorates a step function for each way that TensorFlow runs it."""
    if request.param == "eager":
        return lambda step: step
    return tf.function(jit_compile=request.param == "xla")


def small_data(batches=20, batch_size=8):
    random = np.random.default_rng(0)
    x = random.normal(size=(batches * batch_size, 4)).astype("float32")
    return x, (x.sum(1) > 0).astype("int32")


def small_model():
    return keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(2), kmp.layers.Softmax()]
    )


def compiled_model(optimizer="sgd", **arguments):
    model = small_model()
    model.compile(optimizer, "sparse_categorical_crossentropy", **arguments)
    return model


def fit(model, callbacks=(), batches=20, epochs=1, **arguments):
    return model.fit(
        *small_data(batches), batch_size=8, epochs=epochs, verbose=0, callbacks=callbacks, **arguments
    ).history


class Interrupt(keras.callbacks.Callback):
    """Stops a training within an epoch, as a user does."""

    def __init__(self, epoch=0):
        super().__init__()
        self.epoch = self.at = epoch

    def on_epoch_begin(self, epoch, logs=None):
        self.at = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.at, batch) == (self.epoch, 5):
            raise KeyboardInterrupt


@keras.saving.register_keras_serializable("tests")
class OverflowsBackward(keras.Layer):
    """Passes its input on; the gradient is inf where the input is large."""

    def call(self, x):
        @tf.custom_gradient
        def passing(x):
            return tf.identity(x), lambda gradient: tf.where(tf.abs(x) > 32, np.inf, 1.0) * gradient

        return passing(keras.ops.cast(x, "float32"))


def casts_of_optimized(function, arguments, dtype):
    """Returns the names of the casts to a dtype in what TensorFlow's grappler makes of a `tf.function`."""
    context.enable_run_metadata()
    try:
        function(*arguments)
        graphs = [found.post_optimization_graph for found in context.export_run_metadata().function_graphs]
    finally:
        context.disable_run_metadata()
    nodes = [node for graph in graphs for node in graph.node]
    nodes += [node for graph in graphs for function in graph.library.function for node in function.node_def]
    return [node.name for node in nodes if node.op == "Cast" and node.attr["DstT"].type == dtype.as_datatype_enum]


def values(variables):
    return [np.asarray(variable.value) for variable in variables]
