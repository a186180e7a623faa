import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import OverflowsBackward, optimizer_for, without_replays
from msgspec import UNSET

import kmp


def chain(*indices):
    """Returns the loss of a network with the weight of an index in each layer."""

    def loss(weights):
        x = tf.constant([0.3])
        for index in indices:
            x = tf.nn.tanh(x * weights[index])
        return tf.reduce_sum(x)

    return loss


def looked_up(weights):
    return tf.reduce_sum(tf.gather(weights[1], [0]) * weights[0])


ORDERS = {
    "from the input": (chain(0, 1, 2, 3), [0, 1, 2, 3]),
    "from the loss": (chain(3, 2, 1, 0), [3, 2, 1, 0]),
    "mixed": (chain(2, 0, 3, 1), [2, 0, 3, 1]),
    "mixed, clipped": (chain(2, 0, 3, 1), [2, 0, 3, 1]),
    "used twice": (chain(1, 0, 2, 1), [1, 0, 2, 3]),  # at its first use; without a gradient last
    "sparse": (looked_up, [1, 0, 2, 3]),
    "sparse, clipped": (looked_up, [1, 0, 2, 3]),
}


@pytest.mark.parametrize(
    ("run_step", "name"),
    [*[("graph", name) for name in ORDERS], ("eager", "mixed")],
    indirect=["run_step"],
)
@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
def test_variables_have_the_order_of_the_network_in_a_graph_and_of_the_list_eagerly(run_step, name):
    variables = [keras.Variable([0.5], name=f"v{index}") for index in range(4)]
    optimizer = optimizer_for(*variables)
    (loss_of, expected), is_clipped = ORDERS[name], "clipped" in name

    def step():
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(loss_of([variable.value for variable in variables]))
        gradients = tape.gradient(loss, [variable.value for variable in variables])
        clipped = [
            None if gradient is None else tf.clip_by_norm(gradient, 1.0) for gradient in gradients
        ]
        optimizer.apply(clipped if is_clipped else gradients, variables)

    traced = run_step(step)
    traced()
    names = [variables[index].path for index in (range(4) if traced is step else expected)]
    assert list(optimizer.variables_by_path()) == names


class Backwards(keras.Model):
    """Creates its layers from the loss to the input; the gradient overflows after the second."""

    def __init__(self):
        super().__init__()
        self.fourth, self.third, self.second, self.first = (
            keras.layers.Dense(4, name=name) for name in "dcba"
        )
        self.overflow, self.other = (
            OverflowsBackward(),
            keras.layers.Dense(1, name="e", dtype="float32"),
        )

    def call(self, inputs):
        return self.other(self.fourth(self.third(self.overflow(self.second(self.first(inputs))))))


def trained(x, **arguments):
    with kmp.enable(initial_scale=1.0):
        model = Backwards()
        model.compile("sgd", "mse", **arguments)
        callbacks = without_replays(every_n_steps=2, on_nonfinite="ignore")
        model.fit(
            x, np.zeros((len(x), 1)), batch_size=4, verbose=0, shuffle=False, callbacks=callbacks
        )
    return model, callbacks[0].run


def test_overflow_origin_is_nearest_to_the_loss_in_call_order():
    x = np.ones((24, 4), "float32")
    x[4:8] = x[16:20] = 200
    model, run = trained(x, jit_compile=False)
    snapshot = model.optimizer.snapshot()
    assert snapshot.overflow_count == 2
    assert set(snapshot.overflows_by_variable.values()) == {2}
    assert {path.split("/")[-2] for path in snapshot.overflows_by_variable} == {"a", "b"}
    assert snapshot.overflow_origin.split("/")[-2] == "b"
    assert snapshot.overflow_origins_by_variable == {snapshot.overflow_origin: 2}
    assert run.last("overflow_origins_by_variable") == snapshot.overflow_origins_by_variable
    assert run.last("overflow_origin") == snapshot.overflow_origin


def test_origin_of_gradients_that_are_clipped_by_the_norm_of_all_is_that_before_the_clip():
    # Not in the order of their use.
    last, first = variables = [keras.Variable([2.0]), keras.Variable([3.0])]
    optimizer = optimizer_for(*variables)

    @tf.custom_gradient
    def overflows_backward(x):
        return tf.identity(x), lambda gradient: gradient * np.inf

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(
                tf.reduce_sum(overflows_backward(last * tf.tanh(first.value)))
            )
        gradients = optimizer.unscale(tape.gradient(loss, [last.value, first.value]))
        optimizer.apply(tf.clip_by_global_norm(gradients, 1.0)[0], variables)

    step()
    snapshot = optimizer.snapshot()
    assert len(snapshot.overflows_by_variable) == 2
    assert snapshot.overflow_origin == optimizer.paths[0]


def test_nonfinite_loss_has_no_overflow_origin():
    x = np.ones((24, 4), "float32")
    x[4:8], x[12:20] = 200, np.nan
    model, run = trained(x, steps_per_execution=2)
    snapshot = model.optimizer.snapshot()
    assert (
        snapshot.overflow_count,
        snapshot.nonfinite_loss_count,
        snapshot.nonfinite_losses_in_a_row,
    ) == (3, 2, 0)
    assert snapshot.overflow_origin.split("/")[-2] == "b"
    assert snapshot.overflow_origins_by_variable == {snapshot.overflow_origin: 1}
    by_layer = {
        path.split("/")[-2]: count for path, count in snapshot.overflows_by_variable.items()
    }
    # NaN in the loss is in all gradients.
    assert by_layer == {"a": 3, "b": 3, "c": 2, "d": 2, "e": 2}
    rows = [row for row in run.rows if row.overflow_count is not UNSET]
    assert [row.nonfinite_losses_in_a_row for row in rows] == [0, 1, 0]
    assert [row.overflow_origin is not UNSET for row in rows] == [True, False, False]


def test_snapshot_has_the_last_loss_and_the_highest_finite_one_after_the_first_step():
    variable = keras.Variable([1.0])
    optimizer = optimizer_for(variable)
    optimizer.scale_loss(2.0)
    assert optimizer.snapshot().last_loss is None
    for loss in (2.0, -50.0, np.inf, np.nan, 3.0):
        optimizer.scale_loss(loss)
        optimizer.apply([tf.zeros([1])], [variable])
    assert optimizer.snapshot().highest_loss == 50.0
    assert optimizer.snapshot().last_loss == 3.0


@pytest.mark.parametrize(
    ("loss", "arguments"),
    [
        (tf.zeros([0]), {}),
        (tf.constant(1e39, tf.float64), {}),
        (tf.constant([3e38, 3e38]), {"loss_scale": 2.0**-14}),
    ],
)
def test_finite_loss_whose_mean_is_not_finite_updates(loss, arguments):
    variable = keras.Variable([1.0])
    optimizer = optimizer_for(variable, **arguments)
    scale = float(optimizer.loss_scale)
    for expected in (0.5, 0.0):
        optimizer.scale_loss(loss)
        optimizer.apply([tf.constant([0.5]) * scale], [variable])
        np.testing.assert_array_equal(variable, [expected])
    snapshot = optimizer.snapshot()
    assert (snapshot.overflow_count, snapshot.loss_scale, snapshot.highest_loss) == (0, scale, 0.0)
