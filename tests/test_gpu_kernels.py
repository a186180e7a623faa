import re

import keras
import matrix
import pytest
import tensorflow as tf
from gpu_kernels import GPU, Copy, place

import kmp
from kmp.gradients import tensor_statistics

pytestmark = pytest.mark.skipif(
    not tf.test.is_built_with_cuda(), reason="TensorFlow's CUDA build knows what runs on a GPU; this is another build."
)
XLA_GPU = ("XLA_GPU_JIT",)


def training_step(model, **options):
    """Returns a model's compiled training step, traced and not run."""
    x, y = ({name: values[:8] for name, values in matrix.data()[0].items()}, matrix.data()[1][:8])
    model._symbolic_build(data_batch=(x, y))
    step = tf.function(lambda x, y: model.train_step((x, y)), autograph=False, **options)
    return step.get_concrete_function(keras.tree.map_structure(tf.constant, x), tf.constant(y))


def bare_model(option):
    model = matrix.make_model(option)
    model.compile(model.optimizer.inner_optimizer, "sparse_categorical_crossentropy", auto_scale_loss=False)
    return model


def plain(model):
    return model


def sampled(model):
    model.optimizer.prepare_sampling()
    return model


def sampled_unscaled(model):
    """A scale that is no power of two, whose unscaled histogram is counted anew."""
    keep = model.optimizer.inner_optimizer
    model.compile(kmp.LossScaleOptimizer(keep, loss_scale=1000.0), "sparse_categorical_crossentropy")
    return sampled(model)


def probed(model):
    probe = kmp.callbacks.ForwardProbe()
    probe.set_model(model)
    probe.on_train_begin()
    return model


@pytest.mark.parametrize("prepare", [plain, sampled, sampled_unscaled, probed])
@pytest.mark.parametrize("option", matrix.OPTIONS)
def test_a_step_copies_nothing_to_the_host_but_what_its_branches_are_taken_by(option, prepare):
    bare = place(training_step(bare_model(option)))
    with kmp.enable():
        ours = place(training_step(prepare(matrix.make_model(option))))
    added = ours.copies - bare.copies
    assert {copy.dtype for copy in added} == {"bool"}
    assert {copy.operation for copy in added} <= {"If", "StatelessIf"}
    assert {copy.shape for copy in added} == {()}
    assert ours.without_kernel <= bare.without_kernel


@pytest.mark.parametrize("prepare", [plain, sampled, sampled_unscaled, probed])
@pytest.mark.parametrize("option", matrix.OPTIONS)
def test_xla_has_every_operation_of_a_step_on_a_gpu(option, prepare, xla_on_gpu):
    with kmp.enable():
        model = prepare(matrix.make_model(option, jit_compile=True))
        assert place(training_step(model, jit_compile=True), XLA_GPU).without_kernel == {}


def test_deterministic_statistics_are_measured_on_the_device(monkeypatch):
    monkeypatch.setattr(statistics, "_is_deterministic", lambda: True)
    gradients = [tf.ones([3, 700]), tf.ones([2**22]), tf.ones([5])]
    measure = tf.function(lambda given: tuple(tensor_statistics.of_gradients(given)), autograph=False)
    found = place(measure.get_concrete_function(gradients))
    assert {copy.operation for copy in found.copies} <= {"If", "StatelessIf"}
    assert found.without_kernel == {}


def test_updates_are_measured_on_the_device():
    before = [tf.ones([3, 700]), tf.ones([2**22]), tf.ones([5])]
    measure = tf.function(lambda after: tuple(tensor_statistics.of_updates(before, after)), autograph=False)
    assert place(measure.get_concrete_function(before)).copies == {}


def test_no_variable_of_a_step_is_int32():
    with kmp.enable():
        model = sampled(matrix.make_model("ema"))
        used = training_step(model).graph.variables
    assert {variable.dtype for variable in used} == {tf.int64, tf.float32, tf.float64}


def test_statistics_lower_for_a_gpu():
    text = lowered(lambda given: tuple(tensor_statistics.of_gradients(given)), [tf.ones([3, 700]), tf.ones([2**22])])
    assert "->(s64[2,280]{1,0}, f32[2]{0}, f64[2]{0})" in text


def test_products_lower_to_float16_and_what_is_sensitive_to_float32():
    images = keras.Input((8, 8, 8))
    with kmp.enable():
        hidden = keras.layers.BatchNormalization()(keras.layers.Conv2D(16, 3)(images))
        hidden = keras.layers.Reshape((36, 16))(hidden)
        hidden = keras.layers.LayerNormalization()(keras.layers.MultiHeadAttention(2, 8)(hidden, hidden))
        model = keras.Model(images, kmp.layers.Softmax()(keras.layers.Dense(8)(hidden)))

    def train(weights, others, x):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            outputs, others = model.stateless_call(weights, others, x, training=True)
        return tape.gradient(outputs, weights), others

    parts = model.trainable_variables, model.non_trainable_variables
    kept = [[tf.constant(variable.value) for variable in part] for part in parts]
    found = re.findall(r"= (\w+)\[[^ ]+ (\w+)\(", lowered(train, *kept, tf.ones([2, 8, 8, 8])))
    dtypes = {operation: {dtype for dtype, other in found if other == operation} for _, operation in found}
    assert dtypes["dot"] == dtypes["convolution"] == {"f16"}
    assert dtypes["exponential"] == dtypes["rsqrt"] == {"f32"}
    assert dtypes["reduce"] <= {"f32", "s32"}


def lowered(function, *given):
    """Returns what XLA is given for a GPU; variables cannot be lowered without one, so functions take their values."""
    compiled = tf.function(function, jit_compile=True, autograph=False)
    return compiled.experimental_get_compiler_ir(*given)(stage="hlo", platform_name="GPU")


@pytest.fixture(scope="module")
def xla_on_gpu():
    """TensorFlow registers XLA's kernels when it first lowers something."""
    lowered(lambda x: x + 1.0, tf.ones([1]))


def test_what_has_to_go_through_the_host_is_found():
    @tf.function(autograph=False)
    def through_the_host(x):
        exponents = tf.bitcast(x, tf.int32)
        return tf.cond(x[0] > 0, lambda: tf.reshape(exponents, [2, 2]), lambda: tf.zeros([2, 2], tf.int32))

    found = place(through_the_host.get_concrete_function(tf.ones([4])))
    assert found.copies == {Copy("StatelessIf", "bool", ()): 1, Copy("Reshape", "int32", (4,)): 1}
    assert found.without_kernel == {}


def test_calls_that_are_not_followed_are_refused():
    branch = tf.function(lambda x: tf.switch_case(x, [lambda: 1.0, lambda: 2.0]), autograph=False)
    with pytest.raises(NotImplementedError, match="Case calls is not followed"):
        place(branch.get_concrete_function(tf.constant(1)))


def test_what_no_gpu_can_do_is_found(xla_on_gpu):
    words = tf.function(tf.strings.as_string, autograph=False).get_concrete_function(tf.ones([4]))
    for devices in (GPU, XLA_GPU):
        assert place(words, devices).without_kernel["AsString", ("float32",)] == 1
