"""Carries ranges and rounding errors along a graph, and finds what needs float32.

A graph is a list of nodes, each of which computes a function of the table. What it is a graph of,
such as a Keras model or what TensorFlow traces of a layer, does not matter.

`interpret` goes through the nodes once. Of each it computes the value (range and error) from those
of its operands by the row of its function, rounds it if the node is in 16 bits, and notes the
problems: what leaves the range, what 16 bits lose. `needing_float32` sets the units of nodes with
problems to float32, and interprets again, until there are none or only those that float32 does not
avoid. For `log(sigmoid(x))`: the sigmoid is 0 to 1 with an error that a logarithm makes large, so
the unit of the logarithm has a problem (`own`); in float32 it still gets a rounded sigmoid, whose
unit follows (`amplified`). A unit that multiplies matrices keeps a problem of large data (`left`).
"""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Literal

from kmp.numerics.function import (
    LARGEST_ERROR,
    UNKNOWN_CALL,
    Call,
    Combination,
    Elementwise,
    Fixed,
    Function,
    Outcome,
)
from kmp.numerics.functions import TO_INTEGER, TOO_FEW_BITS
from kmp.numerics.values import DATA, INFINITY, Value
from kmp.utils.float_formats import BFLOAT16, FLOAT16, FloatFormat

Kind = Literal["constant", "always", "range", "slope", "terms", "error"]

# An error of results up to this part of their range is passed over: it is a bound, and of a sum of
# roundings about a tenth is met.
_LARGEST_LOSS = 0.25
# A steeper function makes errors of the smallest numbers as large as ordinary ones, in any format;
# in float16, its gradients are infinite.
_LARGEST_SLOPE = FLOAT16.max
# How much larger, or smaller, the values of other batches may be than those of one that was
# measured. Of nine batches the largest was 1.8 times that of the first; training a classifier from
# its initial weights enlarges the outputs of layers up to 7 times (benchmarks/output_growth.py).
_HEADROOM = 16.0
# A factor up to this enlarges a value little: 1 + tanh(x) is at most 2.
_SMALL_FACTOR = 8.0


@dataclass(eq=False, repr=False)  # it has all nodes before it
class Node:
    """One result of a graph.

    Args:
        function: What computes it; `None` if no row of the table does.
        operands: The floats that it is computed from: nodes before it, or what is known of them.
        call: What else it depends on.
        place: Returns the line of code, as shown to users; empty if it is not known.
        units: What has a precision of its own and contains the node, such as a layer and the layer
            around it, the innermost first. A node in no unit is float32 if one operand is.
        is_float32: Whether it is float32 in a 16-bit program.
        follows: The nodes of which one in float32 makes it float32.
        value: What is known of it, whatever its operands; `None` if they decide.
        constants: The numbers of the smallest and the largest magnitude in each constant among its
            operands; of a constant, its own.
        measured: The range of its values with a batch, if that is known.
    """

    function: Function | None = None
    operands: Sequence["Node | Value"] = ()
    call: Call = UNKNOWN_CALL
    place: Callable[[], str] = str
    units: tuple[Hashable, ...] = ()
    is_float32: bool = False
    follows: Sequence["Node"] = ()
    value: Value | None = None
    constants: Sequence[float] = ()
    measured: Value | None = None


@dataclass(frozen=True)
class Problem:
    """Why a node needs float32.

    Args:
        node: The node, inside of the graph of another one or not.
        kind: `"constant"`: an operand is a constant that the format does not have. `"always"`: so
            says the row of the function. `"range"`: the result leaves the range. `"slope"`: the
            derivative does. `"terms"`: it adds up too many numbers. `"error"`: the error of the
            result is large beside how it varies.
        operand: The operand that it is about.
        result: The result, before it is rounded.
        number: The constant, the number of terms, or the relative error.
        is_certain: Whether it is so for all data.
    """

    node: Node
    kind: Kind
    operand: Value = DATA
    result: Value = DATA
    number: float = 0.0
    is_certain: bool = True

    def reason(self, number_format: FloatFormat) -> str:
        """Returns why, as shown to users."""
        text = self._reason(number_format)
        place = self.node.place()
        return f"{place}: {text}" if place else text

    def _reason(self, number_format: FloatFormat) -> str:
        function, name = self.node.function, number_format.name
        if self.kind == "constant":
            constant = f"the constant {self.number:g}"
            if abs(self.number) > number_format.max:
                return f"{constant} exceeds {number_format.max:g} and overflows in {name}"
            smallest = number_format.smallest_subnormal
            return f"{constant} is below {smallest:.0g} and is zero in {name}"
        assert function is not None
        if self.kind == "always":
            own = function.in_bfloat16 if number_format is BFLOAT16 else ""
            return own or function.in_float32
        if function is TO_INTEGER:
            exact, largest = number_format.max_exact_integer, self.operand.magnitude
            return f"{name} has integers up to {exact}, and it casts numbers up to {largest:.5g}"
        if number_format is not FLOAT16:
            return TOO_FEW_BITS
        if self.kind == "range" and self.operand.is_bounded and self.result.is_bounded:
            return (
                f"the {function.name} of numbers up to {self.operand.magnitude:.3g} may reach"
                f" {self.result.magnitude:.3g}, and {name} ends at {number_format.max:g}"
            )
        if self.kind == "error" and self.number < INFINITY:
            share = f"{self.number:.2g} of the range of its results"
            return f"the {function.name} amplifies rounding errors, to up to {share}"
        general = f"the {function.name} amplifies the {name} rounding errors of its input"
        if self.kind == "range":
            general = f"it gets float32 numbers that may exceed {number_format.max:g}"
        return function.overflow or general

    @property
    def is_mild(self) -> bool:
        """Whether ordinary data have no problem, as in products, long sums and a softmax."""
        traits = self.node.function.traits if self.node.function else ()
        if self.kind == "range":
            is_cast = "selects" in traits
            # -Inf masks as large negative numbers do.
            is_mask = is_cast and self.result.high <= FLOAT16.max
            is_large = not self.is_certain and (is_cast or self.result.growth < INFINITY)
            return is_mask or is_large
        if self.kind == "error":
            return self.number < INFINITY
        is_softmax = self.kind == "always" and "flushes" in traits
        return is_softmax or (self.kind == "terms" and not self.operand.is_bounded)

    @property
    def is_of_large_numbers(self) -> bool:
        """Whether smaller numbers have no such problem, unlike those that are close to a pole."""
        function = self.node.function
        if self.kind != "slope" or function is None:
            return self.kind == "range"
        return -INFINITY in function.domain and "divides" not in function.traits

    @property
    def source(self) -> str:
        """Where it can be looked up."""
        return self.node.function.source if self.node.function else ""


@dataclass
class Interpretation:
    """What a graph does to numbers.

    Attributes:
        values: What is known of each node.
        float32: The nodes that compute in float32.
        clustering: The nodes whose values are close to one number for many operands, such as 0.
        problems: What needs float32. Of a node that computes in float32, only that its operands
            have too large an error.
        unknown: The nodes in 16 bits that multiply what only the data bound, or whose function is
            not known.
        shown: The nodes whose error is large beside how the measured results vary.
    """

    values: dict[Node, Value] = field(default_factory=dict)
    float32: set[Node] = field(default_factory=set)
    clustering: set[Node] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)
    unknown: list[Node] = field(default_factory=list)
    shown: set[Node] = field(default_factory=set)


def interpret(
    nodes: Sequence[Node], number_format: FloatFormat, float32: Set[Hashable] = frozenset()
) -> Interpretation:
    """Returns what a graph does to numbers.

    Where a batch tells what a node gets and returns, measured ranges take the place of bounds:
    results that stay in the range of the format for numbers up to `_HEADROOM` times as large do so
    for all data, and errors are compared with how the measured results vary.

    Args:
        nodes: Its nodes, each after those that it is computed from.
        number_format: A 16-bit format.
        float32: The units that compute in float32.
    """
    found = _interpreted(nodes, number_format, float32)
    if any(node.measured is not None for node in nodes):
        of_batch = _interpreted(nodes, number_format, float32, uses_measured=True)
        _decide_by_batch(found, of_batch, _judged(nodes))
    # Powers of data that are infinite do no harm if only bounded functions get them.
    powers = [each for each in found.problems if each.kind == "range" and each.is_mild]
    if powers:
        users: dict[Node, list[Node]] = {node: [] for node in nodes}
        for node in nodes:
            for each in node.operands:
                if isinstance(each, Node):
                    users[each].append(node)
        harmless = [each for each in powers if _ends_in_bounded(each.node, users)]
        found.problems = [each for each in found.problems if each not in harmless]
    return found


def _interpreted(
    nodes: Sequence[Node],
    number_format: FloatFormat,
    float32: Set[Hashable],
    *,
    uses_measured: bool = False,
) -> Interpretation:
    found = Interpretation()
    for node in nodes:
        follows = not found.float32.isdisjoint(node.follows if node.units else node.operands)
        if node.is_float32 or follows or not float32.isdisjoint(node.units):
            found.float32.add(node)
        _Step(node, number_format, found, uses_measured).run()
        if _clusters(node, found):
            found.clustering.add(node)
    return found


def _decide_by_batch(found: Interpretation, of_batch: Interpretation, judged: Set[Node]) -> None:
    """Replaces what an interpretation says of nodes that a batch judges by what the batch says."""
    harmful = {each.node for each in of_batch.problems}
    harmful |= {each.node for each in found.problems if not each.is_of_large_numbers}
    found.problems = [
        each for each in found.problems if each.node in harmful or each.node not in judged
    ]
    known = {each.node for each in found.problems}
    for problem in of_batch.problems:
        if problem.kind == "error" and problem.node in judged:
            found.shown.add(problem.node)
            found.problems += [problem] if problem.node not in known else []
    unknown = set(of_batch.unknown)
    found.unknown = [each for each in found.unknown if each in unknown or each not in judged]


def _judged(nodes: Sequence[Node]) -> set[Node]:
    """Returns the nodes of which a batch tells what they get and what they return.

    The range of a function of one tensor follows from that of the tensor. Of two, it does not:
    they may depend on each other, as those whose difference is small.
    """
    known, judged = set[Node](), set[Node]()
    for node in nodes:
        before = [each for each in node.operands if isinstance(each, Node)]
        data = [each for each in before if each.value is None or each.measured is not None]
        is_constant = node.value is not None and node.value.is_bounded
        follows = len(set(data)) == 1 and node.function is not None and known.issuperset(before)
        if node.measured is not None or is_constant or follows:
            known.add(node)
            if known.issuperset(before):
                judged.add(node)
    return judged


def _clusters(node: Node, found: Interpretation) -> bool:
    function = node.function
    if function is None or "multiplies_matrices" in function.traits or isinstance(function, Fixed):
        return False
    own = isinstance(function, Elementwise) and function.tends_to_number
    is_probability = bool(function.in_float32) and found.values[node].is_bounded
    if own or is_probability:
        return True
    before = [each for each in node.operands if isinstance(each, Node)]
    data = [each for each in before if not found.values[each].is_bounded]
    return found.clustering.issuperset(data) and not found.clustering.isdisjoint(before)


def _ends_in_bounded(node: Node, users: Mapping[Node, Sequence[Node]]) -> bool:
    """Whether only bounded functions, as the tanh in GELU, get powers of data that are infinite."""
    pending, seen = [node], {node}
    while pending:
        each = pending.pop()
        if not users[each]:
            return False
        for user in users[each]:
            function = user.function
            if isinstance(function, Elementwise) and function.of([DATA]).value.is_bounded:
                continue
            if not isinstance(function, Combination):
                return False
            if function.adds_up or "multiplies_matrices" in function.traits:
                return False
            if user not in seen:
                seen.add(user)
                pending.append(user)
    return True


@dataclass(frozen=True)
class _Step:
    """One node of an interpretation."""

    node: Node
    number_format: FloatFormat
    found: Interpretation
    uses_measured: bool

    @property
    def is_float32(self) -> bool:
        return self.node in self.found.float32

    def run(self) -> None:
        """Adds the value of the node, and its problems."""
        node, values = self.node, self.found.values
        operands = [values[each] if isinstance(each, Node) else each for each in node.operands]
        if node.value is not None:
            outcome = Outcome(node.value)
        elif node.function is not None and operands:
            outcome = node.function.of(operands, node.call)
        else:
            outcome = Outcome(DATA)
        value = self._rounded(self._as_data(self._limited(outcome.value), operands))
        if self.uses_measured and node.measured is not None:
            value = value.within(node.measured.with_headroom(_HEADROOM))
        problems = list(self._problems(operands, outcome, value))
        if problems:  # those of the nodes after it are their own
            value = replace(value, relative=0.0, absolute=0.0)
        values[node] = value
        self.found.problems += problems
        is_unknown = node.function is None and node.value is None and bool(operands)
        if self.is_float32:
            return
        if is_unknown or _multiplies_data(node, operands, self.number_format):
            self.found.unknown.append(node)

    def _limited(self, value: Value) -> Value:
        """Returns a result whose ends are no bounds of ordinary numbers as one of data of any size.

        These are ends that the format does not have, as of `clip(x, -1e9, 1)`, or that are close to
        its largest number, as of `clip(x, -65504, 65504)`. So are those of a quotient by an
        epsilon, as of `p / maximum(sum(p), 1e-9)`.
        """
        function, largest = self.node.function, self.number_format.max / _HEADROOM
        is_beyond = value.magnitude > largest and value.is_bounded
        if function is None or not is_beyond:
            return value
        if "compares" not in function.traits and "divides" not in function.traits:
            return value
        low = value.low if value.low >= -largest else -INFINITY
        high = value.high if value.high <= largest else INFINITY
        absolute = value.absolute / value.magnitude  # of data of magnitude 1
        return replace(value, low=low, high=high, degree=1.0, absolute=absolute, size=1.0)

    def _as_data(self, value: Value, operands: Sequence[Value]) -> Value:
        """Returns a result that the data bound with the errors of data, which do not add up.

        A sum with data is one of them, unless these are close to one number, such as -1 after ELU.
        """
        function = self.node.function
        data = [each for each in operands if not each.is_bounded]
        if function is None or not data or value.growth > 1:
            return value
        pairs = zip(self.node.operands, operands, strict=True)
        clusters = any(
            each in self.found.clustering for each, known in pairs if not known.is_bounded
        )
        is_sum = "adds" in function.traits and not clusters
        if not (is_sum or function.adds_up or "multiplies" in function.traits or len(data) > 1):
            return value
        bounded = [each for each in operands if each.is_bounded]
        relative = max((each.relative for each in bounded), default=0.0)
        if "multiplies" in function.traits:
            return replace(value, relative=relative)
        absolute = max(each.absolute for each in data)
        if is_sum and not self.is_float32:
            # What rounding a sum to numbers of its size loses of the data.
            added = max((each.smallest_magnitude for each in bounded), default=0.0)
            absolute += unit_roundoff(self.number_format) * added
        size = max(each.size for each in data)
        return replace(value, relative=relative, absolute=absolute, size=size)

    def _rounded(self, value: Value) -> Value:
        """Returns a result with the error of rounding it."""
        number_format, function = self.number_format, self.node.function
        if self.is_float32:
            return value
        if value.low == value.high and _is_exact_in(number_format, value.low):
            return value
        absolute = value.absolute
        is_small = value.smallest_magnitude < number_format.smallest_normal
        is_tiny = value.magnitude < number_format.smallest_normal
        if is_tiny or (function is not None and "flushes" in function.traits and is_small):
            absolute += number_format.smallest_subnormal / 2
        unit = 0.0 if _is_exact(self.node, self.found) else unit_roundoff(number_format)
        relative = value.relative + unit if value.is_bounded else max(value.relative, unit)
        return replace(value, relative=relative, absolute=absolute)

    def _problems(
        self, operands: Sequence[Value], outcome: Outcome, value: Value
    ) -> Iterator[Problem]:
        node, result = self.node, outcome.value
        if node.function is None:
            return
        largest = max(operands, key=lambda each: each.magnitude, default=DATA)
        are_bounded = all(each.is_bounded for each in operands)
        if not self.is_float32:
            yield from self._own_problems(operands, outcome, largest)
        error = _relative_error(value)
        # Close to where the slope is infinite, an error that is not relative is as large as values.
        if outcome.slope > _LARGEST_SLOPE and any(each.absolute for each in operands):
            error = INFINITY
        # Such as a softmax, which all trainings give rounded numbers.
        is_usual = bool(node.function.in_float32) and error < INFINITY
        if error > _LARGEST_LOSS and not is_usual:
            yield Problem(node, "error", largest, result, error, are_bounded)

    def _own_problems(
        self, operands: Sequence[Value], outcome: Outcome, largest: Value
    ) -> Iterator[Problem]:
        """Yields what float32 avoids, whatever the errors of the operands."""
        node, number_format = self.node, self.number_format
        function, result = node.function, outcome.value
        assert function is not None
        does_for_range = _does_for_range(function, number_format)
        if function.in_float32 and not does_for_range:
            yield Problem(node, "always", largest, result)
        for number in node.constants:
            is_ignored = "compares" in function.traits and abs(number) > number_format.max
            if _is_lost(number, number_format) and not is_ignored:
                yield Problem(node, "constant", largest, result, number)
        if does_for_range:
            return

        leaves_range = self._leaves_range(operands, result)
        if leaves_range:
            # For all data, or for ordinary ones.
            is_certain = result.is_bounded or result.growth <= 1
            yield Problem(node, "range", largest, result, is_certain=is_certain)
        # The slope of a power is as large as its result.
        is_power = leaves_range and 1 < result.growth < INFINITY
        if outcome.slope > _LARGEST_SLOPE and not is_power:
            are_bounded = all(each.is_bounded for each in operands)
            yield Problem(node, "slope", largest, result, outcome.slope, are_bounded)
        if outcome.terms > 1 and _adds_too_many(function, outcome.terms, number_format):
            is_certain = outcome.terms < INFINITY
            yield Problem(node, "terms", largest, result, outcome.terms, is_certain)

    def _leaves_range(self, operands: Sequence[Value], result: Value) -> bool:
        """Whether a result leaves the range of the format here.

        What a float32 operand has is not in the format yet.
        """
        function, largest = self.node.function, self.number_format.max
        assert function is not None
        pairs = zip(self.node.operands, operands, strict=True)
        rounded = [value for each, value in pairs if each not in self.found.float32]
        if function is TO_INTEGER and result.is_bounded:
            return result.magnitude > self.number_format.max_exact_integer
        if result.is_bounded:
            were_in_range = all(each.magnitude <= largest for each in rounded if each.is_bounded)
            return were_in_range and result.magnitude > largest
        if result.growth > max(1.0, *(each.growth for each in rounded), 0.0):
            return True
        were_in_range = all(each.size <= largest for each in rounded)
        return "multiplies" in function.traits and were_in_range and result.size > largest


def _is_exact(node: Node, found: Interpretation) -> bool:
    """Whether a result needs no rounding to 16 bits, unlike that of a cast of float32."""
    function = node.function
    is_cast = any(each in found.float32 for each in node.operands)
    return function is not None and "selects" in function.traits and not is_cast


def _multiplies_data(node: Node, operands: Sequence[Value], number_format: FloatFormat) -> bool:
    """Whether a product may leave the range of float16 for large data; small factors may not."""
    function = node.function
    if function is None or "multiplies" not in function.traits or number_format is not FLOAT16:
        return False
    sizes = [each.magnitude for each in operands if each.magnitude > _SMALL_FACTOR]
    return len(sizes) > 1 and math.prod(sizes) > number_format.max


def _is_exact_in(number_format: FloatFormat, number: float) -> bool:
    """Whether a number of the normal range of a format needs no rounding."""
    digits = math.frexp(number)[0] * 2.0 ** (number_format.fraction_bits + 1)
    return digits.is_integer() and number_format.smallest_normal <= abs(number) <= number_format.max


def unit_roundoff(number_format: FloatFormat) -> float:
    """Returns the largest relative error of rounding to a format."""
    return 2.0 ** -(number_format.fraction_bits + 1)


def _relative_error(value: Value) -> float:
    """Returns the error relative to how the values vary."""
    if not value.is_bounded:
        return value.relative + value.absolute / max(1.0, value.size)
    spread = value.high - value.low
    error = value.error / spread if spread else 0.0
    return INFINITY if math.isnan(error) else error


def _is_lost(number: float, number_format: FloatFormat) -> bool:
    """Whether a constant is infinite or 0 in a format."""
    size = abs(number)
    is_small = 0.0 < size <= 2.0**number_format.flush_exponent
    return is_small or number_format.max < size < INFINITY


def reason_for_all_data(function: Function, number_format: FloatFormat, terms: float = 1) -> str:
    """Returns why a function of so many terms needs float32 whatever its operands, or `""`."""
    node = Node(function)
    if function.in_float32 and not _does_for_range(function, number_format):
        return Problem(node, "always").reason(number_format)
    if function.adds_up and _adds_too_many(function, terms, number_format):
        return Problem(node, "terms", number=terms).reason(number_format)
    return ""


def _does_for_range(function: Function, number_format: FloatFormat) -> bool:
    """Whether a function only needs the range of float32, which this format has."""
    return "needs_range" in function.traits and number_format is not FLOAT16


def _adds_too_many(function: Function, terms: float, number_format: FloatFormat) -> bool:
    if function.most_terms is not None:
        return terms > function.most_terms and number_format is FLOAT16
    return terms * unit_roundoff(number_format) > LARGEST_ERROR


@dataclass
class Needs:
    """What has to be float32 so that nothing leaves the range or loses too much.

    Attributes:
        own: The problems of each unit that has some.
        amplified: The units whose rounding errors another unit amplifies, with that one.
        left: The problems of units that stay in 16 bits; of nodes in no unit by `None`.
        unknown: The nodes in 16 bits that multiply what only the data bound.
    """

    own: dict[Hashable, list[Problem]] = field(default_factory=dict)
    amplified: dict[Hashable, Hashable] = field(default_factory=dict)
    left: dict[Hashable, list[Problem]] = field(default_factory=dict)
    unknown: list[Node] = field(default_factory=list)


def needing_float32(
    nodes: Sequence[Node],
    number_format: FloatFormat,
    float32: Set[Hashable] = frozenset(),
    gaining: Set[Hashable] = frozenset(),
) -> Needs:
    """Returns what has to be float32.

    Args:
        nodes: The graph, as in `interpret`.
        number_format: A 16-bit format.
        float32: The units that are float32 anyway.
        gaining: Those that gain from 16 bits, and keep them if ordinary data have no problem.
    """
    needs = Needs()
    while True:
        chosen = float32 | needs.own.keys() | needs.amplified.keys()
        found = interpret(nodes, number_format, chosen)
        needs.left, added = {}, False
        for problem in found.problems:
            if problem.node in found.float32:
                continue
            # A node in no unit is float32 if what it gets is.
            unit = _unit_before(problem.node, found)
            kept = unit is None or (problem.is_mild and unit in gaining)
            (needs.left if kept else needs.own).setdefault(unit, []).append(problem)
            added |= not kept
        if added:
            continue
        # What is float32, and is not better for it, has inputs with too large an error.
        unhelped = [
            each for each in found.problems if each.kind == "error" and each.node in found.float32
        ]
        rounding = {}
        for is_shown in {each.node in found.shown for each in unhelped}:
            rounding[is_shown] = _rounding_before(nodes, found, any_size=is_shown)
        for problem in unhelped:
            for source in rounding[problem.node in found.shown][problem.node]:
                is_free = chosen.isdisjoint(source.units) and source.units[0] not in gaining
                if not (problem.node.units and is_free):
                    continue
                if source.units[0] == problem.node.units[0]:
                    needs.own.setdefault(source.units[0], []).append(problem)
                else:
                    needs.amplified.setdefault(source.units[0], problem.node.units[0])
        if needs.amplified.keys() | needs.own.keys() <= chosen:
            needs.unknown = found.unknown
            return needs


def _unit_before(node: Node, found: Interpretation) -> Hashable | None:
    """Returns the unit of a node, or else that of a closest node before it that is not float32."""
    pending, seen = [node], set[Node]()
    while pending:
        each = pending.pop(0)
        if each in seen:
            continue
        seen.add(each)
        if each.units:
            return each.units[0]
        before = [operand for operand in each.operands if isinstance(operand, Node)]
        pending += [other for other in before if other not in found.float32 and other not in seen]
    return None


def _rounding_before(
    nodes: Iterable[Node], found: Interpretation, *, any_size: bool
) -> dict[Node, set[Node]]:
    """Returns the closest nodes before each that round to 16 bits, and what passes their results.

    Without `any_size`, not those whose results are as large as the data: the sum of two values of
    any size, such as a residual connection, is not small.
    """
    before: dict[Node, set[Node]] = {}
    passed: dict[Node, set[Node]] = {}  # of a node and those before it, what rounds
    for node in nodes:
        before[node] = set()
        for each in node.operands:
            if isinstance(each, Node):
                before[node] |= passed[each]
        is_exact = _is_exact(node, found)
        passed[node] = set()
        if node in found.float32:
            passed[node] = before[node]
        elif not node.units or not (any_size or _is_small(node, found)):
            continue
        elif before[node] or not is_exact:
            passed[node] = {node} | (before[node] if is_exact else set())
    return before


def _is_small(node: Node, found: Interpretation) -> bool:
    """Whether the results of a node may all be small, or close to a number other than 0."""
    if node.value is not None:
        return False
    value, values = found.values[node], found.values
    if value.is_bounded:
        return node in found.clustering
    operands = [values[each] if isinstance(each, Node) else each for each in node.operands]
    is_one_of_data = sum(not each.is_bounded for each in operands) <= 1
    tends_to_number = any(math.isfinite(end) and end != 0.0 for end in (value.low, value.high))
    return (value.absolute > 0.0 or tends_to_number) and is_one_of_data
