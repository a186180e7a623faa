"""What a replay changes acts in its thread only, and ends with it, however it ends."""

import contextlib
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import another_thread
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function

from kmp import backend
from kmp.backend.inventory import Reason
from kmp.backend.patching import patches
from kmp.backend.state_rollback import state_restored
from kmp.backend.tensorflow_internals import functions_run_eagerly
from kmp.backend.thread_overrides import own_method
from kmp.backend.undo import Undos


@contextlib.contextmanager
def changed(layer):
    """What a trace for a replay changes, and a trace that counts traffic."""
    with Undos() as undos, undos.first_attempt():
        undos.enter(patches.holding(Reason.REPLAY))
        undos.enter(state_restored(layer))
        undos.enter(functions_run_eagerly())
        undos.enter(own_method(layer, "call", lambda call: lambda x: call(x) + 1))
        yield


def patched():
    """What a replay patches for all threads."""
    return {patch.name for patch in patches.applied()}, Function._run_functions_eagerly


def dense():
    layer = keras.layers.Dense(1, kernel_initializer="ones")
    layer.build((None, 2))
    return layer


def test_another_thread_uses_its_own_functions_and_methods():
    layer, x = dense(), np.ones((1, 2), "float32")
    ran = []
    function = tf.function(lambda: ran.append(tf.executing_eagerly()))

    def seen():
        function()
        return float(layer(x)[0, 0])

    with another_thread() as call:
        with changed(layer):
            assert (call(seen), seen(), call(seen)) == (2.0, 3.0, 2.0)
        assert call(seen) == seen() == 2.0
    assert ran == [False, True]  # traced once, by the other thread


def test_contexts_of_two_threads_end_in_any_order():
    layer, x, before = dense(), np.ones((1, 2), "float32"), patched()
    with another_thread() as call:
        first = changed(layer)
        first.__enter__()
        second = call(lambda: changed(layer))
        call(second.__enter__)
        first.__exit__(None, None, None)
        assert (float(layer(x)[0, 0]), call(lambda: float(layer(x)[0, 0]))) == (2.0, 3.0)
        call(second.__exit__, None, None, None)
    assert patched() == before
    assert "call" not in vars(layer)


def test_a_method_that_is_replaced_twice_in_a_thread_calls_the_first_replacement():
    layer = dense()
    add, double = (lambda call: lambda x: call(x) + 1), (lambda call: lambda x: call(x) * 2)
    with own_method(layer, "call", add), own_method(layer, "call", double):
        assert float(layer(np.ones((1, 2)))[0, 0]) == 6.0


def test_vectorized_map_traces_its_function_also_where_functions_run_eagerly():
    with patches.holding(Reason.REPLAY), functions_run_eagerly():
        squares = tf.vectorized_map(lambda x: x * x, tf.constant([1.0, 2.0]))
    assert squares.numpy().tolist() == [1.0, 4.0]


def test_operations_that_keras_compiles_are_compiled_also_where_functions_run_eagerly(caplog):
    images = tf.ones((1, 5, 5, 4))
    convolution = keras.layers.Conv2D(2, 3, groups=2, kernel_initializer="ones")
    with patches.holding(Reason.REPLAY), functions_run_eagerly():
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(convolution(images))
        [gradient] = tape.gradient(total, [convolution.kernel.value])
        # The sum of the elements is too large for float16; Keras' mean is not.
        mean = keras.ops.mean(keras.ops.full((1000,), 200.0, dtype="float16"))
        for _ in range(6):  # TensorFlow's limit is 5
            convolution(images)
    assert np.array_equal(gradient, np.full((3, 3, 2, 2), 9.0))
    assert float(mean) == 200.0
    assert "retracing" not in caplog.text


FILES = {contextlib.__file__, *map(str, Path(backend.__file__).parent.glob("*.py"))}


def interrupted_at(number, run):
    """Runs a function until a `KeyboardInterrupt` at this line; returns how many lines it ran."""
    lines = 0

    def local(frame, event, argument):
        nonlocal lines
        if event == "line":
            lines += 1
            if lines == number:
                raise KeyboardInterrupt
        return local

    previous = sys.gettrace()
    sys.settrace(lambda frame, *_: local if frame.f_code.co_filename in FILES else None)
    try:
        run()
    finally:
        sys.settrace(previous)
    return lines


@pytest.mark.parametrize(
    "first", [1, *(pytest.param(number, marks=pytest.mark.slow) for number in range(2, 9))]
)
def test_ctrl_c_at_any_line_leaves_nothing_changed_and_no_lock_locked(first):
    layer, before = dense(), patched()

    def run():
        with Undos() as undos, undos.first_attempt():
            undos.enter(changed(layer))

    run()  # imports what the patches need
    total = interrupted_at(-1, run)
    assert total > 300
    threads = ThreadPoolExecutor(1)
    for number in range(first, total + 1, 8):
        with pytest.raises(KeyboardInterrupt) as interrupt:  # the traceback keeps the contexts
            interrupted_at(number, run)
        assert patched() == before, number
        assert "call" not in vars(layer), number
        keras.Variable(0.0)  # not in a stateless scope
        threads.submit(run).result(timeout=60)
        del interrupt
