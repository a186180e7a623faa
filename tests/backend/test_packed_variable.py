import keras
import numpy as np
import tensorflow as tf

from kmp.backend import PackedVariable


class Holder(tf.Module):
    """Has the elements of a packed variable as attributes."""

    def __init__(self, values):
        super().__init__()
        packed = PackedVariable(keras.Variable(values, dtype="int64", trainable=False), ("first", "second"))
        self.packed, self.one, self.two = packed, packed.elements["first"], packed.elements["second"]


class Scalars(tf.Module):
    """Has the same attributes, as variables of their own."""

    def __init__(self, one, two):
        super().__init__()
        self.one, self.two = tf.Variable(one, dtype="int64"), tf.Variable(two, dtype="int64")


def test_elements_are_read_by_name_and_written_one_by_one():
    packed = Holder([3, 4]).packed
    packed.elements["second"].assign(7)
    assert packed.read() == {"first": 3, "second": 7}
    assert int(packed.elements["second"].value) == 7


def test_checkpoint_has_the_elements_as_variables_of_their_own(tmp_path):
    saved, loaded = Holder([3, 4]), Scalars(0, 0)
    path = tf.train.Checkpoint(saved).write(str(tmp_path / "packed"))
    tf.train.Checkpoint(loaded).read(path).assert_consumed()
    assert (int(loaded.one), int(loaded.two)) == (3, 4)


def test_elements_are_restored_from_variables_of_their_own(tmp_path):
    loaded = Holder([0, 0])
    path = tf.train.Checkpoint(Scalars(3, 4)).write(str(tmp_path / "scalars"))
    tf.train.Checkpoint(loaded).read(path).assert_consumed()
    np.testing.assert_array_equal(loaded.packed.variable, [3, 4])
