"""A model built under `kmp.enable` and one that is converted have the same float32 layers.

They differ where one of the two cannot know or should not decide; each difference is listed with
its reason.
"""

import keras
import models
import pytest
import tensorflow as tf
from keras import layers
from models import Block

import kmp
from kmp.backend.keras_internals import is_passthrough
from kmp.conversion.model_parts import parts_of
from kmp.layers.float32_rules import RULES, Moment

OUTPUT = "model output"  # a layer does not know at its creation that it is one
SOFTMAX = "exp, sum and division"  # nor whether its softmax is one; `compile` warns of it
ACTIVATION = "overflow float16"  # nor whether its exponential is one
CUSTOM = "powers overflow float16"  # of a program that is written for 16 bits
ADDS_LOSS = "calls add_loss"  # it has no sublayers yet
WRAPS = "wraps "  # the wrapper is created before or after the layer; it computes nothing itself
INPUTS = "all its inputs are float32"  # only a graph has inputs
EPSILON = "the constant 1e-12"  # an attribute that its `__init__` sets later
ROWS = "it looks up"  # under `enable`, kmp keeps the indices exact


def sequential(*hidden, shape=(8,)):
    return keras.Sequential([keras.Input(shape), layers.Dense(8, name="first"), *hidden])


def ending(*hidden, shape=(8,)):
    last = layers.Dense(8, dtype="float32", name="last")
    return sequential(*hidden, layers.Dense(8, name="before"), last, shape=shape)


def attention():
    inputs = keras.Input((4, 8))
    x = layers.MultiHeadAttention(2, 4, name="attention")(inputs, inputs)
    x = layers.LayerNormalization(name="norm")(x + inputs)
    return keras.Model(inputs, kmp.layers.Softmax(name="probabilities")(x))


def images():
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Rescaling(1 / 255, name="rescaling"),
            layers.RandomFlip(name="flip"),
            layers.Conv2D(4, 3, name="conv"),
            layers.BatchNormalization(name="norm"),
            layers.UpSampling2D(interpolation="bilinear", name="up"),
            layers.Conv2D(4, 3, name="last", dtype="float32"),
        ]
    )


def rounds_float_ids():
    class Tokens(layers.Layer):
        def __init__(self, **arguments):
            super().__init__(**arguments)
            self.table = layers.Embedding(6000, 4, name="table", dtype=self.dtype_policy)

        def call(self, ids):
            return self.table(ids)

    ids = keras.Input((3,), name="ids")
    return keras.Model(
        ids, layers.Dense(1, dtype="float32", name="last")(Tokens(name="tokens")(ids))
    )


class AddsLoss(layers.Layer):
    def call(self, x):
        self.add_loss(keras.ops.mean(x))
        return x


class HasEpsilon(layers.Layer):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.epsilon = 1e-12

    def call(self, x):
        return x / (x + self.epsilon)


REGULARIZED = {"activity_regularizer": "l2", "name": "regularized"}
# The architecture, the policy, and by path why a converted model has it in float32 alone.
CASES = {
    "output": (lambda: sequential(layers.Dense(2, name="last")), {"last": OUTPUT}),
    "output of kmp": (lambda: sequential(kmp.layers.Softmax(name="probabilities")), {}),
    "dense softmax": (
        lambda: sequential(layers.Dense(2, "softmax", name="last")),
        {"last": SOFTMAX},
    ),
    "softmax": (lambda: ending(layers.Softmax(name="softmax")), {"softmax": SOFTMAX}),
    "softmax of TensorFlow": (
        lambda: ending(layers.Dense(8, activation=tf.nn.softmax, name="gate")),
        {"gate": SOFTMAX},
    ),
    "exponential": (
        lambda: ending(layers.Activation("exponential", name="exp")),
        {"exp": ACTIVATION},
    ),
    "attention": (attention, {}),
    "images": (images, {}),
    "recurrent": (lambda: ending(layers.LSTM(4, name="lstm"), shape=(3, 8)), {}),
    "mask": (lambda: ending(layers.Masking(-9999.0, name="mask"), shape=(3, 8)), {}),
    "regularized": (lambda: ending(layers.Dense(8, **REGULARIZED)), {}),
    "unit norm": (lambda: ending(layers.UnitNormalization(name="unit")), {}),
    "wrapped": (
        lambda: ending(
            layers.TimeDistributed(layers.UnitNormalization(name="unit"), name="each"),
            shape=(3, 8),
        ),
        {"each": WRAPS},
    ),
    "after float32": (
        lambda: ending(layers.UnitNormalization(name="unit"), layers.ReLU(name="relu")),
        {"relu": INPUTS},
    ),
    "block": (lambda: ending(Block(8, name="block")), {}),
    "lambda": (lambda: ending(layers.Lambda(keras.ops.square, name="twice")), {"twice": CUSTOM}),
    "adds a loss": (lambda: ending(AddsLoss(name="adds")), {"adds": ADDS_LOSS}),
    "epsilon": (lambda: ending(HasEpsilon(name="divides")), {"divides": EPSILON}),
    "float ids": (rounds_float_ids, {"tokens": ROWS, "tokens/table": "inside tokens"}),
}


def float32_layers(model, original):
    """Returns the layers that compute in float32, by their paths in the original."""
    found = set()
    for part, named in zip(parts_of(model), parts_of(original), strict=True):
        computes = part.is_layer and not is_passthrough(part.operation)
        if computes and part.operation.compute_dtype == "float32":
            found.add(named.path)
    return found


# One for each kind of reason that depends on the format or on the dtype of the weights.
IN_EACH_POLICY = ["softmax", "recurrent", "regularized", "float ids", "epsilon"]
PAIRS = [
    pytest.param(
        *(name, policy),
        marks=[]
        if policy == "mixed_float16" or name in IN_EACH_POLICY
        else [pytest.mark.exhaustive],
    )
    for name in CASES
    for policy in ("mixed_float16", "mixed_bfloat16", "float16")
]


@pytest.mark.parametrize(("name", "policy"), PAIRS)
def test_enable_and_convert_keep_the_same_layers_in_float32(name, policy):
    make, differences = CASES[name]
    model = make()
    with kmp.enable(policy):
        enabled = float32_layers(make(), model)
    plan = kmp.audit(model, policy=policy).plan
    converted = float32_layers(kmp.convert(model, policy), model)
    assert enabled <= converted
    only_converted = converted - enabled
    assert only_converted <= set(differences)
    if policy == "mixed_float16":  # the others work in bfloat16
        assert only_converted == set(differences)
        for path, reason in differences.items():
            assert reason in plan.float32[path]


def test_rule_that_does_not_apply_at_creation_and_in_a_conversion_says_why():
    for rule in RULES:
        applies_to_both = Moment.CREATION | Moment.CONVERSION in rule.moments
        assert bool(rule.limit) != applies_to_both, rule


@pytest.mark.exhaustive
@pytest.mark.parametrize("make", models.ALL, ids=lambda make: make.__name__)
def test_model_of_an_architecture_has_no_float32_layer_under_enable_that_convert_lacks(make):
    model, _ = make()
    with kmp.enable():
        enabled, _ = make()
    converted = kmp.convert(model)
    assert float32_layers(enabled, model) <= float32_layers(converted, model)
