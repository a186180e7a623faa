"""What needs float32, on graphs that are made by hand."""

import pytest

from kmp.numerics import (
    DATA,
    Call,
    Node,
    between,
    constant,
    interpret,
    keras_function,
    needing_float32,
    tensorflow_function,
)
from kmp.utils.float_formats import FLOAT16


def node(name, *operands, unit=None, **arguments):
    units = () if unit is None else (unit,)
    return Node(tensorflow_function(name), operands, units=units, **arguments)


def inputs(value=DATA):
    return Node(value=value, is_float32=True)


def test_range_that_is_known_decides():
    x = inputs(between(-5.0, 5.0))
    small, large = (node("Exp", node("Mul", x, constant(c)), unit=c) for c in (1.0, 3.0))
    nodes = [x, *small.operands, small, *large.operands, large]
    needs = needing_float32(nodes, FLOAT16)
    assert needs.own.keys() == {3.0}
    (problem,) = (each for each in needs.own[3.0] if each.kind == "range")
    assert "numbers up to 15 may reach 3.27e+06, and float16 ends at 65504" in problem.reason(
        FLOAT16
    )


def test_what_amplifies_and_what_is_amplified_are_float32():
    x = inputs()
    probability = node("Sigmoid", x, unit="sigmoid")
    nodes = [x, probability, node("Log", probability, unit="log")]
    needs = needing_float32(nodes, FLOAT16)
    assert needs.own.keys() == {"log"}
    assert needs.amplified == {"sigmoid": "log"}


def test_unit_that_gains_from_16_bits_keeps_problems_of_large_data_alone():
    x = inputs()
    square, exponential = node("Square", x, unit="square"), node("Exp", x, unit="exp")
    needs = needing_float32([x, square, exponential], FLOAT16, gaining={"square", "exp"})
    assert needs.left.keys() == {"square"}
    assert needs.own.keys() == {"exp"}


def test_function_without_a_16_bit_kernel_is_float32_even_in_a_unit_that_gains():
    x = inputs(between(-1.0, 1.0))
    resized = Node(keras_function("resize"), [x], units=("block",))
    assert resized.function.in_float32
    assert needing_float32([x, resized], FLOAT16, gaining={"block"}).own.keys() == {"block"}


def test_node_in_no_unit_makes_the_one_before_it_float32():
    x = inputs()
    before = node("Identity", x, unit="layer")
    needs = needing_float32([x, before, node("Exp", before)], FLOAT16)
    assert needs.own.keys() == {"layer"}


@pytest.mark.parametrize(("terms", "is_problem"), [(8, False), (2**20, True), (None, True)])
def test_terms_of_a_sum_are_many_unless_they_are_known_to_be_few(terms, is_problem):
    x = inputs()
    call = Call() if terms is None else Call(terms)
    found = interpret([x, node("Sum", x, unit="sum", call=call)], FLOAT16)
    assert ("terms" in [each.kind for each in found.problems]) == is_problem


def test_measured_range_takes_the_place_of_a_bound():
    x = inputs()
    square = node("Square", x, unit="square")
    x.measured, square.measured = between(-3.0, 3.0), between(0.0, 9.0)
    assert not needing_float32([x, square], FLOAT16).own
    x.measured, square.measured = between(-30.0, 30.0), between(0.0, 900.0)
    assert needing_float32([x, square], FLOAT16).own.keys() == {"square"}


def test_difference_whose_error_is_as_large_as_its_measured_results_is_float32():
    x = inputs()
    parts = [node("Mul", x, constant(c), unit=c) for c in (1.0, 1.01)]
    difference = node("Sub", *parts, unit="difference")
    nodes = [x, *parts, difference]
    assert not needing_float32(nodes, FLOAT16).own
    for each, largest in zip(nodes, (100.0, 100.0, 101.0, 0.01), strict=True):
        each.measured = between(-largest, largest)
    needs = needing_float32(nodes, FLOAT16)
    assert needs.own.keys() == {"difference"}
    assert needs.amplified == {1.0: "difference", 1.01: "difference"}


def test_mask_of_large_negative_numbers_is_no_problem_of_a_block_that_gets_it():
    mask = inputs(between(-1e9, 0.0))
    needs = needing_float32([mask, node("Cast", mask, unit="block")], FLOAT16, gaining={"block"})
    assert needs.left.keys() == {"block"}
    position = inputs(between(0.0, 1e9))
    nodes = [position, node("Cast", position, unit="block")]
    assert needing_float32(nodes, FLOAT16, gaining={"block"}).own.keys() == {"block"}


def test_error_of_numbers_that_are_clipped_at_the_end_of_the_range_is_that_of_data():
    x = inputs()
    rounded = node("Tanh", x, unit="block")
    large = node("Mul", rounded, constant(65504.0), unit="block")
    clipped = node("Minimum", large, constant(60000.0), unit="block")
    found = interpret([x, rounded, large, clipped], FLOAT16)
    assert not found.values[clipped].is_bounded
    assert found.values[clipped].error < 0.01


def test_share_that_an_epsilon_keeps_from_infinity_is_as_large_as_data():
    p, total = inputs(between(0.0, 1.0)), inputs(between(1e-9, 8.0))
    share = node("RealDiv", p, total, unit="router")
    product = node("Mul", share, inputs(), unit="experts")
    needs = needing_float32([p, total, share, *product.operands[1:], product], FLOAT16)
    assert needs.own.keys() == {"router", "experts"}
    needs = needing_float32(
        [p, total, share, *product.operands[1:], product], FLOAT16, gaining={"experts"}
    )
    assert needs.own.keys() == {"router"}
