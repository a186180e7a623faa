"""Which optimizer of a program gets the values of which one in a checkpoint of TensorFlow.

A run in float32 may train with a plain optimizer, the same run in float16 with one inside of a
`LossScaleOptimizer`. The plain one and the inner one have the same variables under the same names,
but TensorFlow pairs the plain one with the wrapper. A wrapper without a loss scale is saved as a
plain optimizer.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras

_INNER = "inner_optimizer"
_OTHER_SIZE = (
    "The checkpoint has {saved} variables of a {was} optimizer, and the {is_now} {name!r} has"
    " {own}. {cure}"
)
_OTHER_ROOT = (
    "The root of the checkpoint is a {was} optimizer, and not a {is_now} one. {cure} Save it as an"
    " attribute next time: `tf.train.Checkpoint(optimizer=optimizer)`."
)
_WRAP = "Read it into the optimizer as it was saved, and wrap that: `kmp.wrap(optimizer)`."
_UNWRAP = (
    "Read it into `kmp.LossScaleOptimizer(optimizer)`, and train with the `inner_optimizer` of"
    " that."
)
_TO_WRAPPED = {"was": "plain", "is_now": "wrapped", "cure": _WRAP}
_TO_PLAIN = {"was": "wrapped", "is_now": "plain", "cure": _UNWRAP}


def bind_object_patch(original: Callable[..., bool]) -> Callable[..., bool]:
    """Patches `CheckpointPosition.bind_object` to pair a plain optimizer with an inner one.

    TensorFlow calls it for each object that it reads, also if that is created after `restore`.
    """

    @functools.wraps(original)
    def bind_object(self: Any, trackable: Any) -> bool:
        if not isinstance(trackable, keras.optimizers.Optimizer):
            return original(self, trackable)
        saved_inner = _children(self).get(_INNER)
        has_inner = _INNER in trackable._trackable_children()
        is_wrapper = isinstance(trackable, keras.optimizers.LossScaleOptimizer)
        if is_wrapper and has_inner and saved_inner is None:
            _check_is_no_root(self, _TO_WRAPPED)
            trackable = trackable.inner_optimizer
            _check_size(self, trackable, _TO_WRAPPED)
        elif saved_inner is not None and not has_inner:
            _check_is_no_root(self, _TO_PLAIN)
            # The position becomes that of the inner optimizer.
            self._proto_id = saved_inner
            _check_size(self, trackable.inner_optimizer if is_wrapper else trackable, _TO_PLAIN)
        return original(self, trackable)

    return bind_object


def children_as_plain(
    inner: keras.optimizers.Optimizer, children: dict[str, Any], also: Sequence[str]
) -> dict[str, Any]:
    """Returns what a checkpoint has of a wrapper that is saved as a plain optimizer.

    Args:
        inner: The inner optimizer, whose children take the places of those of the wrapper.
        children: What TensorFlow finds in the wrapper.
        also: The names of those that a plain optimizer has not.
    """
    own = {name: children[name] for name in also if name in children}
    return {**inner._trackable_children(), **own}


def deferred_of(optimizer: keras.optimizers.Optimizer) -> Any:
    """Returns what a checkpoint has for variables that an optimizer does not have yet."""
    return optimizer._deferred_dependencies


def _children(position: Any) -> dict[str, int]:
    """Returns the numbers of the objects that an object of a checkpoint has as attributes."""
    return {child.local_name: child.node_id for child in position.object_proto.children}


def _check_is_no_root(position: Any, words: dict[str, str]) -> None:
    """Raises an error for a root, which has the counter of the checkpoint besides the optimizer."""
    if position.proto_id == 0:
        raise ValueError(_OTHER_ROOT.format(**words))


def _check_size(
    position: Any, optimizer: keras.optimizers.Optimizer, words: dict[str, str]
) -> None:
    """Raises an error if an optimizer has another number of variables than the saved one.

    They are numbered. Keras lists more variables of a plain Adafactor than of an inner one.
    """
    numbered = _children(position).get("_variables")
    if numbered is None or not optimizer.built:
        return
    saved = len(_children(position.create_child_position(numbered)))
    own = len(optimizer.variables)
    if saved != own:
        message = _OTHER_SIZE.format(saved=saved, own=own, name=optimizer.name, **words)
        raise ValueError(message)
