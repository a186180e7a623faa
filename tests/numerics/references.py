"""What TensorFlow and Keras compute in float64, which the rows of the table are compared with."""

from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf
from keras import ops
from tensorflow.python.framework import op_def_registry

from kmp.numerics.values import INFINITY

TERMS = 6  # of a sum, for each element of its result

ANY = (-INFINITY, INFINITY)
POSITIVE = (0.0, INFINITY)


@dataclass
class Reference:
    """A function of TensorFlow or Keras.

    Args:
        compute: Takes arrays of float64, one for each operand, and returns an array of results.
            Operands are batches of numbers, or of so many numbers for each result.
        domains: The largest range of each operand.
        terms: How many numbers each operand has for a result; 0 for one without an axis of its own.
        precision: How exact it is.
    """

    compute: object
    domains: tuple = (ANY,)
    terms: tuple = (0,)
    precision: float = 1e-9


def of_terms(compute, operands=1, domain=ANY, terms=TERMS):
    return Reference(compute, (domain,) * operands, (terms,) * operands)


def raw(kind, **arguments):
    """An operation of TensorFlow whose first arguments are the operands."""
    names = [each.name for each in op_def_registry.get(kind).input_arg]
    call = getattr(tf.raw_ops, kind)
    return lambda *operands: call(**dict(zip(names, operands, strict=False)), **arguments)


def over_last_axis(kind):
    return of_terms(raw(kind, axis=[-1], keep_dims=False))


def by_row(compute):
    """Computes the first rows of a batch, each for itself."""
    return lambda *operands: np.concatenate(
        [np.ravel(compute(*each)) for each in zip(*(each[:24] for each in operands), strict=True)]
    )


def convolution(x, kernel):
    return tf.nn.conv2d(x[None, None, :, None], kernel[None, :, None, None], 1, "SAME")


def depthwise_convolution(x, kernel):
    """Each row of a batch is a channel."""
    images, kernels = np.transpose(x)[None, None], np.transpose(kernel)[None, :, :, None]
    return tf.nn.depthwise_conv2d(images, kernels, [1, 1, 1, 1], "SAME")


def scattered(tensor, updates):
    rows = np.repeat(np.arange(len(tensor)), TERMS)[:, None]
    return tf.tensor_scatter_nd_add(tensor, rows, np.ravel(updates))


def cross_entropy(logits):
    labels = np.eye(TERMS)[np.zeros(len(logits), int)]
    return tf.nn.softmax_cross_entropy_with_logits(labels, logits)


def batch_normalization(x):
    return ops.batch_normalization(x, ops.mean(x, 0), ops.var(x, 0), -1)


def resized(method):
    def compute(x):
        return tf.image.resize(x[:, None, :, None], [1, 2 * TERMS + 1], method)

    return Reference(compute, terms=(TERMS,), precision=1e-6)  # in float32


def shifted(x):
    """Images that are moved by half a pixel."""
    transforms = np.array([[1.0, 0.0, 0.5, 0.0, 1.0, 0.0, 0.0, 0.0]], "float32")
    return tf.raw_ops.ImageProjectiveTransformV3(
        images=x[:, None, :, None],
        transforms=transforms,
        output_shape=[1, TERMS],
        fill_value=0.0,
        interpolation="BILINEAR",
        fill_mode="CONSTANT",
    )


def random(kind):
    """Random numbers, in place of a function of the operand."""
    return Reference(lambda x: getattr(tf.raw_ops, kind)(shape=[1000], dtype=tf.float32))


def of_ops(name, **arguments):
    return lambda x: getattr(ops, name)(x, axis=-1, **arguments)


# By a name of the row: how to call it, if not with each operand as one batch of numbers.
CALLS = {
    "Pow": Reference(raw("Pow"), (POSITIVE, (-8.0, 8.0)), (0, 0)),
    "Xlogy": Reference(raw("Xlogy"), (ANY, POSITIVE), (0, 0)),
    "Xlog1py": Reference(raw("Xlog1py"), (ANY, (-1.0, INFINITY)), (0, 0)),
    "L2Loss": of_terms(lambda x: tf.reduce_sum(x * x, -1) / 2),
    "EuclideanNorm": over_last_axis("EuclideanNorm"),
    "Prod": over_last_axis("Prod"),
    "Sum": over_last_axis("Sum"),
    "Mean": over_last_axis("Mean"),
    "Max": over_last_axis("Max"),
    "Min": over_last_axis("Min"),
    "mean": of_terms(of_ops("mean")),
    "average": of_terms(of_ops("average")),
    "median": of_terms(of_ops("median")),
    "Cumsum": of_terms(lambda x: tf.cumsum(x, axis=-1)),
    "Cumprod": of_terms(lambda x: tf.math.cumprod(x, axis=-1)),
    "TensorScatterAdd": Reference(scattered, (ANY, ANY), (0, TERMS)),
    "vdot": of_terms(lambda x, y: tf.einsum("bi,bi->b", x, y), 2),
    "AvgPool": of_terms(lambda x: tf.nn.avg_pool1d(x[:, :, None], TERMS, 1, "VALID")),
    "AddN": Reference(lambda *each: tf.add_n(each), (ANY,) * 3, (0,) * 3),
    "AddV2": Reference(raw("AddV2"), (ANY, ANY), (0, 0)),
    "MatMul": of_terms(lambda x, y: tf.matmul(x[:, None, :], y[:, :, None]), 2),
    "Conv2D": of_terms(by_row(convolution), 2),
    "DepthwiseConv2dNative": of_terms(depthwise_convolution, 2),
    "Cross": of_terms(raw("Cross"), 2, terms=3),
    "Softmax": of_terms(raw("Softmax")),
    "LogSoftmax": of_terms(raw("LogSoftmax")),
    "sparsemax": of_terms(keras.activations.sparsemax),
    "gelu": Reference(keras.activations.gelu),  # the operation has an approximation
    "hypot": Reference(ops.hypot, (ANY, ANY), (0, 0)),
    "glu": of_terms(keras.activations.glu, terms=2),
    "SoftmaxCrossEntropyWithLogits": of_terms(cross_entropy),
    "binarycrossentropy": Reference(
        lambda x: ops.binary_crossentropy(np.ones_like(x), x), ((0.0, 1.0),)
    ),
    # Keras 3.12 has no `ldexp`.
    "ldexp": Reference(lambda x: x * 2.0 ** -(np.arange(len(x)) % 3)),
    "layernorm": of_terms(of_ops("layer_normalization")),
    "layernormalization": of_terms(of_ops("layer_normalization")),
    "FusedBatchNorm": of_terms(batch_normalization),
    "batchnorm": of_terms(batch_normalization),
    "corrcoef": of_terms(ops.corrcoef),
    "normalize": of_terms(of_ops("normalize")),
    "ClipByValue": Reference(
        lambda x, low, high: tf.clip_by_value(x, np.minimum(low, high), np.maximum(low, high)),
        (ANY, (-2.0, 0.0), (0.5, 3.0)),
        (0, 0, 0),
    ),
    "heaviside": Reference(lambda x: ops.heaviside(x, np.full_like(x, 0.5))),
    "threshold": Reference(lambda x: ops.threshold(x, 0.25, 0.0)),
    "arctan2": Reference(raw("Atan2"), (ANY, ANY), (0, 0)),
    "angle": Reference(lambda x: ops.angle(tf.complex(x, x[::-1]))),
    "Igamma": Reference(lambda x: tf.math.igamma(np.abs(x) + 0.5, np.abs(x[::-1]))),
    "Range": Reference(lambda start, limit: tf.linspace(start, limit, 7), (ANY, ANY), (0, 0)),
    "onehot": Reference(lambda x: ops.one_hot(np.arange(len(x)), len(x))),
    "RandomUniform": random("RandomUniform"),
    "RandomStandardNormal": random("RandomStandardNormal"),
    "TruncatedNormal": random("TruncatedNormal"),
    "RandomGamma": Reference(lambda x: tf.random.gamma([1000], 2.0)),
    "upsampling2d": resized("bilinear"),
    "ResizeBicubic": resized("bicubic"),
    "ImageProjectiveTransformV3": of_terms(shifted),
    "RGBToHSV": of_terms(raw("RGBToHSV"), domain=POSITIVE, terms=3),
    "HSVToRGB": of_terms(raw("HSVToRGB"), domain=(0.0, 1.0), terms=3),
    "cast": Reference(lambda x: tf.cast(x, "float64")),
    "Identity": Reference(tf.identity),
    "Pad": Reference(lambda x: tf.pad(x, [[1, 1]])),
}


def reference_of(function):
    """What a row is compared with; `None` if it says nothing, or of what this Keras lacks."""
    if getattr(function, "low", None) == -INFINITY and function.high == INFINITY:
        return None
    for name in (*function.tensorflow.split(), *function.keras.split()):
        if name in CALLS:
            return CALLS[name]
    return next(references_by_name(function), None)


def references_by_name(function):
    """Yields what TensorFlow and Keras compute by each name of a row, with default arguments."""
    for kind in function.tensorflow.split():
        definition = op_def_registry.get(kind)
        if definition is None:  # an older TensorFlow
            continue
        operands = len(definition.input_arg)
        domains = (function.domain, *(ANY,) * (operands - 1))
        yield Reference(raw(kind), domains, (0,) * operands)
    for module in (ops, keras.activations):
        for name, compute in vars(module).items():
            if name.replace("_", "") in function.keras.split():
                yield Reference(compute, (function.domain,))
