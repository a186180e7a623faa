"""Which layers the operations of a training step belong to, in its graph."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
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
        path: That of the layer.
        name: That of the layer.
        dtype: That in which the layer computes by its policy.
        operations: Which operations of the graph the call made.
        returned: What it returned.
        outputs: The tensors in that.
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
        operations = graph.get_operations()
        self._operations, self._calls = operations, calls
        self._chains: dict[LayerCall, list[LayerCall]] = {}
        self.owners: list[LayerCall | None] = [None] * len(operations)
        scopes: dict[str, LayerCall] = {}
        for call in reversed(self._calls):  # a call returns after those in it
            opened = re.compile(rf"(?:.*/)?{re.escape(call.name)}(?:_\d+)?(?=/)")
            for index in range(*call.operations.indices(len(operations))):
                self.owners[index] = call
                if found := opened.match(operations[index].name):
                    scopes[found[0]] = call
        self.are_backward = [_TAPE in each.name for each in operations]
        self.origins: dict[str, str] = {}
        self.gradients: dict[LayerCall, dict[str, tf.Tensor]] = {}
        index_of = {each.name: index for index, each in enumerate(operations)}
        for index, operation in enumerate(operations):
            sources = [index_of[each.op.name] for each in operation.inputs]
            backward = [each for each in sources if self.are_backward[each]]
            if self.are_backward[index]:
                scope = operation.name.rpartition(_TAPE)[2]
                while scope and scope not in scopes:
                    if scope in index_of:
                        self.origins.setdefault(operation.name, scope)
                    scope = scope.rpartition("/")[0]
                self.owners[index] = scopes.get(scope, self.owners[index])
            elif self.owners[index] is None and backward:
                self.are_backward[index] = True
                self.owners[index] = self._around([self.owners[each] for each in backward])
            if self.are_backward[index]:
                self._add_gradients(operation, index, sources)
        self.seeds = [each.outputs[0] for each in operations if self._is_seed(each, index_of)]

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

        That of the gradient of a cast, and such as that of targets to the dtype of outputs.
        """
        known = zip(self._operations, self.owners, self.are_backward, strict=True)
        return {
            operation.name
            for operation, owner, is_backward in known
            if operation.type == "Cast" and (is_backward or owner is None)
        }

    def operations_with(
        self, calls: Iterable[LayerCall], variables: Collection[str] = ()
    ) -> set[str]:
        """Returns the names of the operations that another dtype of these layers changes.

        Those of their calls, and operations outside of layers that get what these return, or
        compute what is computed with it; a layer that gets it casts it. With the backward passes of
        all of them.

        Args:
            calls: The calls of the layers.
            variables: The names of the placeholders of variables that have the other dtype too.
        """
        wanted = [call.operations for call in calls]
        known = list(zip(self._operations, self.owners, self.are_backward, strict=True))
        own = {
            operation.name
            for operation, owner, _ in known
            if owner and any(_contains(each, owner.operations) for each in wanted)
        }
        forward = [(each, owner) for each, owner, is_backward in known if not is_backward]
        chosen = self._forward_with(own, variables, forward)
        for operation, owner, is_backward in known:
            is_chosen = operation.name in own or self.origins.get(operation.name) in chosen
            if not is_chosen and owner is None and any(map(_is_in_16_bits, operation.outputs)):
                is_chosen = any(each.op.name in chosen for each in operation.inputs)
            if is_backward and is_chosen:
                chosen.add(operation.name)
        # Sums of gradients of which all is one for an operation in the other dtype.
        for operation in reversed(self._operations):
            if operation.type == "AddN":
                users = {each.name for each in operation.outputs[0].consumers()}
                if users and users <= chosen:
                    chosen.add(operation.name)
        return chosen

    def _forward_with(
        self,
        own: Collection[str],
        variables: Collection[str],
        forward: Sequence[tuple[tf.Operation, LayerCall | None]],
    ) -> set[str]:
        """Returns the names of the operations of the forward pass among `operations_with`."""
        owner_of: dict[str, LayerCall | None] = {}

        def follows(operation: tf.Operation, owner: LayerCall | None) -> bool:
            """Whether it computes in the dtype of an operand that has another one."""
            if operation.type == "Cast" or not any(map(_is_in_16_bits, operation.outputs)):
                return False
            # An operation of a functional graph casts nothing, and has no dtype.
            entered = {call for call in self.chain(owner) if call.dtype}
            sources = [each.op.name for each in operation.inputs if _is_in_16_bits(each)]
            return any(
                source in owner_of and entered <= set(self.chain(owner_of[source]))
                for source in sources
            )

        for operation, owner in forward:
            reads = any(each.op.name in variables for each in operation.inputs)
            if operation.name in own or reads or follows(operation, owner):
                owner_of[operation.name] = owner
        chosen, names = set(owner_of), {operation.name for operation, _ in forward}
        for operation, owner in reversed(forward):
            if owner is None and any(map(_is_in_16_bits, operation.outputs)):
                users = {each.name for output in operation.outputs for each in output.consumers()}
                users &= names
                if operation.type != "Cast" and users and users <= chosen:
                    chosen.add(operation.name)
        return chosen

    @property
    def in_backward_order(self) -> list[LayerCall]:
        """The calls with a gradient, in the order in which a backward pass reaches them."""
        return list(self.gradients)

    def gradients_of(self, call: LayerCall) -> list[tf.Tensor]:
        """Returns the gradients of the outputs of a call; none if it only passes them on."""
        return list(self.gradients.get(call, {}).values())

    def _is_seed(self, operation: tf.Operation, index_of: Mapping[str, int]) -> bool:
        if operation.type not in ("Const", "Fill") or not operation.outputs[0].dtype.is_floating:
            return False
        value = tf.get_static_value(operation.outputs[0])
        users = [index_of[each.name] for each in operation.outputs[0].consumers()]
        is_first = bool(users) and all(self.are_backward[each] for each in users)
        return is_first and value is not None and bool(np.all(value == 1))

    def _around(self, calls: Sequence[LayerCall | None]) -> LayerCall | None:
        """Returns the innermost call that contains all of these."""
        chains = [self.chain(call) for call in calls]
        common = (each for each in chains[0] if all(each in chain for chain in chains))
        return next(common, None)

    def _add_gradients(self, operation: tf.Operation, index: int, sources: Sequence[int]) -> None:
        """Adds what enters the backward pass of a call from that of others."""
        entered = self.chain(self.owners[index])
        for tensor, source in zip(operation.inputs, sources, strict=True):
            if not (self.are_backward[source] and tensor.dtype.is_floating):
                continue
            left = self.chain(self.owners[source])
            for call in entered:
                if call not in left:
                    self.gradients.setdefault(call, {})[tensor.name] = tensor


def _is_in_16_bits(tensor: tf.Tensor) -> bool:
    return tensor.dtype.name in DTYPES_16_BIT


def _contains(outer: slice, inner: slice) -> bool:
    return bool(outer.start <= inner.start and inner.stop <= outer.stop)
