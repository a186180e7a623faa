import numpy as np
import pytest
import tensorflow as tf

from kmp.utils.float_formats import BFLOAT16, FLOAT16, FLOAT32


@pytest.mark.parametrize("form", [FLOAT16, FLOAT32], ids=lambda form: form.name)
def test_limits_are_those_that_numpy_reports(form):
    info = np.finfo(form.name)
    assert form.max == float(info.max)
    assert form.smallest_normal == float(info.smallest_normal)
    assert form.smallest_subnormal == float(info.smallest_subnormal)
    assert (form.min_exponent, form.max_exponent) == (info.minexp, info.maxexp - 1)


def test_bfloat16_limits_are_those_of_tensorflow():
    assert BFLOAT16.max == float(tf.bfloat16.max)
    assert BFLOAT16.smallest_normal == FLOAT32.smallest_normal


def test_float16_rounds_to_zero_from_the_flush_exponent_down():
    assert np.float16(2.0**FLOAT16.flush_exponent) == 0
    assert np.float16(np.nextafter(2.0**FLOAT16.flush_exponent, 1)) > 0


def test_float16_has_the_numbers_everyone_quotes():
    assert FLOAT16.max == 65504
    assert FLOAT16.min_subnormal_exponent == -24
