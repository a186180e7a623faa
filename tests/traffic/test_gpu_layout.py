"""The transpositions that TensorFlow adds to a graph on a GPU."""

import pytest
import tensorflow as tf

from kmp.traffic import Cost, traffic_of

IMAGE, KERNEL = (8, 16, 16, 8), (3, 3, 8, 8)
ELEMENTS = 8 * 16 * 16 * 8


def counted(dtype, data_format="NHWC", is_training=True):
    """Returns the traffic of a convolution and a fused normalization with its gradient."""

    def step(image, kernel, values, upstream):
        channels = values.shape[1 if data_format == "NCHW" else 3]
        ones, empty = tf.ones(channels), tf.ones(0 if is_training else channels)
        with tf.GradientTape() as tape:
            tape.watch(values)
            outputs = tf.raw_ops.FusedBatchNormV3(
                x=values,
                scale=ones,
                offset=ones,
                mean=empty,
                variance=empty,
                data_format=data_format,
                is_training=is_training,
            ).y
        gradient = tape.gradient(outputs, values, upstream)
        return tf.nn.conv2d(image, kernel, 1, "SAME"), outputs, gradient

    specs = [tf.TensorSpec(shape, dtype) for shape in (IMAGE, KERNEL, IMAGE, IMAGE)]
    return traffic_of(tf.function(step, autograph=False).get_concrete_function(*specs).graph)


def transposed(*tensors):
    """Returns the cost of transpositions of tensors, given their bytes."""
    return len(tensors), 2 * sum(tensors)


def cost(traffic):
    return traffic.transposed.kernels, traffic.transposed.bytes


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_training_normalization_transposes_two_tensors_forward_and_three_backward(dtype):
    traffic = counted(dtype)
    assert cost(traffic) == transposed(*5 * [2 * ELEMENTS])
    assert traffic.by_type["Transpose"] == traffic.transposed
    assert traffic.transposed.float32_bytes == 0


def test_persistent_kernel_of_16_bits_transposes_nothing(monkeypatch):
    monkeypatch.setenv("TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT", "1")
    assert counted("float16").transposed == Cost()
    assert counted("float32").transposed.kernels > 0


def test_convolutions_of_16_bits_make_all_channels_last():
    """Three tensors of the gradient and two of the forward pass are transposed, and inside too."""
    traffic = counted("float16", "NCHW")
    assert cost(traffic) == transposed(*10 * [2 * ELEMENTS])


def test_convolutions_of_float32_make_all_channels_first():
    traffic = counted("float32")
    # The convolution's input and output, and as many as the normalization would transpose inside.
    assert cost(traffic) == transposed(*7 * [4 * ELEMENTS])
    assert cost(counted("float32", "NCHW")) == transposed(*2 * [4 * ELEMENTS])


def test_without_the_layout_optimizer_only_kernels_transpose():
    before = tf.config.optimizer.get_experimental_options().get("layout_optimizer", True)
    tf.config.optimizer.set_experimental_options({"layout_optimizer": False})
    try:
        assert counted("float16", "NCHW").transposed == Cost()
        assert counted("float16").transposed.kernels == 5
    finally:
        tf.config.optimizer.set_experimental_options({"layout_optimizer": before})


def test_gradient_by_constant_statistics_reads_the_upstream_gradient_in_three_kernels():
    traffic = counted("float16", is_training=False)
    assert traffic.transposed == Cost()
    gradient = traffic.by_type["FusedBatchNormGradV3"]
    assert gradient.kernels == 5
    # The upstream gradient three times, the input and the result once.
    assert round(gradient.bytes / (2 * ELEMENTS), 1) == 5


def test_transpositions_belong_to_the_owner_of_the_operation():
    def step(image, kernel):
        with tf.name_scope("layer"):
            return tf.nn.conv2d(image, kernel, 1, "SAME")

    specs = tf.TensorSpec(IMAGE), tf.TensorSpec(KERNEL)
    graph = tf.function(step, autograph=False).get_concrete_function(*specs).graph
    traffic = traffic_of(graph, lambda name, op: name.partition("/")[0])
    assert traffic.transposed == Cost(2, 4 * 4 * ELEMENTS, 4 * 4 * ELEMENTS)
    assert traffic.by_owner == {"layer": Cost(3, traffic.bytes, traffic.bytes)}
