from collections import OrderedDict

import keras
import pytest

from kmp.backend.attributes import attributes_restored


class Remembers(keras.layers.Layer):
    """Keeps what it was called with."""

    def __init__(self):
        super().__init__()
        self.calls, self.known, self.names, self.total = ["first"], {"a": 1}, {"first"}, 0


def state_of(layer):
    return list(layer.calls), dict(layer.known), set(layer.names), layer.total


def change(layer):
    layer.calls.append("second")
    layer.known["b"] = 2
    layer.names.add("second")
    layer.total += 1


def replace(layer):
    layer.calls[0] = "another"
    layer.known["a"] = "another"
    layer.names.clear()
    layer.total = "another"


def change_and_fail(layer, use):
    with attributes_restored([layer]):
        use(layer)
        layer.new = 1
        raise KeyError


@pytest.mark.parametrize("use", [change, replace])
def test_attributes_and_what_is_in_them_are_restored(use):
    layer = Remembers()
    before, containers = state_of(layer), (layer.calls, layer.known, layer.names)
    with pytest.raises(KeyError):
        change_and_fail(layer, use)
    assert state_of(layer) == before
    assert not hasattr(layer, "new")
    kept = layer.calls, layer.known, layer.names
    assert all(a is b for a, b in zip(containers, kept, strict=True))


def test_order_of_a_dictionary_is_restored():
    class Holder:
        known = None

    holder = Holder()
    holder.known = OrderedDict(a=1)
    with attributes_restored([holder]):
        holder.known["b"] = 2
    assert list(holder.known.items()) == [("a", 1)]
