import re

import keras
import matrix
import pytest
import tensorflow as tf
from gpu_kernels import GPU, XLA_GPU, Copy, Placement, place

import kmp
from kmp.backend import tensorflow_internals, xla
from kmp.backend.compiled_parts import in_step
from kmp.gradients.tensor_statistics import gradient_statistics, update_statistics
from kmp.guarding.guarded_step import guarded_step_of

pytestmark = pytest.mark.skipif(
    not tf.test.is_built_with_cuda(),
    reason="GPU kernels are registered only in TensorFlow's CUDA build.",
)


@pytest.fixture
def compiled_for_a_gpu(monkeypatch):
    """Makes a compiled step what it is on a GPU."""
    monkeypatch.setattr(xla, "has_gpu", lambda: True)


def training_step(model, **options):
    """Traces a model's compiled training step without running it."""
    x, y = ({name: values[:8] for name, values in matrix.data()[0].items()}, matrix.data()[1][:8])
    model._symbolic_build(data_batch=(x, y))
    step = tf.function(lambda x, y: model.train_step((x, y)), autograph=False, **options)
    return step.get_concrete_function(keras.tree.map_structure(tf.constant, x), tf.constant(y))


def unwrapped_model(option):
    model = matrix.make_model(option)
    model.compile(
        model.optimizer.inner_optimizer, "sparse_categorical_crossentropy", auto_scale_loss=False
    )
    return model


def captured(model):
    """Samples, and keeps the batches of skipped steps, as `fit` does: beside the step."""
    monitor = kmp.callbacks.Monitor()
    monitor.set_model(model)
    monitor.on_train_begin()
    guarded_step_of(model).kept.is_keeping = True
    return model


@pytest.mark.usefixtures("compiled_for_a_gpu")
@pytest.mark.parametrize("option", matrix.OPTIONS)
def test_compiled_step_copies_nothing_to_the_host(option):
    """A branch on a value of the device makes the host wait for it: a finite step has none."""
    baseline = place(training_step(unwrapped_model(option)), in_branches=False)
    with kmp.enable():
        placement = place(
            training_step(matrix.make_model(option, compiles_step=True)), in_branches=False
        )
        model = captured(matrix.make_model(option, compiles_step=True))
        with_callbacks = place(training_step(model), in_branches=False)
    assert placement.copies - baseline.copies == {}
    assert placement.without_kernel <= baseline.without_kernel
    assert with_callbacks.copies - baseline.copies == {}


@pytest.mark.parametrize("option", matrix.OPTIONS)
def test_step_copies_only_branch_conditions_to_the_host(option):
    baseline = place(training_step(unwrapped_model(option)))
    with kmp.enable():
        placement = place(training_step(captured(matrix.make_model(option, compiles_step=False))))
    added = placement.copies - baseline.copies
    assert {copy.dtype for copy in added} == {"bool"}
    assert {copy.operation for copy in added} <= {"If", "StatelessIf"}
    assert {copy.shape for copy in added} == {()}
    assert placement.without_kernel <= baseline.without_kernel


@pytest.mark.usefixtures("compiled_for_a_gpu")
@pytest.mark.parametrize("option", matrix.OPTIONS)
def test_xla_has_a_gpu_kernel_for_every_operation_of_a_step(option, xla_on_gpu):
    with kmp.enable():
        model = captured(matrix.make_model(option, jit_compile=True))
        assert place(training_step(model, jit_compile=True), XLA_GPU).without_kernel == {}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("cls", [kmp.layers.BatchNormalization, keras.layers.BatchNormalization])
def test_batch_normalization_runs_on_the_device_in_both_directions(cls, is_frozen, dtype):
    with kmp.enable(f"mixed_{dtype}"):
        layer = cls()
    layer.build((None, 4, 4, 8))
    weights = [weight.value for weight in layer.trainable_weights]
    layer.trainable = not is_frozen

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
        return tape.gradient(y, [x, *weights])

    for rows in (8, None):
        spec = tf.TensorSpec([rows, 4, 4, 8], dtype)
        function = tf.function(step, autograph=False).get_concrete_function(spec)
        placement = place(function)
        operations = function.graph.get_operations()
        gradients = [op for op in operations if op.type == "FusedBatchNormGradV3"]
        # TensorFlow refuses those of given statistics on a GPU with op determinism.
        assert [op.get_attr("is_training") for op in gradients] == [True] * (not is_frozen)
        assert placement.copies == {}
        assert placement.without_kernel == {}


@pytest.mark.parametrize(
    ("make", "size"),
    [
        (keras.layers.LayerNormalization, 4),
        (keras.layers.LayerNormalization, None),
        (lambda: keras.layers.GroupNormalization(4), 4),
        (keras.layers.RMSNormalization, 4),
        (keras.layers.BatchNormalization, 4),
        (lambda: keras.layers.BatchNormalization(axis=1), 4),
        (lambda: keras.layers.Activation("gelu"), 4),
        (lambda: keras.layers.Activation("softmax"), 4),
    ],
)
def test_xla_has_a_gpu_kernel_for_every_operation_of_a_compiled_part(make, size):
    with kmp.enable():
        layer = make()
        layer.build((None, 4, 4, 8))

        def step(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = layer(x, training=True)
            return tape.gradient(y, [x, *(weight.value for weight in layer.trainable_weights)])

        spec = tf.TensorSpec([None, size, 4, 8], tf.float16)
        with xla.traced_for_gpu(), in_step():
            function = tf.function(step, autograph=False).get_concrete_function(spec)
    calls = [op for op in function.graph.get_operations() if op.type == "PartitionedCall"]
    assert len(calls) >= 2
    assert place(function) == Placement()


def test_deterministic_statistics_are_measured_on_the_device(monkeypatch):
    monkeypatch.setattr(tensorflow_internals, "is_deterministic", lambda: True)
    gradients = [tf.ones([3, 700]), tf.ones([2**22]), tf.ones([5])]
    measure = tf.function(lambda tensors: tuple(gradient_statistics(tensors)), autograph=False)
    placement = place(measure.get_concrete_function(gradients))
    assert {copy.operation for copy in placement.copies} <= {"If", "StatelessIf"}
    assert placement.without_kernel == {}


def test_updates_are_measured_on_the_device():
    before = [tf.ones([3, 700]), tf.ones([2**22]), tf.ones([5])]
    measure = tf.function(lambda after: update_statistics(before, after), autograph=False)
    assert place(measure.get_concrete_function(before)).copies == {}


def test_step_uses_no_int32_variables():
    with kmp.enable():
        model = captured(matrix.make_model("ema, accumulation"))
        variables = training_step(model).graph.variables
    assert {variable.dtype for variable in variables} == {tf.int64, tf.float32, tf.float64}


def test_statistics_lower_for_a_gpu():
    gradients = [tf.ones([3, 700]), tf.ones([2**22])]
    hlo = lowered(lambda tensors: tuple(gradient_statistics(tensors)), gradients)
    assert "->(s64[2,280]{1,0}, f32[2]{0}, f64[2]{0})" in hlo


def test_products_lower_to_float16_and_sensitive_operations_to_float32():
    images = keras.Input((8, 8, 8))
    with kmp.enable():
        hidden = keras.layers.BatchNormalization()(keras.layers.Conv2D(16, 3)(images))
        hidden = keras.layers.Reshape((36, 16))(hidden)
        hidden = keras.layers.LayerNormalization()(
            keras.layers.MultiHeadAttention(2, 8)(hidden, hidden)
        )
        model = keras.Model(images, kmp.layers.Softmax()(keras.layers.Dense(8)(hidden)))

    def gradients_and_state(weights, state, x):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            outputs, state = model.stateless_call(weights, state, x, training=True)
        return tape.gradient(outputs, weights), state

    variables = model.trainable_variables, model.non_trainable_variables
    constants = [[tf.constant(variable.value) for variable in part] for part in variables]
    hlo = lowered(gradients_and_state, *constants, tf.ones([2, 8, 8, 8]))
    results = re.findall(r"= (\w+)\[[^ ]+ (\w+)\(", hlo)
    dtypes = {
        operation: {dtype for dtype, other in results if other == operation}
        for _, operation in results
    }
    assert dtypes["dot"] == dtypes["convolution"] == {"f16"}
    assert dtypes["exponential"] == dtypes["rsqrt"] == {"f32"}
    assert dtypes["reduce"] <= {"f32", "s32"}


def lowered(function, *arguments):
    """Returns the HLO for a GPU.

    Variables cannot be lowered without a GPU, so functions must take their values.
    """
    compiled = tf.function(function, jit_compile=True, autograph=False)
    return compiled.experimental_get_compiler_ir(*arguments)(stage="hlo", platform_name="GPU")


@pytest.fixture(scope="module")
def xla_on_gpu():
    """Makes TensorFlow register XLA's kernels, which happens when it first lowers a function."""
    lowered(lambda x: x + 1.0, tf.ones([1]))


def test_place_detects_copies_to_the_host():
    @tf.function(autograph=False)
    def through_the_host(x):
        exponents = tf.bitcast(x, tf.int32)
        return tf.cond(
            x[0] > 0, lambda: tf.reshape(exponents, [2, 2]), lambda: tf.zeros([2, 2], tf.int32)
        )

    placement = place(through_the_host.get_concrete_function(tf.ones([4])))
    assert placement.copies == {
        Copy("StatelessIf", "bool", ()): 1,
        Copy("Reshape", "int32", (4,)): 1,
    }
    assert placement.without_kernel == {}


def test_place_rejects_unsupported_calls():
    branch = tf.function(lambda x: tf.switch_case(x, [lambda: 1.0, lambda: 2.0]), autograph=False)
    with pytest.raises(NotImplementedError, match="Functions called by .*Case are not supported"):
        place(branch.get_concrete_function(tf.constant(1)))


def test_place_detects_operations_without_a_gpu_kernel(xla_on_gpu):
    as_string = tf.function(tf.strings.as_string, autograph=False).get_concrete_function(
        tf.ones([4])
    )
    for devices in (GPU, XLA_GPU):
        assert place(as_string, devices).without_kernel["AsString", ("float32",)] == 1
