from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

from kmp.utils import validation

number = partial(validation.number, "argument", expected="a number", accepts=lambda v: True)
integer, boolean, positive_integer = (
    partial(function, "argument")
    for function in (validation.integer, validation.boolean, validation.positive_integer)
)


@pytest.mark.parametrize(
    ("validated", "value", "expected"),
    [
        *(
            (number, value, 1.5)
            for value in (1.5, np.float16(1.5), np.array(1.5), tf.constant(1.5), tf.Variable(1.5))
        ),
        *((number, value, 1.5) for value in (keras.Variable(1.5), tf.constant(1.5, "bfloat16"))),
        *(
            (integer, value, -7)
            for value in (-7, -7.0, np.int8(-7), np.float32(-7), tf.constant(-7, "int64"))
        ),
        *((boolean, value, True) for value in (True, np.bool_(True), tf.constant(True))),
        *((number, 3, 3.0), (boolean, np.bool_(False), False)),
    ],
)
def test_scalars_of_every_library_are_accepted(validated, value, expected):
    result = validated(value)
    assert (result, type(result)) == (expected, type(expected))


NO_SCALARS = [
    *(
        np.array([1.0, 2.0]),
        np.array([True]),
        tf.constant([1]),
        keras.KerasTensor(()),
        1j,
        np.complex64(1),
    ),
    *("1", np.array("1"), None, np.array(None), [1]),
]


@pytest.mark.parametrize(
    ("validated", "value"),
    [
        *((number, value) for value in (*NO_SCALARS, True, np.array(False))),
        *(
            (integer, value)
            for value in (1.5, np.nan, np.inf, True, np.bool_(True), tf.constant(True), "1")
        ),
        (positive_integer, None),
        *((boolean, value) for value in (1, 0.0, np.array(1), "1")),
    ],
)
def test_other_values_raise_with_the_argument(validated, value):
    with pytest.raises(TypeError, match="`argument` must be .* Received: argument="):
        validated(value)


def test_integer_beyond_int64_is_out_of_range_and_a_symbolic_tensor_no_number():
    with pytest.raises(ValueError, match=r"from 1 to 2\^63 - 1. Received: argument=1e\+300"):
        positive_integer(1e300)
    with pytest.raises(TypeError, match="`argument` must be a number"):
        tf.function(number)(tf.constant(1.0))


def test_one_of_accepts_a_dtype_policy_for_its_name():
    choices = "mixed_float16", "float32"
    assert (
        validation.one_of("policy", keras.DTypePolicy("mixed_float16"), choices) == "mixed_float16"
    )
    with pytest.raises(ValueError, match="`policy` must be one of 'mixed_float16', 'float32'"):
        validation.one_of("policy", keras.DTypePolicy("bfloat16"), choices)
