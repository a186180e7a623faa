"""What the table says of functions beside their ranges and errors."""

import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from kmp.numerics.functions import (
    FUNCTIONS,
    einsum_function,
    keras_function,
    steepness,
    tensorflow_function,
)


@pytest.mark.parametrize(
    ("subscripts", "name"),
    [
        ("bij->bji", "move"),
        ("bii->bi", "move"),
        ("btc->bc", "sum"),
        ("bt...->b...", "sum"),
        ("bii", "sum"),
        ("bii->b", "sum"),
        ("bi,bi->b", "sum of products"),
        ("btc,btc->", "sum of products"),
        ("btc,bd->bd", "sum of products"),
        ("bi,bi->bi", "product"),
        ("bi,bj->bij", "product"),
        ("...ij,jk", "matrix product"),
        ("bij,bj->bi", "matrix product"),
        ("bij,bjk,bkl->bil", "matrix product"),
    ],
)
def test_einsum_is_what_its_subscripts_compute(subscripts, name):
    assert einsum_function(subscripts).name == name


@pytest.mark.parametrize(
    "kind", ["Pow", "RealDiv", "Xdivy", "Reciprocal", "Rsqrt", "Div", "FloorDiv"]
)
def test_row_that_divides_is_infinite_where_it_divides_by_0(kind):
    operands = {"Pow": [0.0, -1.0], "Reciprocal": [0.0], "Rsqrt": [0.0]}.get(kind, [1.0, 0.0])
    arguments = [tf.constant(each, "float32") for each in operands]
    names = ["x", "y"][: len(arguments)]
    result = getattr(tf.raw_ops, kind)(**dict(zip(names, arguments, strict=True)))
    assert np.isinf(result)
    assert "divides" in tensorflow_function(kind).traits


def test_quotient_that_is_0_for_a_divisor_of_0_does_not_divide_by_0():
    assert tf.raw_ops.DivNoNan(x=tf.constant(1.0), y=tf.constant(0.0)) == 0.0
    assert "divides" not in tensorflow_function("DivNoNan").traits


def test_rows_of_positive_numbers_say_so():
    positive = {each.name for each in FUNCTIONS if each.domain[0] == 0.0}
    assert {"logarithm", "power", "reciprocal of the root", "root"} <= positive
    assert np.isnan(ops.log(np.float32(-1.0)))


def test_powers_and_exponentials_are_steeper_than_sums_and_means():
    kinds = ["Pow", "Exp", "L2Loss", "Square", "RealDiv", "Rsqrt", "Log", "Mul", "Sum", "Mean"]
    assert sorted(kinds, key=steepness) == kinds
    assert steepness("unheard of") > steepness("Mean")


def test_rows_with_the_source_of_tensorflows_lists_are_in_them():
    header = "tensorflow/core/grappler/optimizers/auto_mixed_precision_lists.h"
    listed = set(re.findall(r'"(\w+)"', (Path(tf.sysconfig.get_include()) / header).read_text()))
    cited = [each for each in FUNCTIONS if "auto_mixed_precision_lists" in each.source]
    lacking = [each.name for each in cited if listed.isdisjoint(each.tensorflow.split())]
    assert lacking == ["recurrent layer"]  # its kernels, such as LSTMBlockCell


def test_only_rows_that_add_up_have_the_reason_that_long_sums_overflow():
    reasons = [each for each in FUNCTIONS if "long sums" in each.overflow]
    assert {each.name for each in reasons if not each.adds_up} == {"mean"}  # of several tensors


def test_composite_operations_have_no_name():
    assert [name for name in ("var", "std", "logsumexp", "psnr") if keras_function(name)] == []
