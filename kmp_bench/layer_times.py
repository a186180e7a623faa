"""What the layers that kmp replaces in graph mode cost: in Keras' code, in kmp's, and otherwise.

The other way is TensorFlow's kernel of a fused normalization, which kmp uses for
BatchNormalization where XLA compiles nothing, and does not use for rows.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from kmp.backend.compiled_parts import in_step
from kmp.backend.keras_internals import global_policy
from kmp.enabling import enable
from kmp_bench.measurement import Measurement, alternate, comparison, seconds_per_call

KERAS, OURS, FUSED = "Keras", "kmp", "FusedBatchNormV3"
SECTION = "layers"
_POLICY = "mixed_float16"
_COUNT = 8  # layers, one after the other: a call from Python takes longer than one
# Rows and their widths: those of a small and a large step of a transformer, and of images.
ROWS = ((4_096, 768), (16_384, 1024), (200_704, 96))
IMAGES = (64, 56, 56, 256)

_Layer = Callable[..., Any]


def measure_layers(
    rows: Sequence[tuple[int, int]] = ROWS,
    images: tuple[int, ...] = IMAGES,
    calls: int = 10,
    rounds: int = 3,
) -> Iterator[list[Measurement]]:
    """Measures the seconds of a forward and backward pass of a layer in float16, in graph mode.

    Args:
        rows: The numbers of rows and their widths, for normalization, activation and softmax.
        images: The shape of images, for BatchNormalization. TensorFlow's kernel of it depends on
            cuDNN's persistent mode.
        calls: The number of calls of which the mean is taken.
        rounds: The number of rounds of which the median is taken.
    """
    for count, width in rows:
        size = f"{count} x {width}"
        shape = (count, 1, width)
        ways = {KERAS: keras.layers.LayerNormalization, OURS: keras.layers.LayerNormalization}
        more = {FUSED: lambda: _fused_rows}
        yield _compared(f"LayerNormalization, {size}", {**ways, **more}, shape, calls, rounds)
        for name in ("gelu", "softmax"):
            layer = functools.partial(keras.layers.Activation, name)
            yield _compared(f"{name}, {size}", dict.fromkeys(ways, layer), shape, calls, rounds)
    case = f"BatchNormalization, {' x '.join(map(str, images))}"
    ways = dict.fromkeys((KERAS, OURS, FUSED), keras.layers.BatchNormalization)
    yield _compared(case, ways, images, calls, rounds)


def _compared(
    case: str,
    makers: Mapping[str, Callable[[], _Layer]],
    shape: tuple[int, ...],
    calls: int,
    rounds: int,
) -> list[Measurement]:
    functions = {}
    for way, make in makers.items():
        step = _step_of(way, make, shape)
        functions[way] = functools.partial(seconds_per_call, step, calls)
    seconds = alternate(functions, rounds)
    by_layer = {way: [each / _COUNT for each in own] for way, own in seconds.items()}
    return comparison(SECTION, case, "graph", by_layer)


def _step_of(way: str, make: Callable[[], _Layer], shape: tuple[int, ...]) -> Callable[[], None]:
    """Returns a function that runs the passes of several layers, and waits for them."""
    x = tf.cast(tf.random.normal(shape), tf.float16)
    with _context(way):
        layers = [make() for _ in range(_COUNT)]
        for layer in layers:
            layer(x)  # builds it
    weights = [each.value for layer in layers for each in getattr(layer, "trainable_weights", ())]

    @tf.function(autograph=False)
    def passes(x: tf.Tensor) -> Any:
        with _context(way), tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            for layer in layers:
                y = layer(y) if layer is _fused_rows else layer(y, training=True)
        return tape.gradient(y, [x, *weights], y)

    def step() -> None:
        passes(x)
        tf.test.experimental.sync_devices()  # a GPU runs asynchronously

    return step


@contextlib.contextmanager
def _context(way: str) -> Iterator[None]:
    policy = global_policy(_POLICY) if way == KERAS else enable(_POLICY)
    with policy, in_step() if way == OURS else contextlib.nullcontext():
        yield


def _fused_rows(x: tf.Tensor) -> tf.Tensor:
    """Normalizes each row as a channel of its own, without weights."""
    width, count = x.shape[-1], x.shape.num_elements() // x.shape[-1]
    empty = tf.zeros([0])
    outputs = tf.raw_ops.FusedBatchNormV3(
        x=tf.reshape(x, [1, count, width, 1]),
        scale=tf.ones([count]),
        offset=tf.zeros([count]),
        mean=empty,
        variance=empty,
        epsilon=1e-3,
        data_format="NCHW",
        is_training=True,
    )
    return tf.reshape(outputs.y, x.shape)
