from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

from kmp.utils import validation


def number(value):
    return validation.number("argument", value, "a number", lambda v: True)


integer, boolean, positive_integer = (
    partial(function, "argument") for function in (validation.integer, validation.boolean, validation.positive_integer)
)


@pytest.mark.parametrize("made", [np.array, tf.constant, tf.Variable, keras.ops.convert_to_tensor, lambda value: value])
@pytest.mark.parametrize(
    ("validated", "value", "expected_type"),
    [(number, 2.5, float), (number, 3, float), (integer, -7, int), (integer, 100.0, int), (boolean, True, bool)],
)
def test_scalars_of_every_library_are_accepted(validated, made, value, expected_type):
    result = validated(made(value))
    assert (result, type(result)) == (value, expected_type)


@pytest.mark.parametrize(
    ("validated", "value", "expected"),
    [
        (number, np.float16(0.5), 0.5),
        (number, keras.Variable(1.5), 1.5),
        (number, tf.constant(1.5, "bfloat16"), 1.5),
        (integer, np.int8(3), 3),
        (integer, np.float32(100), 100),
        (integer, tf.constant(5, "int64"), 5),
        (boolean, np.bool_(False), False),
    ],
)
def test_scalars_of_other_dtypes_are_accepted(validated, value, expected):
    result = validated(value)
    assert (result, type(result)) == (expected, type(expected))


NO_SCALARS = [
    *(np.array([1.0, 2.0]), np.array([True]), tf.constant([1]), keras.KerasTensor(()), 1j, np.complex64(1)),
    *("1", np.array("1"), None, np.array(None), [1]),
]
NO_INTEGERS = (1.5, float("nan"), float("inf"), True, np.bool_(True), tf.constant(True))


@pytest.mark.parametrize(
    ("validated", "value"),
    [
        *((validated, value) for validated in (number, integer, positive_integer, boolean) for value in NO_SCALARS),
        *((integer, value) for value in NO_INTEGERS),
        *((number, value) for value in (True, np.array(False))),
        *((boolean, value) for value in (1, 0.0, np.array(1))),
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


def test_dtype_policy_is_accepted_for_its_name():
    for value in ("mixed_float16", keras.DTypePolicy("mixed_float16")):
        assert validation.one_of("policy", value, ("mixed_float16", "float32")) == "mixed_float16"


@pytest.mark.parametrize(
    ("value", "error_class", "match"),
    [
        ("mixed_flot16", ValueError, r"policy='mixed_flot16' \(of type str\)$"),
        (keras.DTypePolicy("bfloat16"), ValueError, "`policy` must be one of 'mixed_float16', 'float32'"),
        ("int8", ValueError, r"\(of type str\)$"),
        (16, TypeError, "`policy` must be one of"),
    ],
)
def test_other_choices_raise(value, error_class, match):
    with pytest.raises(error_class, match=match):
        validation.one_of("policy", value, ("mixed_float16", "float32"))
