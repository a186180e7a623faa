import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import small_data, small_model
from keras import ops

import kmp
from kmp.optimizer import gradient_ancestry

NEVER_SCALED = "a loss that was not multiplied by the loss scale"
DIVIDED_ANYWAY = "before any loss went through `scale_loss`"


@pytest.fixture
def weight():
    return keras.Variable([1.0, 2.0])


def optimizer_for(weight, **arguments):
    optimizer = kmp.LossScaleOptimizer(keras.optimizers.SGD(1.0), **arguments)
    optimizer.build([weight])
    return optimizer


def gradient_of(weight, scale_loss, factor=1.0):
    """Returns the gradient of half the square of the weight, which is the weight."""
    with tf.GradientTape() as tape:
        loss = scale_loss(factor * tf.reduce_sum(tf.square(weight.value)) / 2)
    return tape.gradient(loss, weight.value)


def unscaled_loss(loss):
    return loss


def test_loop_without_scale_loss_trains_as_with_the_scale_1_and_warns_once(weight, run_step, tmp_path):
    optimizer = optimizer_for(weight)

    @run_step
    def step():
        optimizer.apply([gradient_of(weight, unscaled_loss, 0.5)], [weight])

    with pytest.warns(UserWarning, match=NEVER_SCALED):
        step()
    tf.train.Checkpoint(optimizer=optimizer).save(tmp_path / "state")  # reads the loss scale
    step()
    np.testing.assert_array_equal(weight, [0.25, 0.5])
    snapshot = optimizer.snapshot()
    assert (snapshot.step, snapshot.unscaled_steps, snapshot.loss_scale, snapshot.clean_steps) == (2, 2, 2.0**15, 0)


def test_overflow_without_scale_loss_skips_the_step_and_keeps_the_scale(weight, run_step):
    optimizer = optimizer_for(weight)

    @run_step
    def step(x):
        optimizer.apply([gradient_of(weight, unscaled_loss, tf.reduce_max(x))], [weight])

    with pytest.warns(UserWarning, match=NEVER_SCALED):
        step(tf.constant([1.0, np.inf, 1.0]))
    np.testing.assert_array_equal(weight, [1.0, 2.0])
    assert (optimizer.snapshot().overflow_count, optimizer.snapshot().loss_scale) == (1, 2.0**15)


def clipped(gradients):
    return tf.clip_by_global_norm(gradients, 1.0)[0]


def test_unscaled_gradients_are_recognised(weight, run_step):
    optimizer = optimizer_for(weight, initial_scale=8.0)

    @run_step
    def step():
        unscaled = optimizer.unscale([gradient_of(weight, optimizer.scale_loss)])
        optimizer.apply(unscaled, [weight])

    step()
    np.testing.assert_array_equal(weight, [0.0, 0.0])


def test_clipped_unscaled_gradients_are_recognised_in_a_graph_and_refused_in_eager_mode(weight, run_step):
    optimizer = optimizer_for(weight, initial_scale=8.0)

    @run_step
    def step(unscaled):
        gradients = clipped(optimizer.unscale([gradient_of(weight, optimizer.scale_loss)]))
        optimizer.apply(gradients, [weight], unscaled=unscaled)

    if run_step(tf.executing_eagerly)() is True:
        with pytest.raises(ValueError, match="Pass unscaled=True"):
            step(None)
        np.testing.assert_array_equal(weight, [1.0, 2.0])
        step(True)
    else:
        step(None)
    expected = np.float32([1.0, 2.0]) * (1 - 1 / np.sqrt(np.float32(5)))
    np.testing.assert_allclose(weight, expected, rtol=1e-6)


def test_gradients_that_are_only_inspected_are_divided(weight, run_step):
    optimizer = optimizer_for(weight, initial_scale=8.0)

    @run_step
    def step():
        gradient = gradient_of(weight, optimizer.scale_loss)
        norm = tf.norm(optimizer.unscale([gradient])[0])
        optimizer.apply([gradient], [weight])
        return norm

    assert float(step()) == np.float32(np.sqrt(5))
    np.testing.assert_array_equal(weight, [0.0, 0.0])


def test_gradients_clipped_by_their_unscaled_norm_are_divided(weight):
    optimizer = optimizer_for(weight, initial_scale=8.0)

    @tf.function
    def step():
        gradient = gradient_of(weight, optimizer.scale_loss)
        optimizer.apply([gradient / tf.norm(optimizer.unscale([gradient])[0])], [weight])

    step()
    np.testing.assert_allclose(weight, np.float32([1.0, 2.0]) * (1 - 1 / np.sqrt(5)), rtol=1e-6)


def in_loop(unscaled):
    total = tf.zeros([2])
    for _ in tf.range(2):
        total += unscaled() / 2
    return total


@pytest.mark.parametrize(
    "call",
    [
        lambda unscaled: tf.function(unscaled)(),
        in_loop,
        lambda unscaled: tf.cond(tf.range(2)[1] > 0, unscaled, lambda: unscaled() * 0.5),
        lambda unscaled: tf.switch_case(tf.range(2)[1], [lambda: unscaled() * 0.5, unscaled]),
    ],
    ids=["function", "loop", "branch", "switch"],
)
def test_gradients_that_a_function_loop_or_branch_unscales_are_recognised(weight, call):
    optimizer = optimizer_for(weight, initial_scale=8.0)

    @tf.function
    def step():
        optimizer.apply([call(lambda: optimizer.unscale([gradient_of(weight, optimizer.scale_loss)])[0])], [weight])

    step()
    np.testing.assert_array_equal(weight, [0.0, 0.0])


def test_gradients_of_which_only_some_are_unscaled_raise(run_step):
    first, second = keras.Variable([1.0]), keras.Variable([2.0])
    optimizer = kmp.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=8.0)
    optimizer.build([first, second])

    @run_step
    def step():
        gradients = [gradient_of(variable, optimizer.scale_loss) for variable in (first, second)]
        optimizer.apply([*optimizer.unscale(gradients[:1]), gradients[1]], [first, second])

    with pytest.raises(ValueError, match="Pass all through `unscale`, or none"):
        step()
    assert (float(first[0]), float(second[0])) == (1.0, 2.0)


def test_eager_gradients_of_one_call_of_unscale_may_be_applied_in_several(weight):
    other = keras.Variable([4.0])
    optimizer = kmp.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=8.0)
    optimizer.build([weight, other])
    unscaled = optimizer.unscale([gradient_of(variable, optimizer.scale_loss) for variable in (weight, other)])
    optimizer.apply(unscaled[:1], [weight])
    optimizer.apply(unscaled[1:], [other])
    assert [*np.asarray(weight), *np.asarray(other)] == [0.0, 0.0, 0.0]


def test_eager_gradient_penalty_that_unscales_an_inner_gradient_trains(weight):
    optimizer = optimizer_for(weight, initial_scale=8.0)
    x = tf.constant([1.0, 1.0])
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            inner.watch(x)
            scaled = optimizer.scale_loss(tf.reduce_sum(weight.value * x))
        (penalty,) = optimizer.unscale([inner.gradient(scaled, x)])
        loss = optimizer.scale_loss(tf.reduce_sum(penalty**2) / 2)
    optimizer.apply([outer.gradient(loss, weight.value)], [weight])
    np.testing.assert_array_equal(weight, [0.0, 0.0])


def scale_as_argument(optimizer, weight):
    step = tf.function(lambda scale: optimizer.apply([gradient_of(weight, lambda loss: loss * scale)], [weight]))
    step(optimizer.loss_scale)


def scale_read_before(optimizer, weight):
    scale = optimizer.loss_scale
    tf.function(lambda: optimizer.apply([gradient_of(weight, lambda loss: loss * scale)], [weight]))()


def accumulated_gradient(optimizer, weight):
    accumulated = tf.Variable([8.0, 16.0])
    tf.function(lambda: optimizer.apply([accumulated * tf.cast(weight.value != 0, tf.float32)], [weight]))()


def projected_gradient(optimizer, weight):
    step = tf.function(lambda gradient: optimizer.apply([gradient + 0 * weight.value], [weight]))
    step(tf.constant([8.0, 16.0]))


def scaled_in_python(optimizer, weight):
    def scale_loss(loss):
        return tf.py_function(lambda loss: loss * 8.0, [loss], tf.float32)

    tf.function(lambda: optimizer.apply([gradient_of(weight, scale_loss)], [weight]))()


@pytest.mark.parametrize(
    "step", [scale_as_argument, scale_read_before, accumulated_gradient, projected_gradient, scaled_in_python]
)
def test_gradients_of_unknown_origin_are_divided_and_warn(weight, step):
    with pytest.warns(UserWarning, match=DIVIDED_ANYWAY):
        step(optimizer_for(weight, initial_scale=8.0), weight)
    np.testing.assert_array_equal(weight, [0.0, 0.0])


def test_loss_multiplied_by_the_number_of_a_fixed_scale_is_divided_and_warns(weight, run_step):
    optimizer = optimizer_for(weight, loss_scale=8.0)
    step = run_step(lambda: optimizer.apply([gradient_of(weight, lambda loss: loss * 8.0)], [weight]))
    with pytest.warns(UserWarning, match=DIVIDED_ANYWAY):
        step()
    np.testing.assert_array_equal(weight, [0.0, 0.0])


def test_second_update_of_a_step_without_scale_loss_is_not_divided_either():
    first, second = keras.Variable([2.0]), keras.Variable([0.0])
    optimizer = kmp.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=8.0)
    optimizer.build([first, second])

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(first.value**2 / 4 + second.value)
        gradients = tape.gradient(loss, [first.value, second.value])
        optimizer.apply(gradients[:1], [first])
        optimizer.apply(gradients[1:], [second])  # a constant

    with pytest.warns(UserWarning, match=NEVER_SCALED):
        step()
    assert (float(first[0]), float(second[0])) == (1.0, -1.0)


def test_eager_loop_after_a_training_with_another_optimizer_trains_without_scale_loss(weight):
    before = keras.Variable([1.0])
    earlier = optimizer_for(before)
    earlier.apply([gradient_of(before, earlier.scale_loss)], [before])
    optimizer = optimizer_for(weight)
    with pytest.warns(UserWarning, match=NEVER_SCALED):
        optimizer.apply([gradient_of(weight, unscaled_loss)], [weight])
    np.testing.assert_array_equal(weight, [0.0, 0.0])


def test_search_visits_each_tensor_of_a_called_function_once():
    weights = [keras.Variable(np.eye(2, dtype="float32")) for _ in range(30)]

    @tf.function
    def gradients(x):
        with tf.GradientTape() as tape:
            for weight in weights:
                x = tf.matmul(x, weight.value)
            loss = tf.reduce_sum(x)
        return tape.gradient(loss, [weight.value for weight in weights])

    visited = []

    @tf.function
    def step(x):
        search = gradient_ancestry._Search(gradients(x), {})
        search.run()
        visited.extend(search._seen)

    step(tf.ones([1, 2]))
    assert len(weights) < len(visited) < 20 * len(weights)


@pytest.mark.parametrize("name", ["loss_scale", "dynamic_scale"])
def test_loss_scaled_by_hand_is_divided_and_warns(weight, run_step, name):
    optimizer = optimizer_for(weight, initial_scale=8.0)

    @run_step
    def step():
        optimizer.apply([gradient_of(weight, lambda loss: loss * getattr(optimizer, name))], [weight])

    with pytest.warns(UserWarning, match=DIVIDED_ANYWAY):
        step()
    np.testing.assert_array_equal(weight, [0.0, 0.0])
    assert optimizer.snapshot().unscaled_steps == 0


def test_scale_loss_of_another_optimizer_is_divided_and_warns(weight, run_step):
    other = optimizer_for(keras.Variable([1.0]), initial_scale=8.0)
    optimizer = optimizer_for(weight, initial_scale=8.0)

    @run_step
    def step():
        optimizer.apply([gradient_of(weight, other.scale_loss)], [weight])

    with pytest.warns(UserWarning, match=DIVIDED_ANYWAY):
        step()
    np.testing.assert_array_equal(weight, [0.0, 0.0])


def test_first_step_with_zero_gradients_neither_warns_nor_decides_for_later_steps(weight, run_step):
    optimizer = kmp.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=8.0)
    run_step(lambda: optimizer.apply([tf.zeros([2])], [weight]))()

    @run_step
    def step():
        optimizer.apply([gradient_of(weight, optimizer.scale_loss)], [weight])

    step()
    np.testing.assert_array_equal(weight, [0.0, 0.0])
    assert optimizer.snapshot().unscaled_steps == 0


def test_two_updates_with_the_gradients_of_one_loss_are_both_divided(run_step):
    first, second = keras.Variable([1.0]), keras.Variable([2.0])
    optimizer = kmp.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=8.0)
    optimizer.build([first, second])

    @run_step
    def step():
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_sum(first.value * second.value))
        gradients = tape.gradient(loss, [first.value, second.value])
        optimizer.apply(gradients[:1], [first])
        optimizer.apply(gradients[1:], [second])

    step()
    assert (float(first[0]), float(second[0])) == (-1.0, 1.0)


@pytest.mark.parametrize("scales", [True, False])
def test_gradient_of_an_inner_function_or_loop_is_recognised(weight, scales):
    optimizer = optimizer_for(weight, **({"loss_scale": 8.0} if scales else {"initial_scale": 8.0}))
    scale_loss = optimizer.scale_loss if scales else unscaled_loss
    inner = tf.function(lambda: gradient_of(weight, scale_loss))

    @tf.function
    def step():
        optimizer.apply([inner()], [weight])
        for _ in tf.range(1):
            optimizer.apply([inner() + 1.0], [weight])

    with warnings.catch_warnings():
        warnings.simplefilter("error" if scales else "ignore")
        step()
    np.testing.assert_array_equal(weight, [-0.125, -0.125] if scales else [-1.0, -1.0])
    assert optimizer.snapshot().unscaled_steps == (0 if scales else 2)


def test_gradients_that_are_arguments_are_divided_also_without_a_recorded_loss(weight):
    optimizer = optimizer_for(weight, initial_scale=8.0)
    apply = tf.function(lambda gradient: optimizer.apply([gradient], [weight]))
    with pytest.warns(UserWarning, match=DIVIDED_ANYWAY):
        apply(tf.constant([8.0, 8.0]))
    np.testing.assert_array_equal(weight, [0.0, 1.0])


@pytest.mark.parametrize("arguments", [{}, {"jit_compile": True}, {"steps_per_execution": 4}, {"run_eagerly": True}])
def test_train_step_without_scale_loss_trains_and_warns(enabled, arguments):
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = small_model()

        def call(self, x):
            return self.inner(x)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"own_loss": loss}

    model = Model()
    model.compile(keras.optimizers.SGD(0.5), "sparse_categorical_crossentropy", **{"jit_compile": False} | arguments)
    callbacks = kmp.callbacks.defaults(every_n_steps=4)
    with pytest.warns(UserWarning, match=NEVER_SCALED):
        history = model.fit(*small_data(), epochs=3, verbose=0, callbacks=callbacks).history
    assert history["own_loss"][-1] < 0.7 * history["own_loss"][0]
    assert history["loss_scale"] == [1.0] * 3
    run = callbacks[0].run
    assert (run.last("unscaled_steps"), run.samples[-1].loss_scale) == (15, 1.0)
    assert [finding.cause for finding in kmp.advise(run)] == ["not_scaled"]
    snapshot = model.optimizer.snapshot()
    assert (snapshot.step, snapshot.unscaled_steps) == (15, 15)


def test_replicas_recognise_scaled_unscaled_and_never_scaled_gradients(two_replicas):
    with two_replicas.scope():
        weight = keras.Variable([1.0, 2.0])
        optimizer = optimizer_for(weight, initial_scale=8.0)

    def run(gradient):
        two_replicas.run(tf.function(lambda: optimizer.apply(gradient(), [weight])))
        return np.asarray(weight.value).tolist()

    assert run(lambda: [gradient_of(weight, optimizer.scale_loss, 0.25)]) == [0.5, 1.0]
    assert run(lambda: optimizer.unscale([gradient_of(weight, optimizer.scale_loss, 0.25)])) == [0.25, 0.5]
    with pytest.warns(UserWarning, match=NEVER_SCALED):
        assert run(lambda: [gradient_of(weight, unscaled_loss, 0.25)]) == [0.125, 0.25]


def test_restored_optimizer_needs_no_loss_before_its_first_step(weight, tmp_path):
    optimizer = optimizer_for(weight, initial_scale=8.0)
    optimizer.apply([gradient_of(weight, optimizer.scale_loss, 0.5)], [weight])
    path = tf.train.Checkpoint(optimizer=optimizer).save(tmp_path / "state")
    restored = optimizer_for(weight, initial_scale=4.0)
    tf.train.Checkpoint(optimizer=restored).restore(path).assert_existing_objects_matched()
    tf.function(lambda: restored.apply([gradient_of(weight, restored.scale_loss)], [weight]))()
    np.testing.assert_array_equal(weight, [0.0, 0.0])
    assert restored.snapshot().loss_scale == 8.0


@pytest.mark.parametrize(
    ("gradients", "message"),
    [
        ([ops.ones([3])], r"The gradient of 'weight' must have the variable's shape \(2,\). Received: shape \(3,\)"),
        (
            [tf.IndexedSlices(tf.ones([1, 3]), tf.constant([0]))],
            r"variable's shape \(2,\). Received: rows of shape \(3,\)",
        ),
        ([(ops.ones([2]), 1)], r"two lists: apply\(gradients, variables\). For pairs, call apply_gradients"),
        ([], "Received: 0 gradients, 1 variables"),
    ],
)
def test_gradients_that_do_not_fit_raise_before_anything_changes(gradients, message):
    weight = keras.Variable([1.0, 2.0], name="weight")
    optimizer = optimizer_for(weight)
    with pytest.raises(ValueError, match=message):
        optimizer.apply(gradients)
    assert optimizer.snapshot().step == 0


def test_zip_of_gradients_and_variables_is_explained_before_the_optimizer_is_built(weight):
    optimizer = kmp.LossScaleOptimizer("sgd")
    with pytest.raises(ValueError, match="two lists"):
        optimizer.apply(zip([ops.ones([2])], [weight], strict=True))
    optimizer.apply_gradients(zip([ops.zeros([2])], [weight], strict=True))


def test_loss_that_is_none_raises(weight):
    with pytest.raises(TypeError, match="`loss` must be a tensor or number. Received: loss=None"):
        optimizer_for(weight).scale_loss(None)
