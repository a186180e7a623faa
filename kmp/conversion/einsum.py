"""What the subscripts of an einsum compute: a matrix product, a sum, or a product of elements."""

import enum


class EinsumKind(enum.Enum):
    """What an einsum computes.

    Attributes:
        MOVE: Moves the elements of one tensor, as in `"bij->bji"`, or takes a diagonal.
        SUM: Sums elements of one tensor, as in `"btc->bc"` and `"bii->b"`, or products of pairs,
            as in the dot product `"bi,bi->b"`.
        PRODUCT: Multiplies elements, as in `"bi,bi->bi"` and the outer product `"bi,bj->bij"`.
        MATRIX_PRODUCT: All others, such as `"bij,jk->bik"` and the product with a vector.
    """

    MOVE = enum.auto()
    SUM = enum.auto()
    PRODUCT = enum.auto()
    MATRIX_PRODUCT = enum.auto()


def kind_of_einsum(subscripts: str) -> EinsumKind:
    """Returns what an einsum computes.

    Example:
    >>> kind_of_einsum("btc->bc").name, kind_of_einsum("...ij,jk").name
    ('SUM', 'MATRIX_PRODUCT')
    """
    # An ellipsis is one index more, with a one-letter name.
    text = subscripts.replace(" ", "").replace("...", ".")
    inputs, arrow, explicit_output = text.partition("->")
    operands = inputs.split(",")
    output = set(explicit_output) if arrow else _implicit_output(operands)
    summed = set("".join(operands)) - output
    holders = {index: [each for each in operands if index in each] for index in summed}
    if any(len(operands_with) == 1 for operands_with in holders.values()):
        return EinsumKind.SUM
    if len(operands) == 1:
        return EinsumKind.MOVE
    if not summed:
        return EinsumKind.PRODUCT
    is_dot_product = all(output <= set(operand) for operand in operands)
    return EinsumKind.SUM if is_dot_product else EinsumKind.MATRIX_PRODUCT


def _implicit_output(operands: list[str]) -> set[str]:
    """Returns the indices that an einsum without an arrow keeps: those that appear once."""
    indices = "".join(operands)
    return {index for index in indices if indices.count(index) == 1 or index == "."}
