import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import sequential
from keras import layers, ops
from models import Cube
from passes import passes_of

import kmp
from kmp.callbacks.batch_replayer import CRITERIA
from kmp.records.replay import LOSS_FUNCTION, InvalidTargets
from kmp.replay import StepContext, replay_batch
from kmp.replay.passes import as_array

pytestmark = pytest.mark.usefixtures("enabled")
ROWS = 8


def masked(x, constant):
    """Masks half of its inputs with a constant, which may be infinite in float16."""
    kept = ops.cast(ops.arange(x.shape[-1]) < 2, x.dtype)
    return ops.softmax(x + (1.0 - kept) * constant)


def normalized(x):
    return x * ops.rsqrt(ops.mean(ops.square(x), -1, keepdims=True) + 1e-12)


class Penalty(keras.layers.Layer):
    def __init__(self, loss_of, **options):
        super().__init__(**options)
        self.loss_of = loss_of

    def call(self, x):
        self.add_loss(self.loss_of(x))
        return x


def model_of(*hidden, loss="mse", outputs=1, **options):
    first = layers.Dense(4, kernel_initializer="ones", name="first")
    head = layers.Dense(outputs, kernel_initializer="ones", dtype="float32", name="head")
    return sequential(first, *hidden, head, loss=loss, loss_weights=[1e-9], **options)


def replayed(model, x=None, y=None, loss_scale=8.0, **options):
    x = np.linspace(0, 1, 4 * ROWS, dtype="float32").reshape(ROWS, 4) if x is None else x
    y = np.zeros((len(x), 1), "float32") if y is None else y
    context = StepContext(1, loss_scale, **options)
    return replay_batch(passes_of(model, (x, y)), context, CRITERIA)[0]


def named(paths):
    return [path.rpartition("/")[2] for path in paths]


def test_finite_batch_has_finite_passes():
    result = replayed(model_of())
    assert (result.is_finite, result.is_finite_in_float32) == (True, True)
    assert (result.operations, result.float32_layers) == ([], [])
    assert result.loss == pytest.approx(result.float32_loss, rel=1e-2)
    assert (
        result.examples,
        result.gradients.flushed,
        result.gradients.zero,
        result.batch.nonfinite,
    ) == (
        ROWS,
        {},
        [],
        None,
    )


def test_layer_without_rows_in_its_output_is_replayed():
    class Chosen(keras.layers.Layer):
        """Adds the mean of the rows above a threshold, of which there are none."""

        def __init__(self, **options):
            super().__init__(**options)
            self.dense = layers.Dense(4)

        def call(self, x):
            chosen = self.dense(tf.boolean_mask(x, tf.reduce_min(x, 1) > 1e3))
            return x + tf.reduce_sum(chosen, 0)

    result = replayed(model_of(Chosen()))
    assert (result.is_finite, result.output_error < 1e-2) == (True, True)


def test_usable_scale_is_that_of_the_gradients_in_16_bits():
    def scale_with(dtype):
        to_units, end = (
            layers.Lambda(lambda x: x * 1e-3, dtype=dtype),
            layers.Activation("linear", dtype="float32"),
        )
        model = sequential(layers.Dense(1, name="first"), to_units, end)
        return replayed(model, y=np.full((ROWS, 1), 1e6, "float32")).gradients.usable_scale

    # It computes in float16.
    in_float32 = layers.Dense(1, activation=lambda x: ops.cast(x, "float32") * 1e-3)
    assert (
        replayed(
            sequential(in_float32), y=np.full((ROWS, 1), 1e6, "float32")
        ).gradients.usable_scale
        == 2.0**3
    )
    # The gradient of the last outputs is 2.5e5, and that of the first kernel about 1e3.
    assert (scale_with("float32"), scale_with("mixed_float16")) == (2.0**3, 2.0**-4)


def test_gradients_of_the_weights_of_a_float32_layer_do_not_lower_the_usable_scale():
    first = layers.Dense(1, kernel_initializer=keras.initializers.Constant(1e3), name="first")
    head = layers.Dense(
        1, kernel_initializer=keras.initializers.Constant(1e-3), dtype="float32", name="head"
    )
    model, scales = sequential(first, head), []
    for head.trainable in (False, True):
        result = replayed(model, np.ones((ROWS, 4), "float32"), np.full((ROWS, 1), 1e4, "float32"))
        scales.append(result.gradients.usable_scale)
    assert scales[0] == scales[1] < 2.0**20


@pytest.mark.parametrize(
    ("function", "x", "operation", "constants"),
    [
        (lambda x: masked(x, ops.cast(-1e9, x.dtype)), None, "Cast", [-1e9]),
        (normalized, np.zeros((ROWS, 4), "float32"), "Rsqrt", [1e-12]),
        (lambda x: x * x * x, np.full((ROWS, 4), 15.0, "float32"), "Mul", []),
    ],
)
def test_first_nonfinite_operation_lost_constants_and_the_layer_for_float32_are_found(
    function, x, operation, constants
):
    result = replayed(model_of(layers.Lambda(function, name="lossy")), x)
    assert (result.is_finite, result.is_finite_in_float32, result.loss) == (False, True, None)
    assert np.isfinite(result.float32_loss)
    assert (result.operations[0].operation, result.operations[0].has_infinite_constant) == (
        operation,
        False,
    )
    assert named([result.operations[0].layer]) == named(result.float32_layers) == ["lossy"]
    assert list(result.overflow.lost_constants.values()) == [pytest.approx(constants)] * bool(
        constants
    )
    assert named(result.overflow.lost_constants) == ["lossy"] * bool(constants)


# Keras' cast of the constant.
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_constant_that_is_infinite_in_float16_is_where_inf_begins():
    first, *_ = replayed(model_of(layers.Lambda(lambda x: x + 1e5, name="lossy"))).operations
    assert (named([first.layer]), first.operation, first.value) == (["lossy"], "AddV2", "inf")
    assert (first.has_infinite_constant, first.is_backward) == (True, False)
    infinite = layers.Lambda(lambda x: masked(x, ops.convert_to_tensor(-np.inf, x.dtype)))
    assert replayed(model_of(infinite)).operations[0].has_infinite_constant


def test_added_loss_is_told_from_an_output():
    result = replayed(model_of(Penalty(lambda x: ops.sum(ops.square(x * 30)), name="penalty")))
    assert named([result.operations[0].layer]) == ["penalty"]
    assert named(result.overflow.outputs) == []
    assert named(result.float32_layers) == ["penalty"]


class OwnLoss(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **_):
        return ops.sum(ops.square(y_pred * ops.cast(300.0, y_pred.dtype))) * ops.cast(
            1e-9, y_pred.dtype
        )


def test_loss_in_the_dtype_of_the_output_is_found_and_needs_the_last_layer_in_float32():
    model = OwnLoss(
        [
            keras.Input((4,)),
            *(layers.Dense(2, kernel_initializer="ones", name=name) for name in "ab"),
        ]
    )
    model.compile("sgd")
    result = replayed(model)
    assert (result.operations[0].layer, result.operations[0].dtype) == (LOSS_FUNCTION, "float16")
    assert named(result.float32_layers) == ["b"]


def test_chain_of_layers_that_overflow_is_found_as_a_whole():
    chain = [
        layers.Dense(4, kernel_initializer=keras.initializers.Constant(30.0), name=name)
        for name in "bcde"
    ]
    model = model_of(*chain)
    model.compile("sgd", "mse", loss_weights=[1e-15])
    assert named(replayed(model, np.ones((ROWS, 4), "float32")).float32_layers) == ["d", "e"]


def replay_of_towers(weight, initial_scale=2.0**15):
    """Returns the replay of two towers whose gradients a factor of about `weight` divides."""
    inputs, outputs = keras.Input((4,)), []
    for name in ("large", "small"):
        hidden = layers.Dense(4, kernel_initializer="ones", name=f"{name}_hidden")(inputs)
        head = layers.Dense(1, kernel_initializer="ones", dtype="float32", name=name)
        outputs.append(head(hidden))
    model = keras.Model(inputs, outputs)
    model.compile("sgd", ["mse"] * 2, loss_weights=[1.0, weight])
    x = np.random.default_rng(0).uniform(1, 2, (ROWS, 4)).astype("float32")
    y = [np.full((ROWS, 1), 1e3, "float32"), np.ones((ROWS, 1), "float32")]
    return replayed(model, x, y, loss_scale=2.0**12, initial_scale=initial_scale)


def test_cure_of_an_overflow_keeps_the_gradients_of_another_branch():
    replay = replay_of_towers(1e-11)
    assert replay.gradients.usable_scale < 2.0**4
    search = replay.search
    assert (search.layers, search.branch) == (["large_hidden"], ["small_hidden"])
    assert 2.0**4 <= search.loss_scale <= 2.0**15


@pytest.mark.parametrize(
    ("weight", "initial_scale"),
    [
        (1e-3, 2.0**15),  # not flushed at the usable scale
        (1e-20, 2.0**15),  # also flushed at the initial scale, without any overflow
        pytest.param(1e-11, 2.0**4, marks=pytest.mark.exhaustive),  # flushed there too
        pytest.param(0.0, 2.0**15, marks=pytest.mark.exhaustive),
    ],
)
def test_branch_that_no_change_would_keep_or_lose_does_not_change_the_cure(weight, initial_scale):
    search = replay_of_towers(weight, initial_scale).search
    assert (search.is_found, search.layers) == (True, [])
    assert (search.branch, search.loss_scale) == ([], None)


@pytest.mark.parametrize(("min_scale", "needed"), [(2.0**-14, []), (1.0, ["first"])])
def test_overflow_needs_no_layer_if_a_scale_that_the_rule_reaches_is_usable(min_scale, needed):
    to_units = layers.Lambda(lambda x: x * 30, dtype="float32", name="to_units")
    model = sequential(layers.Dense(1, kernel_initializer="ones", name="first"), to_units)
    y = np.full((ROWS, 1), 4e4, "float32")
    result = replayed(model, y=y, loss_scale=2.0**10, min_scale=min_scale)
    assert result.gradients.usable_scale < 1.0
    assert (result.search.is_found, named(result.search.layers)) == (True, needed)


@pytest.mark.parametrize(("weight", "needed"), [(1.0, []), (1e-9, ["in_meters"])])
def test_gradients_inside_of_a_layer_need_a_lower_scale_and_float32_only_if_that_flushes_others(
    weight, needed
):
    inputs = keras.Input((4,))
    # Inside, the gradients are 1000 times as large as those of the outputs.
    in_meters = layers.Lambda(lambda x: 1000.0 * ops.tanh(x / 1000.0), name="in_meters")
    depth = in_meters(layers.Dense(4, kernel_initializer="ones", name="hidden")(inputs))
    other = layers.Dense(1, kernel_initializer="ones", dtype="float32", name="other")(
        layers.Dense(4, kernel_initializer="ones", name="other_hidden")(inputs)
    )
    outputs = [layers.Dense(1, kernel_initializer="ones", name="depth")(depth), other]
    model = keras.Model(inputs, outputs)
    model.compile("sgd", ["mse"] * 2, loss_weights=[1.0, weight])
    y = [np.full((ROWS, 1), 1e3, "float32"), np.ones((ROWS, 1), "float32")]
    result = replayed(model, np.ones((ROWS, 4), "float32"), y, loss_scale=2.0**12)
    assert not result.is_finite
    assert (result.search.is_found, named(result.search.layers)) == (True, needed)
    assert (result.gradients.usable_scale < 1.0) == (not needed)


def test_overflow_needs_a_layer_if_the_only_usable_scales_flush_other_gradients():
    small = keras.initializers.Constant(2e-13)
    model = sequential(
        layers.Dense(4, kernel_initializer="ones", name="first"),
        layers.Dense(4, kernel_initializer=small, name="vanishing"),
        layers.Dense(1, kernel_initializer="ones", name="large"),
        layers.Activation("linear", dtype="float32"),
    )
    result = replayed(model, y=np.full((ROWS, 1), 1e6, "float32"), loss_scale=2.0**10)
    assert result.gradients.usable_scale < 2.0**-3
    assert "large" in named(result.search.layers)


def test_gradients_that_vanish_on_their_way_to_the_input_do_not_change_the_cure():
    small = keras.initializers.Constant(1e-13)
    model = sequential(
        layers.Dense(4, kernel_initializer="ones", name="first"),
        layers.Dense(4, kernel_initializer=small, name="vanishing"),
        layers.Dense(1, kernel_initializer="ones", dtype="float32", name="head"),
    )
    replay = replayed(model, y=np.full((ROWS, 1), 1e3, "float32"), loss_scale=2.0**15)
    assert (replay.search.is_found, replay.search.layers, replay.search.branch) == (True, [], [])


def test_flushed_gradients_are_told_from_zeros():
    inputs = keras.Input((4,))
    alive = layers.Dense(1, dtype="float32", name="alive")(inputs)
    dead = layers.Dense(
        4, activation="relu", kernel_initializer=keras.initializers.Constant(-1), name="dead"
    )
    small = layers.Dense(1, name="small", kernel_initializer="ones")(dead(inputs))
    tiny = layers.Dense(1, name="tiny", kernel_initializer="ones")(inputs)
    model = keras.Model(inputs, [alive, small, tiny])
    model.compile("sgd", ["mse"] * 3, loss_weights=[1.0, 1.0, 1e-9])
    x = np.ones((ROWS, 4), "float32")
    y = [np.ones((ROWS, 1), "float32") for _ in range(3)]
    result = replayed(model, x, y, loss_scale=1.0)
    assert result.gradients.flushed == {"tiny/kernel": 1.0, "tiny/bias": 1.0}
    assert result.gradients.zero == ["dead/kernel", "dead/bias", "small/kernel"]


def test_invalid_targets_are_found_without_a_pass():
    model = model_of(outputs=3, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    assert replayed(model, y=np.arange(ROWS) % 3).batch.invalid_targets is None
    assert replayed(model, y=np.arange(ROWS) % 6).batch.invalid_targets == InvalidTargets(
        0, 5, 3, from_logits=True
    )
    expected = InvalidTargets(-1, 1, 3, only_invalid=-1, from_logits=True)
    assert replayed(model, y=np.arange(ROWS) % 3 - 1).batch.invalid_targets == expected


@pytest.mark.parametrize("value", [pytest.param(np.nan, marks=pytest.mark.exhaustive), 7e4])
def test_batch_with_nan_or_too_large_inputs_is_named(value):
    x = np.ones((ROWS, 4), "float32")
    x[3, 2] = value
    assert replayed(model_of(), x).batch.nonfinite.part == "the batch's x"


def test_nan_in_a_variable_is_named():
    model = model_of()
    model.layers[0].bias.assign([0.0, np.nan, 0.0, 0.0])
    result = replayed(model)
    assert result.batch.nonfinite_variables == [model.layers[0].bias.path]
    assert not result.is_finite_in_float32


@pytest.mark.parametrize(
    ("loss", "size"),
    [
        ("mse", 1e-3),  # with small inputs the gradients of the outputs are the largest
        ("mse", 1e3),  # with large ones those of the kernels
        (keras.losses.MeanSquaredError(reduction="sum"), 1e-3),
    ],
)
def test_usable_scale_takes_the_size_of_the_training_batch_into_account_unless_the_loss_is_a_sum(
    loss, size
):
    model, x, y = (
        model_of(loss=loss),
        np.full((ROWS, 4), size, "float32"),
        np.ones((ROWS, 1), "float32"),
    )
    whole = [np.tile(each, (4, 1)) for each in (x, y)] if loss == "mse" else (x, y)
    assert (
        replayed(model, x, y, batch_size=4 * ROWS).gradients.usable_scale
        == replayed(model, *whole).gradients.usable_scale
    )


def test_model_with_float16_variables_is_replayed():
    with kmp.enable("float16"):
        assert replayed(sequential(layers.Dense(4), layers.Dense(1))).is_finite_in_float32


def test_infinities_that_do_no_harm_do_not_hide_the_nan():
    def mask(x):  # in rows that always keep something
        return ops.softmax(
            x + ops.where(ops.arange(4) < 2, ops.cast(0, x.dtype), ops.cast(-np.inf, x.dtype))
        )

    masks = [layers.Lambda(mask, name=f"mask_{number}") for number in range(12)]
    found = replayed(
        model_of(*masks, layers.Lambda(lambda x: ops.sqrt(x - 1.0), name="root"))
    ).operations
    assert [operation.operation for operation in found if operation.value == "nan"] == ["Sqrt"]
    assert [operation.has_negative_input for operation in found if operation.value == "nan"] == [
        True
    ]


@pytest.mark.parametrize(
    ("function", "smallest"),
    [(lambda x: x**-0.5, 0.0), (lambda x: x / ops.cast(1e-7, x.dtype), 1e-7)],
)
def test_smallest_input_is_that_of_the_divisor(function, smallest):
    divide = layers.Lambda(lambda x: function(x * ops.cast(ops.arange(4), x.dtype)))
    result = replayed(model_of(divide), np.ones((ROWS, 4), "float32"))
    assert result.operations[0].smallest_input == pytest.approx(smallest, rel=0.2)


def test_overflow_between_layers_needs_the_layer_before_in_float32():
    inputs = keras.Input((4,))
    x = layers.Dense(4, kernel_initializer="ones", name="before")(inputs)
    outputs = layers.Dense(1, kernel_initializer="ones", name="after", dtype="float32")(x * x * x)
    model = keras.Model(inputs, outputs, name="net")
    model.compile("sgd", "mse", loss_weights=[1e-9])
    result = replayed(model, np.full((ROWS, 4), 15.0, "float32"))
    assert (named(result.float32_layers), result.operations[0].layer) == (["before"], "net")


def test_layer_with_a_function_of_its_own_is_replayed():
    class Traced(keras.layers.Layer):
        def __init__(self, **options):
            super().__init__(**options)
            self.inner = layers.Dense(4, name="inner")

        @tf.function
        def call(self, x):
            return self.inner(x)

    model = sequential(
        Traced(), Cube(name="cube"), layers.Dense(1, dtype="float32"), loss_weights=[1e-12]
    )
    result = replayed(model, np.full((ROWS, 4), 100.0, "float32"))
    assert named(result.float32_layers) == ["cube"]


def test_gradient_of_an_embedding_has_the_rows_of_the_batch():
    words = np.array([[1, 2], [1, 3]])
    parts = (
        layers.Embedding(1000, 4, name="words"),
        layers.GlobalAveragePooling1D(),
        layers.Dense(1, dtype="float32"),
    )
    model = sequential(*parts, shape=(2,), loss_weights=[1e-9])
    result = replayed(model, words, np.ones((2, 1), "float32"), loss_scale=1.0)
    assert named(path for path, share in result.gradients.flushed.items() if share == 1.0) == [
        "embeddings"
    ]
    slices = tf.IndexedSlices(
        tf.ones((3, 2), tf.float16), tf.constant([7, 5, 7]), dense_shape=tf.constant([9, 2])
    )
    np.testing.assert_array_equal(as_array(slices), [[1, 1], [2, 2]])


def test_targets_are_compared_with_the_output_of_their_name():
    inputs = keras.Input((4,))
    model = keras.Model(
        inputs, [layers.Dense(n, name=name)(inputs) for name, n in (("b", 3), ("a", 5))]
    )
    model.compile(
        "sgd", [keras.losses.SparseCategoricalCrossentropy(from_logits=True) for _ in model.outputs]
    )
    x, y = np.ones((ROWS, 4), "float32"), {"a": np.arange(ROWS) % 5, "b": np.arange(ROWS) % 3}
    assert replayed(model, x, y).batch.invalid_targets is None
    invalid = replayed(model, x, y | {"a": np.arange(ROWS)}).batch.invalid_targets
    assert (invalid.key, invalid.output, invalid.classes) == ("['a']", 1, 5)


def test_only_invalid_target_is_a_mark_of_what_is_missing():
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = sequential(layers.Dense(3), shape=(2, 4), loss=loss)
    y = np.tile([0, 255], (ROWS, 1))
    invalid = replayed(model, np.ones((ROWS, 2, 4), "float32"), y).batch.invalid_targets
    assert (invalid.only_invalid, invalid.per_example, invalid.from_logits) == (255, 2, True)


def test_sum_over_the_batch_is_replayed_with_its_size():
    penalty = Penalty(lambda x: ops.sum(x * 100) * ops.cast(1e-6, x.dtype), name="penalty")
    model, size = model_of(penalty), 64 * ROWS
    assert replayed(model, batch_size=size).is_finite
    many = replayed(model, batch_size=size, failed="gradients")
    assert (many.examples, named(many.float32_layers)) == (size, ["penalty"])
    overflowing = replayed(model, batch_size=size, loss_scale=2.0**60, failed="loss")
    assert (overflowing.examples, overflowing.loss) == (size, None)


@pytest.mark.parametrize(
    "loss", ["binary_crossentropy", keras.losses.BinaryCrossentropy(from_logits=True)]
)
def test_targets_of_a_binary_cross_entropy_are_from_0_to_1(loss):
    model = model_of(loss=loss)
    assert replayed(model, y=np.ones((ROWS, 1))).batch.invalid_targets is None
    invalid = replayed(model, y=np.full((ROWS, 1), 2.0)).batch.invalid_targets
    assert (invalid.smallest, invalid.largest, invalid.is_binary) == (2.0, 2.0, True)


def test_targets_of_another_loss_are_no_classes():
    def root_of_negative(y_true, y_pred):
        return ops.sqrt(-1.0 - ops.square(y_true - y_pred))

    result = replayed(
        model_of(outputs=3, loss=root_of_negative), y=np.full((ROWS, 1), 40.0, "float32")
    )
    assert (result.batch.invalid_targets, result.is_finite_in_float32) == (None, False)
    assert result.operations[0].operation == "Sqrt"


def test_gradient_penalty_through_a_normalization_is_compared_with_the_code_that_trains():
    class Critic(keras.Sequential):
        def train_step(self, data):
            x, _ = data
            with tf.GradientTape() as tape:
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    scores = self(x, training=True)
                slopes = tf.cast(inner.gradient(scores, x), tf.float32)
                scaled = self.optimizer.scale_loss(
                    tf.reduce_mean((tf.norm(slopes, axis=1) - 1) ** 2)
                )
            gradients = tape.gradient(scaled, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {}

    keras.utils.set_random_seed(0)
    hidden = layers.Dense(6), layers.BatchNormalization(), layers.Activation("tanh")
    model = Critic([keras.Input((6,)), *hidden, layers.Dense(1, dtype="float32")])
    model.compile("sgd", jit_compile=False)
    x = tf.constant(np.random.default_rng(0).normal(size=(ROWS, 6)).astype("float32"))
    # Keras' code in the float32 pass would differ by 0.026 in the gradient of the first layer.
    gradients = replayed(model, x, x[:, :1]).comparison.gradients
    assert 0 < max(each.error for each in gradients) < 5e-3
