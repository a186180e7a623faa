import numpy as np
import pytest
import tensorflow as tf

from kmp.utils.float_formats import BFLOAT16, FLOAT16, FLOAT32


@pytest.mark.parametrize("float_format", [FLOAT16, FLOAT32], ids=lambda float_format: float_format.name)
def test_limits_are_those_of_numpy(float_format):
    info = np.finfo(float_format.name)
    assert float_format.max == float(info.max)
    assert float_format.smallest_normal == float(info.smallest_normal)
    assert float_format.smallest_subnormal == float(info.smallest_subnormal)
    assert (float_format.min_exponent, float_format.max_exponent) == (info.minexp, info.maxexp - 1)


def test_bfloat16_limits_are_those_of_tensorflow_and_float16_ones_the_well_known_numbers():
    assert (BFLOAT16.max, BFLOAT16.smallest_normal) == (float(tf.bfloat16.max), FLOAT32.smallest_normal)
    assert (FLOAT16.max, FLOAT16.min_subnormal_exponent) == (65504, -24)


def test_flush_exponent_is_the_largest_that_float16_rounds_to_zero():
    assert np.float16(2.0**FLOAT16.flush_exponent) == 0
    assert np.float16(np.nextafter(2.0**FLOAT16.flush_exponent, 1)) > 0
