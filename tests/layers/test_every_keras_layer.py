"""Compares Keras' layers under `kmp.enable` with those in float32, in a graph and with XLA.

Layers of raw data, such as image augmentation, are float32 by one rule: the comparison has some of
them, without XLA.
"""

import inspect
from functools import partial  # in arguments: a layer, which is created under the same policy

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import HAS_GPU
from keras import layers

import kmp

random = np.random.default_rng(0)


def floats(*shape):
    """Distinct values, so that a maximum is unique, and exact in float16."""
    return random.permutation(1024)[: np.prod(shape)].reshape(shape).astype("float32") / 256 - 2


VECTORS, SEQUENCE, IMAGES, VOLUME = (
    floats(4, 6),
    floats(2, 5, 4),
    floats(2, 8, 8, 3),
    floats(2, 4, 4, 4, 3),
)
LARGE = 100 + floats(1, 32, 32, 1)
STATE, TOKENS, MANY = (
    VECTORS[:, :3],
    random.integers(0, 10, (3, 5)).astype("int32"),
    np.ones((64, 64), "float32"),
)
TWO = [VECTORS, VECTORS[::-1]]
MASK = np.tile(np.arange(5) < 3, (2, 1))
STRINGS = np.array([["a b"], ["b c"]])
AMOUNTS = np.array([[1.0, 2000.5], [70000.0, 2001.0], [3.0, 2002.5], [100000.0, 2003.0]], "float32")
SOUND = np.sin(0.3 * np.arange(1024, dtype="float32"))[None]
PIXELS = random.integers(0, 256, (4, 8, 8, 3)).astype("uint8")
LABELED = {"images": PIXELS, "labels": np.eye(3, dtype="float32")[[0, 1, 2, 0]]}
# Ids that float16 rounds, as those of the instances in a data set for segmentation.
BOXES = {
    "boxes": np.array([[[0, 0, 4, 4], [2, 3, 7, 8]]] * 4, "float32"),
    "labels": np.array([[3001, 2]] * 4, "int32"),
}
ANNOTATED = LABELED | {
    "segmentation_masks": random.integers(4000, 5000, (4, 8, 8, 1)).astype("int32"),
    "bounding_boxes": BOXES,
}


class Case:
    """A layer and a call of it.

    Args:
        inputs: A tuple is several arguments.
        name: What sets it apart from the other cases of the class.
        call: Keyword arguments of the call.
        is_raw: Whether the inputs come from a data set, and not from another layer, through which
            gradients flow.
        is_random: Whether only the mean and the standard deviation of the outputs are compared.
        has_xla: Whether XLA can compile it in float32. Not used for raw data.
        **arguments: Those of the layer's `__init__`.
    """

    def __init__(
        self,
        inputs=VECTORS,
        name="",
        *,
        call=None,
        is_raw=False,
        is_random=False,
        has_xla=True,
        **arguments,
    ):
        self.inputs, self.name, self.call, self.arguments = inputs, name, call or {}, arguments
        self.is_raw, self.is_random, self.has_xla = is_raw, is_random, has_xla
        self.layer_class = layers.Layer

    def layer(self, saved_model):
        """Creates the layer under the current policy; its weights depend on the class only."""
        keras.utils.set_random_seed(0)

        def create(value):
            return value() if isinstance(value, partial) else value

        arguments = keras.tree.map_structure(create, self.arguments)
        if self.layer_class is layers.TFSMLayer:
            arguments["filepath"] = saved_model
        layer = self.layer_class(**arguments)
        if self.name == "adapted":
            layer.adapt(self.inputs)
        return layer


case, raw = Case, partial(Case, is_raw=True)


def images(inputs=LABELED, name="", **arguments):
    """An augmentation, in training; the same seed gives the same augmentation."""
    return raw(inputs, name, call={"training": True}, **arguments)


def dropout(inputs=MANY, **arguments):
    return case(inputs, call={"training": True}, is_random=True, **arguments)


def each(make, inputs, argument, values, **arguments):
    return [make(inputs, str(value), **{argument: value}, **arguments) for value in values]


# A new layer of Keras needs a case here, and an row in `kmp.layers.float32_rules` if it fails.
# A layer of raw data needs one if its outputs can be integers, or if it creates other layers.
HAS_NO_CALL = {layers.InputLayer, layers.InputSpec, layers.Layer, layers.Wrapper}
IS_FOR_OTHER_BACKENDS = {layers.FlaxLayer, layers.JaxLayer, layers.TorchModuleWrapper}
MASKED, MASKED_TWICE, TRAINING = {"mask": MASK}, {"mask": [MASK, MASK]}, {"training": True}

CASES = {
    "Activation": each(case, VECTORS, "activation", ["gelu", "softmax", "softplus", "tanh"]),
    "ActivityRegularization": [
        case(l1=0.1),
        case(np.full((4, 4096), 8, "float32"), "large", l2=0.01),
    ],
    "AdditiveAttention": [case([SEQUENCE, SEQUENCE], call=MASKED_TWICE)],
    "Attention": [case([SEQUENCE, SEQUENCE], call=MASKED_TWICE)],
    "AugMix": [images(num_chains=1, seed=1)],
    "AveragePooling1D": [
        case(SEQUENCE, pool_size=2, padding="same"),
        case(LARGE.reshape(1, 1024, 1), "large", pool_size=1024),
    ],
    "AveragePooling2D": [
        case(IMAGES, pool_size=2, padding="same"),
        case(LARGE, "large", pool_size=32),
    ],
    "BatchNormalization": [case(), case(IMAGES, "training", call=TRAINING)],
    "Bidirectional": [case(SEQUENCE, layer=partial(layers.LSTM, 3))],
    "CategoryEncoding": [raw(TOKENS, num_tokens=10)],
    "Dense": [
        case(units=3),
        case(
            name="regularized",
            units=4096,
            bias_initializer=keras.initializers.Constant(8),
            activity_regularizer="l2",
        ),
    ],
    "Discretization": each(
        raw, AMOUNTS, "output_mode", ["int", "one_hot"], bin_boundaries=[2.0, 2001.2, 80000.0]
    ),
    "Dot": [
        case(TWO, axes=1),
        case([VECTORS * 256, VECTORS[::-1]], "normalized", axes=1, normalize=True),
    ],
    "EinsumDense": [case(SEQUENCE, equation="abc,cd->abd", output_shape=(None, 3))],
    "Embedding": [case(TOKENS, input_dim=10, output_dim=4, mask_zero=True)],
    "Flatten": [case(IMAGES)],
    "GRU": [case(SEQUENCE, call=MASKED, units=3)],
    "GRUCell": [case((VECTORS, STATE), units=3)],
    "GaussianNoise": [dropout(stddev=0.5)],
    "GlobalAveragePooling1D": [
        case(SEQUENCE),
        case(
            np.full((1, 3000, 1), 40, "float32"), "masked", call={"mask": np.ones((1, 3000), bool)}
        ),
    ],
    "GroupNormalization": [case(IMAGES, groups=3)],
    "GroupQueryAttention": [
        case((SEQUENCE, SEQUENCE), head_dim=4, num_query_heads=2, num_key_value_heads=1)
    ],
    "HashedCrossing": each(
        raw, [TOKENS[:, :1], TOKENS[:, 1:2]], "output_mode", ["int", "one_hot"], num_bins=3000
    ),
    "Hashing": each(raw, TOKENS, "output_mode", ["int", "one_hot"], num_bins=3000),
    "IntegerLookup": each(raw, TOKENS, "output_mode", ["int", "count"], vocabulary=list(range(10))),
    "LSTM": [case(SEQUENCE, call=MASKED, units=3)],
    "LSTMCell": [case((VECTORS, [STATE, STATE]), units=3)],
    "Lambda": [case(function=keras.ops.square)],
    "Masking": (
        [case(SEQUENCE * MASK[..., None])]
        + [
            raw(
                np.where(MASK[..., None], SEQUENCE, np.float32(value)), f"{value}", mask_value=value
            )
            for value in (-1.0, -9999.0, float("inf"))
        ]
    ),
    "MelSpectrogram": [raw(SOUND * 30000, fft_length=64, sampling_rate=8000, num_mel_bins=8)],
    "MixUp": [images(seed=1)],
    "MultiHeadAttention": [
        case((SEQUENCE, SEQUENCE), num_heads=2, key_dim=4),
        case(
            (SEQUENCE, SEQUENCE),
            "masked",
            call={"attention_mask": MASK[:, None]},
            num_heads=2,
            key_dim=4,
        ),
    ],
    "Normalization": [
        case(mean=0.5, variance=2.0),
        raw(AMOUNTS, "amounts", mean=[40000.0, 2000.0], variance=[1e9, 2.0]),
        raw(AMOUNTS, "adapted"),
    ],
    "PReLU": [case(alpha_initializer="ones")],
    "Permute": [case(SEQUENCE, dims=(2, 1))],
    "Pipeline": [
        raw(PIXELS, layers=[partial(layers.Rescaling, 1 / 255), partial(layers.CenterCrop, 4, 4)])
    ],
    "RNN": [case(SEQUENCE, cell=partial(layers.GRUCell, 3))],
    "RandAugment": [images(num_ops=1, seed=1)],
    "RandomColorJitter": [
        images(brightness_factor=0.2, contrast_factor=0.2, hue_factor=0.2, seed=1)
    ],
    "RandomFlip": [images(ANNOTATED, bounding_box_format="xyxy", seed=1)],
    "RepeatVector": [case(n=3)],
    "Rescaling": [
        case(scale=0.5),
        raw(PIXELS, "pixels", scale=1 / 255),
        raw(AMOUNTS, "amounts", scale=1e-5),
    ],
    "Reshape": [case(target_shape=(3, 2))],
    "Resizing": [images(PIXELS.astype("uint16") * 256, "uint16", height=5, width=6)],
    "ReversibleEmbedding": [case(TOKENS, input_dim=10, output_dim=4)],
    "STFTSpectrogram": [
        case(SOUND[..., None], mode="psd", frame_length=64),
        raw(SOUND[..., None] * 30000, "16-bit audio", mode="log", frame_length=64),
    ],
    "SimpleRNN": [case(SEQUENCE, units=3)],
    "SimpleRNNCell": [case((VECTORS, STATE), units=3)],
    "Softmax": [case(SEQUENCE, call={"mask": np.tile(np.arange(4) < 3, (2, 5, 1))})],
    "SpectralNormalization": [case(layer=partial(layers.Dense, 3), call=TRAINING)],
    "StackedRNNCells": [
        case(
            (VECTORS, [STATE, STATE]),
            cells=[partial(layers.GRUCell, 3), partial(layers.SimpleRNNCell, 3)],
        )
    ],
    "StringLookup": each(raw, STRINGS, "output_mode", ["int", "count"], vocabulary=["a b", "c"]),
    "TFSMLayer": [case(call_endpoint="serve")],
    "TextVectorization": [
        raw(STRINGS, "int", vocabulary=["a", "b"]),
        raw(STRINGS, output_mode="tf_idf", vocabulary=["a", "b"], idf_weights=[0.5, 0.7]),
    ],
    "TernaryDense": [case(units=3)],
    "TimeDistributed": [case(SEQUENCE, layer=partial(layers.Dense, 3), call=MASKED)],
    "UnitNormalization": [
        # Its gradient is 1e12, which overflows in the float16 layer before it.
        raw(VECTORS * 0, "zero"),
        case(VECTORS / 2**14, "small"),
        case(VECTORS * 256, "large"),
    ],
    "UpSampling1D": [case(SEQUENCE)],
    "UpSampling2D": (
        each(case, IMAGES, "interpolation", ["nearest", "bilinear"])
        + each(case, IMAGES, "interpolation", ["bicubic", "lanczos3", "lanczos5"], has_xla=False)
    ),
    "UpSampling3D": [case(VOLUME)],
}
CASES |= {
    name: [case()]
    for name in ("ELU", "Identity", "LayerNormalization", "LeakyReLU", "RMSNormalization", "ReLU")
}
MERGING = ("Add", "Average", "Concatenate", "Maximum", "Minimum", "Multiply", "Subtract")
CASES |= {name: [case(TWO)] for name in MERGING}
CASES |= {name: [dropout(rate=0.5)] for name in ("AlphaDropout", "Dropout", "GaussianDropout")}
for number, inputs in enumerate((SEQUENCE, IMAGES, VOLUME), 1):
    for family, arguments in {
        "AdaptiveAveragePooling": {"output_size": 3},
        "AdaptiveMaxPooling": {"output_size": 3},
        "AveragePooling": {"pool_size": 2, "padding": "same"},
        "Conv": {"filters": 4, "kernel_size": 2},
        "ConvTranspose": {"filters": 4, "kernel_size": 2},
        "Cropping": {"cropping": 1},
        "DepthwiseConv": {"kernel_size": 2},
        "GlobalAveragePooling": {},
        "GlobalMaxPooling": {},
        "MaxPooling": {"pool_size": 2, "padding": "same"},
        "SeparableConv": {"filters": 4, "kernel_size": 2},
        "ZeroPadding": {},
    }.items():
        name = f"Conv{number}DTranspose" if family == "ConvTranspose" else f"{family}{number}D"
        CASES.setdefault(name, [case(inputs, **arguments)])
    frames = np.stack([inputs, inputs[::-1]], axis=1)
    CASES[f"ConvLSTM{number}D"] = [case(frames, filters=2, kernel_size=2)]
    CASES[f"SpatialDropout{number}D"] = [
        dropout(np.ones((64, *[2] * number, 64), "float32"), rate=0.5)
    ]

# Under XLA, CI tests the layers for which kmp has code of its own or a rule, and one of each kind
# of computation; the others each week.
UNDER_XLA_IN_CI = {
    *("BatchNormalization", "GroupNormalization", "LayerNormalization", "RMSNormalization"),
    *("Softmax", "SpectralNormalization", "Activation", "Attention", "MultiHeadAttention"),
    *("ActivityRegularization", "Masking", "TFSMLayer", "UnitNormalization", "UpSampling2D"),
    *("AveragePooling2D", "GlobalAveragePooling1D"),
    *("Conv2D", "Dense", "Dropout", "Embedding", "GRU"),
}
# CI has the layers of sequences and volumes for which kmp has a rule or a name.
OTHER_RANKS = {
    f"{name[:-2]}{number}D" for name in CASES if name.endswith("2D") for number in (1, 3)
} - {
    *("AveragePooling1D", "AveragePooling3D", "Conv3D", "GlobalAveragePooling1D"),
    *("DepthwiseConv1D", "SeparableConv1D"),
}
# Of the layers that draw an augmentation from other layers, one will do.
EACH_WEEK = OTHER_RANKS | {"RandAugment"}
PARAMETERS = []
for name in sorted(set(CASES) & set(dir(layers))):  # some exist only in later Keras versions
    for each_case in CASES[name]:
        each_case.layer_class = getattr(layers, name)
        case_id = "-".join(filter(None, [name, each_case.name]))
        marks = [pytest.mark.exhaustive] * (name in EACH_WEEK)
        PARAMETERS.append(pytest.param(each_case, False, id=f"{case_id}-graph", marks=marks))
        if each_case.has_xla and not each_case.is_raw:
            mark = pytest.mark.slow if name in UNDER_XLA_IN_CI else pytest.mark.exhaustive
            PARAMETERS.append(pytest.param(each_case, True, id=f"{case_id}-xla", marks=mark))
# TensorFlow has these kernels for GPUs and in XLA.
NO_FLOAT16_KERNEL_ON_CPU = {
    "AdaptiveAveragePooling3D",
    "AdaptiveMaxPooling3D",
    "AveragePooling3D",
    "MaxPooling3D",
}


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("saved_model"))
    keras.Sequential([keras.Input((6,)), layers.Dense(3)]).export(folder, verbose=False)
    return folder


def is_float(tensor):
    return tensor.dtype.is_floating


def results_of(tested, saved_model, compiled=None):
    """Returns what a call returns and changes: the outputs, losses, weights and gradients.

    The gradients are those of a weighted sum of the outputs.

    `compiled` is a decorator; without one, the call is eager.
    """
    layer, dtype = tested.layer(saved_model), keras.config.dtype_policy().compute_dtype

    def call(inputs, **arguments):
        return layer(*inputs if isinstance(inputs, tuple) else (inputs,), **arguments)

    def step(inputs):
        # DataLayer changes dictionaries in place.
        inputs = keras.tree.map_structure(tf.identity, inputs)
        with tf.GradientTape() as tape:
            sources = list(filter(is_float, keras.tree.flatten(inputs)))
            tape.watch(sources)
            # As behind another layer, whose gradient XLA computes in its dtype.
            if not tested.is_raw:
                inputs = keras.tree.map_structure(
                    lambda x: tf.nn.leaky_relu(tf.cast(x, dtype)) if is_float(x) else x, inputs
                )
            outputs = call(inputs, **tested.call)
            mask = getattr(outputs, "_keras_mask", None)
            outputs = [
                *keras.tree.flatten(outputs),
                *layer.losses,
                *([] if mask is None else [mask]),
            ]
            if tested.is_raw:
                return outputs, []
            # Weights of both signs: with equal ones, the gradient of a softmax would be 0 but for
            # rounding errors.
            total = tf.add_n(
                [
                    tf.reduce_sum(tf.cast(x, "float32") * weights_like(x))
                    for x in filter(is_float, outputs)
                ]
            )
        return outputs, tape.gradient(
            total, [*sources, *(variable.value for variable in layer.trainable_variables)]
        )

    inputs = keras.tree.map_structure(tf.constant, tested.inputs)
    if (
        compiled
        and not tested.is_raw
        and tested.layer_class.__name__ not in NO_FLOAT16_KERNEL_ON_CPU
    ):
        call(inputs)  # creates the weights: TensorFlow traces a function that creates them twice
    outputs, gradients = (compiled(step) if compiled else step)(inputs)
    return {
        "outputs": outputs,
        "gradients": [
            tf.convert_to_tensor(gradient) for gradient in gradients if gradient is not None
        ],
        "weights": [weight.value for weight in layer.weights],
    }


def weights_like(tensor):
    return (np.arange(tensor.shape.num_elements(), dtype="float32") * 7 % 17 / 8 - 1).reshape(
        tensor.shape
    )


def as_numbers(tensor, is_random):
    array = np.asarray(tensor)
    array = array.astype("float64") if is_float(tensor) else array
    return np.array([array.mean(), array.std()]) if is_random else array


def test_every_keras_layer_has_a_case_or_is_float32_by_the_rule_for_raw_data():
    classes = {member for _, member in inspect.getmembers(layers, inspect.isclass)}
    tested = {parameters.values[0].layer_class for parameters in PARAMETERS}
    (base,) = [base for base in layers.RandomFlip.__mro__ if base.__name__ == "DataLayer"]
    untested = classes - HAS_NO_CALL - IS_FOR_OTHER_BACKENDS - tested
    assert [each for each in untested if not issubclass(each, base)] == []


def test_feature_space_of_all_feature_types_computes_what_it_computes_in_float32():
    data = {
        "income": AMOUNTS[:, 0],
        "year": AMOUNTS[:, 1],
        "age": AMOUNTS[:, 1] - 1990,
        "town": [1, 2, 3, 1],
    }
    data |= {"number": [4097, 2, 3, 4], "job": ["a", "b", "c", "a"], "street": ["d", "e", "f", "d"]}

    def encode():
        types = keras.utils.FeatureSpace
        features = {"income": types.float_normalized(), "year": types.float_discretized(num_bins=3)}
        features |= {
            "age": types.float_rescaled(scale=1e-3),
            "number": types.integer_hashed(num_bins=8),
        }
        features |= {"town": types.integer_categorical(), "job": types.string_categorical()}
        features |= {"street": types.string_hashed(num_bins=8)}
        space = types(features, crosses=[("town", "job")], output_mode="concat")
        space.adapt(tf.data.Dataset.from_tensor_slices(data))
        return next(iter(tf.data.Dataset.from_tensor_slices(data).batch(4).map(space))).numpy()

    expected = encode()
    with kmp.enable():
        np.testing.assert_array_equal(encode(), expected)


@pytest.mark.parametrize(("tested", "is_xla"), PARAMETERS)
def test_layer_computes_under_enable_what_it_computes_in_float32(tested, is_xla, saved_model):
    if HAS_GPU and is_xla and tested.layer_class in (layers.LSTM, layers.GRU, layers.Bidirectional):
        pytest.skip(
            "On a GPU, Keras does not compile these layers: XLA has no kernel of cuDNN's operation"
        )
    if not is_xla and not HAS_GPU and tested.layer_class.__name__ in NO_FLOAT16_KERNEL_ON_CPU:
        pytest.skip("TensorFlow has no float16 kernel of this operation for CPUs")
    # Of raw data, Keras casts pixels only in a graph.
    expected = results_of(tested, saved_model, tf.function if tested.is_raw else None)
    with kmp.enable():
        found = results_of(tested, saved_model, tf.function(jit_compile=is_xla))
    for what, tensors in expected.items():
        assert len(found[what]) == len(tensors), what
        arrays = [as_numbers(tensor, tested.is_random) for tensor in tensors]
        largest = max(
            (np.abs(array).max() for array in arrays if array.dtype == "float64"), default=0
        )
        # 8 float16 roundings of the largest value; none of raw data, whose layers compute in
        # float32
        tolerance = 0.05 if tested.is_random else 1e-5 if tested.is_raw else 2**-8
        tolerance *= largest if np.isfinite(largest) else 1
        for array, tensor in zip(arrays, found[what], strict=True):
            actual = as_numbers(tensor, tested.is_random)
            if array.dtype == "float64":
                np.testing.assert_allclose(actual, array, rtol=0, atol=tolerance, err_msg=what)
            else:
                np.testing.assert_array_equal(actual, array, err_msg=what)
