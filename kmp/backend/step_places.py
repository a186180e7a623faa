"""Which layers the operations of a training step belong to, in its graph."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from kmp.utils.float_formats import DTYPES_16_BIT

_TAPE = "gradient_tape/"  # in the names of operations of a backward pass


@dataclass(frozen=True, eq=False)
class LayerCall:
    """A call of a layer.

    Attributes:
        layer: The `id` of the layer.
        path: The path of the layer.
        name: The name of the layer.
        dtype: The dtype in which the layer computes by its policy.
        operations: Which operations of the graph the call made.
        returned: What it returned.
        outputs: The tensors in what it returned.
    """

    layer: int
    path: str
    name: str
    dtype: str
    operations: slice
    returned: Any
    outputs: list[tf.Tensor]


class Places:
    """Which calls of layers the operations of a graph belong to.

    The operations of a backward pass begin with `gradient_tape/` and the scope that Keras opens in
    the call: the layer's name with a number, if TensorFlow makes it unique by one. Sums of
    gradients, which have no scope, belong to the innermost call with all of their operands.

    Args:
        graph: The graph.
        calls: The calls, in the order in which they returned.

    Attributes:
        owners: The innermost call of each operation, in the order of the graph; `None` of one that
            is in no layer, as in the loss.
        are_backward: Whether each operation is of a backward pass.
        origins: The names of the operations whose gradient is computed, by that of an operation
            of a backward pass.
        gradients: The gradients of the outputs of each call, in the order of the backward pass.
        seeds: The ones with which backward passes begin.
    """

    def __init__(self, graph: Any, calls: Sequence[LayerCall]) -> None:
        self._operations, self._calls = graph.get_operations(), calls
        self._index_of = {each.name: index for index, each in enumerate(self._operations)}
        self._chains: dict[LayerCall, list[LayerCall]] = {}
        self.owners: list[LayerCall | None] = [None] * len(self._operations)
        self.are_backward = [_TAPE in each.name for each in self._operations]
        self.origins: dict[str, str] = {}
        self.gradients: dict[LayerCall, dict[str, tf.Tensor]] = {}
        self._place_backward(self._place_forward())
        self.seeds = [each.outputs[0] for each in self._operations if self._is_seed(each)]

    def _place_forward(self) -> dict[str, LayerCall]:
        """Finds the owners of the operations that calls make, and returns the scopes of calls."""
        scopes: dict[str, LayerCall] = {}
        for call in reversed(self._calls):  # a call returns after those in it
            opened = re.compile(rf"(?:.*/)?{re.escape(call.name)}(?:_\d+)?(?=/)")
            for index in range(*call.operations.indices(len(self._operations))):
                self.owners[index] = call
                found = opened.match(self._operations[index].name)
                if found:
                    scopes[found[0]] = call
        return scopes

    def _place_backward(self, scopes: Mapping[str, LayerCall]) -> None:
        """Finds the owners of the operations of a backward pass, and the gradients of calls."""
        for index, operation in enumerate(self._operations):
            sources = [self._index_of[each.op.name] for each in operation.inputs]
            backward = [each for each in sources if self.are_backward[each]]
            if self.are_backward[index]:
                scope = operation.name.rpartition(_TAPE)[2]
                while scope and scope not in scopes:
                    if scope in self._index_of:
                        self.origins.setdefault(operation.name, scope)
                    scope = scope.rpartition("/")[0]
                self.owners[index] = scopes.get(scope, self.owners[index])
            elif self.owners[index] is None and backward:
                self.are_backward[index] = True
                # The innermost call that contains all of these.
                first, *others = (self.chain(self.owners[each]) for each in backward)
                common = (call for call in first if all(call in other for other in others))
                self.owners[index] = next(common, None)
            if not self.are_backward[index]:
                continue

            # What enters the backward pass of a call from that of others.
            entered = self.chain(self.owners[index])
            for tensor, source in zip(operation.inputs, sources, strict=True):
                if not (self.are_backward[source] and tensor.dtype.is_floating):
                    continue
                left = self.chain(self.owners[source])
                for call in entered:
                    if call not in left:
                        self.gradients.setdefault(call, {})[tensor.name] = tensor

    def _is_seed(self, operation: tf.Operation) -> bool:
        """Whether an operation makes ones with which a backward pass begins."""
        if operation.type not in ("Const", "Fill") or not operation.outputs[0].dtype.is_floating:
            return False
        value = tf.get_static_value(operation.outputs[0])
        users = [self._index_of[each.name] for each in operation.outputs[0].consumers()]
        is_first = bool(users) and all(self.are_backward[each] for each in users)
        return is_first and value is not None and bool(np.all(value == 1))

    def chain(self, call: LayerCall | None) -> list[LayerCall]:
        """Returns a call and those that contain it, the innermost first."""
        if call is None:
            return []
        if call not in self._chains:
            later = self._calls[self._calls.index(call) :]
            self._chains[call] = [
                each for each in later if _contains(each.operations, call.operations)
            ]
        return self._chains[call]

    @property
    def outermost_calls(self) -> list[LayerCall]:
        """The calls that no other call contains."""
        return [call for call in self._calls if len(self.chain(call)) == 1]

    @property
    def following_casts(self) -> set[str]:
        """The names of casts to the dtype of another operand.

        They are the gradients of casts, and casts outside of layers, such as that of targets to the
        dtype of outputs.
        """
        return {
            operation.name
            for operation, owner, is_backward in self._placed()
            if operation.type == "Cast" and (is_backward or owner is None)
        }

    def operations_with(
        self, calls: Iterable[LayerCall], variables: Collection[str] = ()
    ) -> set[str]:
        """Returns the names of the operations that another dtype of these layers changes.

        These are the operations of their calls, with their backward passes. Outside of layers, what
        gets their values follows their dtype, and so does what is computed for such operations
        only. A layer that gets their values casts them.

        Args:
            calls: The calls of the layers.
            variables: The names of the placeholders of variables that have the other dtype too.
        """
        wanted = [call.operations for call in calls]
        of_calls = {
            operation.name
            for operation, owner, _ in self._placed()
            if owner and any(_contains(each, owner.operations) for each in wanted)
        }
        chosen = self._forward_with(of_calls, variables)

        # Their backward passes, and what computes with these outside of layers.
        for operation, owner, is_backward in self._placed():
            if not is_backward:
                continue
            is_chosen = operation.name in of_calls or self.origins.get(operation.name) in chosen
            if not is_chosen and owner is None and any(map(_is_in_16_bits, operation.outputs)):
                is_chosen = any(each.op.name in chosen for each in operation.inputs)
            if is_chosen:
                chosen.add(operation.name)

        # Sums of gradients that only operations in the other dtype get.
        for operation in reversed(self._operations):
            if operation.type == "AddN":
                users = {each.name for each in operation.outputs[0].consumers()}
                if users and users <= chosen:
                    chosen.add(operation.name)
        return chosen

    def _forward_with(self, of_calls: Collection[str], variables: Collection[str]) -> set[str]:
        """Returns the names of the operations of the forward pass among `operations_with`."""
        forward = [(each, owner) for each, owner, is_backward in self._placed() if not is_backward]
        owner_of: dict[str, LayerCall | None] = {}
        for operation, owner in forward:
            reads = any(each.op.name in variables for each in operation.inputs)
            if operation.name in of_calls or reads or self._follows(operation, owner, owner_of):
                owner_of[operation.name] = owner

        # What is computed outside of layers for these only.
        chosen, names = set(owner_of), {operation.name for operation, _ in forward}
        for operation, owner in reversed(forward):
            is_outside = owner is None and operation.type != "Cast"
            if is_outside and any(map(_is_in_16_bits, operation.outputs)):
                users = {each.name for output in operation.outputs for each in output.consumers()}
                users &= names
                if users and users <= chosen:
                    chosen.add(operation.name)
        return chosen

    def _follows(
        self,
        operation: tf.Operation,
        owner: LayerCall | None,
        owner_of: Mapping[str, LayerCall | None],
    ) -> bool:
        """Whether an operation computes in the dtype of an operand that has another one.

        Args:
            operation: The operation.
            owner: The call that it belongs to.
            owner_of: Those of the operations that are in another dtype, by name.
        """
        if operation.type == "Cast" or not any(map(_is_in_16_bits, operation.outputs)):
            return False
        # An operation of a functional graph casts nothing, and has no dtype.
        entered = {call for call in self.chain(owner) if call.dtype}
        sources = [each.op.name for each in operation.inputs if _is_in_16_bits(each)]
        return any(
            source in owner_of and entered <= set(self.chain(owner_of[source]))
            for source in sources
        )

    def _placed(self) -> Iterator[tuple[tf.Operation, LayerCall | None, bool]]:
        """Yields each operation with its owner, and whether it is of a backward pass."""
        yield from zip(self._operations, self.owners, self.are_backward, strict=True)

    @property
    def in_backward_order(self) -> list[LayerCall]:
        """The calls with a gradient, in the order in which a backward pass reaches them."""
        return list(self.gradients)

    def gradients_of(self, call: LayerCall) -> list[tf.Tensor]:
        """Returns the gradients of the outputs of a call; none if it only passes them on."""
        return list(self.gradients.get(call, {}).values())


def _is_in_16_bits(tensor: tf.Tensor) -> bool:
    return tensor.dtype.name in DTYPES_16_BIT


def _contains(outer: slice, inner: slice) -> bool:
    return bool(outer.start <= inner.start and inner.stop <= outer.stop)
