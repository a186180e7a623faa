"""References to the last batches of `fit`, kept beside the training step."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from kmp.replay.failure_reasons import reason_of

MOST_BYTES = 2**26  # of what is read of a batch, and of variables on a GPU
_MOST = 32  # batches
_MOST_BYTES = 2**28  # of all that are kept, on the host; but at least one batch
_UNTIL_SIZE_IS_KNOWN = 8  # batches
_DEVICE = "CPU:0"  # where the pipeline of `fit` has its batches
_COMPOSITES = (tf.SparseTensor, tf.RaggedTensor)


class _Structure(NamedTuple):
    """What an optional does not know of the tensors in it."""

    data: Any
    dtypes: tuple[tf.DType, ...]


class KeptBatches:
    """The last batches that the train function has taken from its iterator.

    `keeping` is around the training step, outside of what XLA compiles, and in each turn of the
    loop of `steps_per_execution`. It adds nine operations on the host: no kernel, no branch, no
    copy of an element, and nothing for which the host waits. Batches that the pipeline has in the
    memory of a GPU are copied to the host.

    Attributes:
        is_keeping: Whether the code that runs now is a step whose batch is kept.
        failure: Why batches are not kept, or `None`. The training goes on.
    """

    def __init__(self) -> None:
        self.is_keeping = False
        self.failure: str | None = None
        self._structures: list[_Structure] = []
        self._users: set[object] = set()
        self._is_size_known = False
        self._forgotten = 0  # the last batch whose memory was freed
        with tf.init_scope(), tf.device(_DEVICE):
            self._empty = tf.raw_ops.TensorListReserve(
                element_shape=tf.constant(-1), num_elements=_MOST, element_dtype=tf.variant
            )
            for slot in range(_MOST):
                self._empty = _with_item(self._empty, slot, tf.raw_ops.OptionalNone())
            # Each is an optional of a number from 1, the index of a structure, and a batch.
            self._items = tf.Variable(self._empty, trainable=False)
            self._count = tf.Variable(0, trainable=False, dtype=tf.int32)
            self._slots = tf.Variable(_UNTIL_SIZE_IS_KNOWN, trainable=False, dtype=tf.int32)

    @property
    def count(self) -> int:
        """The number of batches so far, which is the number of the last one."""
        return int(self._count.numpy())

    @property
    def slots(self) -> int:
        """How many batches are kept."""
        return int(self._slots.numpy())

    @property
    def most_steps(self) -> int:
        """In how many steps the batch of a step has to be read."""
        return self.slots if self.count > self._forgotten else _MOST

    @contextlib.contextmanager
    def keeping(self, data: Any) -> Iterator[None]:
        """Keeps the batch of the training step that runs in this context."""
        if self.failure is None:
            try:
                self._keep(data)
            except Exception as error:  # whatever it is, the training goes on
                self.failure = reason_of(error)
        self.is_keeping = True
        try:
            yield
        finally:
            self.is_keeping = False

    def _keep(self, data: Any) -> None:
        """Adds what keeps a batch in place of the oldest one, unless it has a `None` in it."""
        while isinstance(data, tuple) and data and data[-1] is None:  # of `train_on_batch`
            data = data[:-1]
        flat = keras.tree.flatten(data)
        if any(each is None for each in flat):
            return
        check_tensors(flat)
        with tf.device(_DEVICE):
            tensors = [tf.convert_to_tensor(each) for each in flat]
            index = self._index_of(data, tensors)
            batch = tf.raw_ops.OptionalFromValue(components=tensors)
            with tf.control_dependencies(tensors):  # not where the iterator has no batch left
                self._count.assign_add(1)
            number = self._count.read_value()
            item = tf.raw_ops.OptionalFromValue(components=[number, tf.constant(index), batch])
            slot = tf.math.floormod(number, self._slots)
            self._items.assign(_with_item(self._items.read_value(), slot, item))

    def get(self, number: int) -> Any:
        """Returns a batch by its number, or `None` if it is not kept any more."""
        with tf.device(_DEVICE):
            item = _item(self._items.read_value(), number % self.slots)
            if not bool(tf.raw_ops.OptionalHasValue(optional=item)):
                return None
            kept, index, batch = _values(item, [tf.int32, tf.int32, tf.variant])
            if int(kept) != number:
                return None
            data, dtypes = self._structures[int(index)]
            return keras.tree.pack_sequence_as(data, _values(batch, dtypes))

    def bound_memory(self) -> None:
        """Sets how many batches are kept, as soon as the size of one is known."""
        is_needless = self._is_size_known or self.failure or not self._users
        if is_needless or self.count == self._forgotten:
            return
        before, last = self.slots, self.count
        data = self.get(last)
        if data is None:
            return
        self._is_size_known = True
        slots = min(_MOST, max(1, _MOST_BYTES // max(1, bytes_of(data))))
        with tf.device(_DEVICE):
            items = self._empty
            for number in range(max(1, last + 1 - min(before, slots)), last + 1):
                item = _item(self._items.read_value(), number % before)
                items = _with_item(items, number % slots, item)
            self._slots.assign(slots)
            self._items.assign(items)

    def use(self, user: object) -> None:
        """Notes that an object reads batches, until it is passed to `forget`."""
        if not self._users:
            self._slots.assign(_UNTIL_SIZE_IS_KNOWN)
        self._users.add(user)

    def forget(self, user: object) -> None:
        """Frees the memory of the batches, unless another object reads them.

        The step keeps only the last batch from then on.
        """
        self._users.discard(user)
        if not self._users:
            self._items.assign(self._empty)
            self._slots.assign(1)
            self._is_size_known = False
            self._forgotten = self.count

    def _index_of(self, data: Any, tensors: Sequence[tf.Tensor]) -> int:
        dtypes = tuple(each.dtype for each in tensors)
        structure = _Structure(keras.tree.map_structure(lambda _: 0, data), dtypes)
        if structure not in self._structures:
            self._structures.append(structure)
        return self._structures.index(structure)


def check_tensors(tensors: Sequence[Any]) -> None:
    """Raises a `TypeError` if one of these is no dense tensor or array of numbers or booleans."""
    for each in tensors:
        if isinstance(each, _COMPOSITES):
            raise TypeError(f"it has a {type(each).__name__}")
        dtype = tf.as_dtype(each.dtype)
        if not (dtype.is_floating or dtype.is_integer or dtype.is_bool):
            raise TypeError(f"it has a tensor of {dtype.name}")


def bytes_of(data: Any) -> int:
    """Returns the size of the tensors of a batch."""
    return sum(math.prod(each.shape) * each.dtype.size for each in keras.tree.flatten(data))


def _item(items: tf.Tensor, slot: int) -> tf.Tensor:
    return tf.raw_ops.TensorListGetItem(
        input_handle=items,
        index=slot,
        element_shape=tf.constant(-1),
        element_dtype=tf.variant,
    )


def _with_item(items: tf.Tensor, slot: Any, item: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.TensorListSetItem(input_handle=items, index=slot, item=item)


def _values(optional: tf.Tensor, dtypes: Sequence[tf.DType]) -> list[tf.Tensor]:
    """Returns the tensors in an optional."""
    shapes = [tf.TensorShape(None)] * len(dtypes)
    return tf.raw_ops.OptionalGetValue(
        optional=optional, output_types=list(dtypes), output_shapes=shapes
    )
