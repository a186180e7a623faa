"""Whether `apply` takes its gradients as unscaled: the order of the calls decides."""

import functools

import conftest
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import assert_equal, fit, small_model

import kmp

SCALE = 8.0
NOT_SCALED = r"scaled_loss = .*optimizer\.scale_loss\(loss\)"
UNKNOWN = "Pass unscaled=True if they did"


@pytest.fixture(params=["eager", "graph"])
def run_step(request):
    """Decorates a step function. XLA compiles what was traced, with the calls in that order."""
    return (lambda step: step) if request.param == "eager" else tf.function


@pytest.fixture
def weight():
    return keras.Variable([1.0, 2.0])


optimizer_for = functools.partial(conftest.optimizer_for, initial_scale=SCALE)


def gradient_of(weight, scale_loss=lambda loss: loss):
    """Returns the gradient of half the square of the weight, which is the weight."""
    with tf.GradientTape() as tape:
        loss = scale_loss(tf.reduce_sum(tf.square(weight.value)) / 2)
    return tape.gradient(loss, weight.value)


def test_gradients_are_divided_once_with_and_without_unscale(weight, run_step):
    for unscales in (False, True):
        optimizer = optimizer_for(weight, build=False)

        @run_step
        def step(optimizer=optimizer, unscales=unscales):
            gradients = [gradient_of(weight, optimizer.scale_loss)]
            clipped = (
                tf.clip_by_global_norm(optimizer.unscale(gradients), 100.0)[0]
                if unscales
                else gradients
            )
            optimizer.apply(clipped, [weight])

        for _ in range(2):
            weight.assign([1.0, 2.0])
            step()
            np.testing.assert_allclose(weight, [0.0, 0.0], atol=1e-6)


def test_function_that_scales_a_loss_before_the_optimizer_is_built_follows_the_scale(weight):
    optimizer = optimizer_for(weight, build=False)
    scaled = tf.function(lambda: [gradient_of(weight, optimizer.scale_loss)])
    for _ in range(2):
        weight.assign([1.0, 2.0])
        optimizer.apply(scaled(), [weight])
        np.testing.assert_array_equal(weight, [0.0, 0.0])
        optimizer.dynamic_scale.assign(4.0)


def test_function_that_scales_a_loss_and_builds_the_optimizer_is_traced_again(weight):
    optimizer = optimizer_for(weight, build=False)

    @tf.function
    def step():
        total = tf.zeros([2])
        for _ in tf.range(2):
            total += gradient_of(weight, optimizer.scale_loss)
        optimizer.apply([total / 2], [weight])

    step()
    np.testing.assert_array_equal(weight, [0.0, 0.0])


def test_overflow_that_is_clipped_between_functions_of_unscale_and_apply_skips_the_step(
    weight,
):
    optimizer = optimizer_for(weight)

    @tf.function
    def gradients(factor):
        optimizer.scale_loss(1.0)
        return [tf.clip_by_value(optimizer.unscale([factor * [1.0, 1.0]])[0], -1.0, 1.0)]

    update = tf.function(lambda gradients: optimizer.apply(gradients, [weight]))
    for factor, expected in (
        (np.inf, [1.0, 2.0]),
        (SCALE, [0.0, 1.0]),
        (np.nan, [0.0, 1.0]),
        (4.0, [-1.0, 0.0]),
    ):
        update(gradients(tf.constant(factor)))
        np.testing.assert_array_equal(weight, expected)
    update([tf.constant([np.inf, 1.0])])  # no unscale before it
    assert optimizer.snapshot().overflow_count == 3


def test_batch_that_is_discarded_after_unscale_leaves_nothing_behind(weight):
    optimizer = optimizer_for(weight)
    for loss, gradient in ((1.0, [np.inf, 0.0]), (np.nan, [np.nan, 0.0])):
        optimizer.scale_loss(loss)
        optimizer.unscale([tf.constant(gradient)])  # and discards the batch
        optimizer.scale_loss(1.0)
        optimizer.apply([tf.constant([SCALE, 0.0])], [weight])
    np.testing.assert_array_equal(weight, [-1.0, 2.0])
    optimizer.scale_loss(np.nan)
    optimizer.unscale([tf.constant([np.nan, 0.0])])
    optimizer.scale_loss(1.0)
    optimizer.apply([tf.constant([np.inf, 0.0])], [weight])
    snapshot = optimizer.snapshot()
    assert (snapshot.overflow_count, snapshot.nonfinite_loss_count, snapshot.loss_scale) == (
        1,
        0,
        SCALE / 2,
    )


def test_unscaled_argument_overrides_the_order_of_the_calls(weight, run_step):
    optimizer = optimizer_for(weight)

    @run_step
    def step():
        gradients = [gradient_of(weight, optimizer.scale_loss)]
        norm = tf.linalg.global_norm(optimizer.unscale(gradients))  # only looked at
        optimizer.apply(gradients, [weight], unscaled=False)
        return norm

    np.testing.assert_allclose(step(), np.sqrt(5), rtol=1e-6)
    np.testing.assert_array_equal(weight, [0.0, 0.0])
    run_step(lambda: optimizer.apply([tf.constant([1.0, 1.0])], [weight], unscaled=True))()
    np.testing.assert_array_equal(weight, [-1.0, -1.0])
    with pytest.raises(TypeError, match="`unscaled` must be True or False"):
        optimizer.apply([tf.constant([1.0, 1.0])], [weight], unscaled=1)


@pytest.mark.parametrize("traced", ["unscale", "apply"])
def test_unscale_and_apply_of_which_only_one_is_traced_need_the_argument(weight, traced):
    # A later call of the traced function calls no Python: it would take scaled gradients as
    # unscaled, or the reverse.
    optimizer = optimizer_for(weight)

    def unscale():
        return optimizer.unscale([gradient_of(weight, optimizer.scale_loss)])

    def apply(gradients, unscaled):
        optimizer.apply(gradients, [weight], unscaled=unscaled)

    if traced == "unscale":
        unscale = tf.function(unscale)
    else:
        apply = tf.function(apply)
    for _ in range(2):
        with pytest.raises(ValueError, match=UNKNOWN):
            apply(unscale(), None)
        np.testing.assert_array_equal(weight, [1.0, 2.0])
    for _ in range(2):
        weight.assign([1.0, 2.0])
        apply(unscale(), True)
        np.testing.assert_array_equal(weight, [0.0, 0.0])


def test_second_apply_after_one_unscale_needs_the_argument(weight, run_step):
    other = keras.Variable([4.0])
    optimizer = optimizer_for(weight, other)

    @run_step
    def step(unscaled):
        pair = [gradient_of(variable, optimizer.scale_loss) for variable in (weight, other)]
        first, second = optimizer.unscale(pair)
        optimizer.apply([first], [weight])
        optimizer.apply([second], [other], unscaled=unscaled)

    with pytest.raises(ValueError, match=UNKNOWN):
        step(None)
    weight.assign([1.0, 2.0])
    step(True)
    assert [*np.asarray(weight), *np.asarray(other)] == [0.0, 0.0, 0.0]


def test_gradient_penalty_that_unscales_an_inner_gradient_trains(weight, run_step):
    optimizer = optimizer_for(weight)
    x = tf.constant([1.0, 1.0])

    @run_step
    def step():
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                scaled = optimizer.scale_loss(tf.reduce_sum(weight.value * x))
            (penalty,) = optimizer.unscale([inner.gradient(scaled, x)])
            loss = optimizer.scale_loss(tf.reduce_sum(penalty**2) / 2)
        optimizer.apply([outer.gradient(loss, weight.value)], [weight])

    step()
    np.testing.assert_array_equal(weight, [0.0, 0.0])


def test_loop_without_scale_loss_warns_once_and_divides_as_keras_class_does(weight, run_step):
    optimizer = optimizer_for(weight)
    step = run_step(lambda: optimizer.apply([gradient_of(weight)], [weight]))
    with pytest.warns(UserWarning, match=NOT_SCALED) as caught:
        step()
    # On Python 3.13, TensorFlow's autograph adds deprecation warnings.
    assert [each.filename for each in caught if each.category is UserWarning] == [__file__]
    step()
    keras_weight = keras.Variable([1.0, 2.0])
    keras_optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(1.0), initial_scale=SCALE
    )
    for _ in range(2):
        keras_optimizer.apply([gradient_of(keras_weight)], [keras_weight])
    np.testing.assert_array_equal(weight, keras_weight)
    np.testing.assert_allclose(weight, np.float32([1.0, 2.0]) * (1 - 1 / SCALE) ** 2)
    assert optimizer.snapshot().loss_scale == SCALE


@pytest.mark.parametrize(
    "arguments", [{"loss_scale": 1.0, "initial_scale": 1.0}, {}], ids=["scale 1", "scaled before"]
)
def test_loop_that_needs_no_scale_loss_does_not_warn(weight, arguments):
    optimizer = optimizer_for(weight, **arguments)
    if not arguments:
        # A function that runs again calls no Python.
        tf.function(lambda: optimizer.scale_loss(1.0))()
    for _ in range(2):
        optimizer.apply([gradient_of(weight)], [weight])  # a warning would be an error


class OwnStep(keras.Model):
    unscales = False

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=False))
        gradients = tape.gradient(loss, self.trainable_variables)
        if self.unscales:
            gradients = self.optimizer.unscale(gradients)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


@pytest.mark.parametrize(("run_eagerly", "unscales"), [(False, False), (True, True)])
def test_train_step_without_scale_loss_raises_before_anything_changes(
    enabled, run_eagerly, unscales
):
    small = small_model()
    model = OwnStep(small.inputs, small.outputs)
    model.unscales = unscales
    model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=run_eagerly)
    before = model.get_weights()
    with pytest.raises(ValueError, match=NOT_SCALED) as error:
        fit(model)
    assert (
        "    scaled_loss = self.optimizer.scale_loss(loss)\n    gradients = tape.gradient("
        in str(error.value)
    )
    assert_equal(before, model.get_weights())


def test_stages_of_replicas_are_separate(two_replicas):
    with two_replicas.scope():
        weight = keras.Variable([1.0, 2.0])
        optimizer = optimizer_for(weight)

    @tf.function
    def step():
        def replica():
            unscaled = optimizer.unscale([gradient_of(weight, optimizer.scale_loss) / 2])
            context = tf.distribute.get_replica_context()
            # Lets the other replica run.
            context.all_reduce(tf.distribute.ReduceOp.SUM, tf.zeros([1]))
            optimizer.apply(unscaled, [weight])

        two_replicas.run(replica)

    step()
    np.testing.assert_array_equal(weight, [0.0, 0.0])


@pytest.mark.parametrize(
    ("gradients", "message"),
    [
        ([tf.zeros([3])], r"must have the variable's shape \(2,\). Received: shape \(3,\)"),
        ([tf.IndexedSlices(tf.zeros([1, 3]), [0], [2, 3])], r"Received: rows of shape \(None, 3\)"),
        ([tf.zeros([2]), tf.zeros([2])], "Received: 2 gradients, 1 variables"),
        ([(tf.zeros([2]), None)], r"call apply_gradients\(zip\(gradients, variables\)\)"),
    ],
)
def test_gradients_that_do_not_fit_raise_before_anything_changes(weight, gradients, message):
    for build in (True, False):
        optimizer = optimizer_for(weight, build=build)
        optimizer.scale_loss(1.0)
        with pytest.raises(ValueError, match=message):
            optimizer.apply(gradients, [weight])
        assert optimizer.built == build


def test_unknown_variable_raises_and_leaves_the_stage(weight):
    optimizer = optimizer_for(weight)
    optimizer.scale_loss(1.0)
    unscaled = optimizer.unscale([tf.constant([SCALE, 0.0])])
    with pytest.raises(ValueError, match="Unknown variable"):
        optimizer.apply(unscaled, [keras.Variable([1.0, 2.0])])
    optimizer.apply(unscaled, [weight])
    np.testing.assert_array_equal(weight, [0.0, 2.0])


def test_apply_without_variables_before_build_and_a_loss_that_is_none_raise():
    with pytest.raises(ValueError, match="not built"):
        kmp.LossScaleOptimizer("sgd").apply([tf.constant([1.0])], unscaled=False)
    with pytest.raises(TypeError, match="`loss` must be a tensor or number"):
        kmp.LossScaleOptimizer("sgd").scale_loss(None)


def test_loss_of_a_function_after_a_discarded_batch_begins_a_new_one(weight):
    optimizer = optimizer_for(weight)

    @tf.function
    def gradients(x):
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_sum(weight.value * x))
        return [tape.gradient(loss, weight.value)]

    optimizer.unscale(gradients(tf.constant(np.nan, "float32")))  # only looked at
    optimizer.apply(gradients(tf.constant(0.5)), [weight])
    np.testing.assert_array_equal(weight, [0.5, 1.5])
    optimizer.apply(optimizer.unscale(gradients(tf.constant(0.25))), [weight])
    np.testing.assert_array_equal(weight, [0.25, 1.25])


def test_gradients_that_did_not_go_through_the_last_unscale_are_refused():
    weights = [keras.Variable([1.0, 2.0]), keras.Variable([3.0, 4.0])]
    optimizer = optimizer_for(*weights)
    gradients = [gradient_of(weight, optimizer.scale_loss) for weight in weights]
    apart = [optimizer.unscale([gradient])[0] for gradient in gradients]
    with pytest.raises(
        ValueError, match=r"got 2 gradients, but the last call of `unscale` only 1\. Pass all"
    ):
        optimizer.apply(apart, weights)
    assert_equal(weights, [[1.0, 2.0], [3.0, 4.0]])
    optimizer.apply(apart, weights, unscaled=True)
    assert_equal(weights, [[0.0, 0.0], [0.0, 0.0]])


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("unscales", [False, True])
def test_variable_that_keras_overwrites_with_its_gradient_gets_it_undivided(unscales):
    weight, float8_scale, unused = (
        keras.Variable([1.0, 2.0]),
        keras.Variable(1.0),
        keras.Variable(1.0),
    )
    float8_scale.overwrite_with_gradient = True
    optimizer = optimizer_for(weight, float8_scale, unused)

    gradients = [gradient_of(weight, optimizer.scale_loss), tf.constant(0.25), None]
    optimizer.apply(
        optimizer.unscale(gradients) if unscales else gradients, [weight, float8_scale, unused]
    )
    assert_equal([weight, float8_scale], [[0.0, 0.0], 0.25])


def test_overflow_that_unscale_saw_before_the_optimizer_was_built_skips_the_step(weight):
    optimizer = optimizer_for(weight, build=False)
    optimizer.scale_loss(1.0)
    (unscaled,) = optimizer.unscale([tf.constant([np.inf, 1.0])])
    optimizer.build([weight, keras.Variable([0.0])])
    optimizer.apply([tf.clip_by_value(unscaled, -1.0, 1.0)], [weight])
    np.testing.assert_array_equal(weight, [1.0, 2.0])


def test_unscale_of_fewer_gradients_before_the_optimizer_is_built_keeps_origins_exact(weight):
    other = keras.Variable([1.0, 2.0])
    optimizer = optimizer_for(build=False)
    finite, infinite = tf.constant([1.0, 1.0]), tf.constant([np.inf, 1.0])
    optimizer.scale_loss(1.0)
    optimizer.unscale([finite])  # of a gradient penalty
    for gradients in ([finite, finite], [infinite, finite]):
        optimizer.apply(optimizer.unscale(gradients), [weight, other])
        optimizer.scale_loss(1.0)
    snapshot = optimizer.snapshot()
    assert (snapshot.overflow_count, snapshot.overflows_by_variable) == (1, {optimizer.paths[0]: 1})


def test_mark_of_a_batch_without_rows_ends_with_its_train_step(weight):
    # The optimizer may not step on each batch, as that of a generator.
    optimizer = optimizer_for(weight)
    optimizer.step_monitor.begin_train_step(tf.constant(True))
    for is_empty in (True, False):
        optimizer.step_monitor.begin_train_step(tf.constant(is_empty))
        optimizer.scale_loss(1.0)
        optimizer.apply([tf.constant([np.inf, 1.0])], [weight])
        assert optimizer.snapshot().overflow_count == (not is_empty)


def test_batch_without_rows_updates_nothing_also_if_its_gradients_are_finite(weight):
    # As with a loss that is a sum.
    optimizer = optimizer_for(weight)
    optimizer.step_monitor.begin_train_step(tf.constant(True))
    optimizer.scale_loss(0.0)
    optimizer.apply([tf.constant([SCALE, 0.0])], [weight])
    np.testing.assert_array_equal(weight, [1.0, 2.0])
    assert (optimizer.snapshot().step, optimizer.snapshot().overflow_count) == (1, 0)


def test_order_of_the_calls_does_not_matter_without_a_loss_scale(weight):
    optimizer = conftest.optimizer_for(weight, loss_scale=1.0)
    optimizer.apply(optimizer.unscale([gradient_of(weight)]), [weight])
    np.testing.assert_array_equal(weight, [0.0, 0.0])
    weight.assign([1.0, 2.0])
    optimizer.apply([gradient_of(weight)], [weight])  # the loss was not scaled, and need not be
    np.testing.assert_array_equal(weight, [0.0, 0.0])
