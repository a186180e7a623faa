"""State of a plain optimizer for a wrapped one, and the other way round.

A run in float32 trains with a plain optimizer, the same run in float16 with one inside of a
`LossScaleOptimizer`. Keras finds variables in a file by their position, and TensorFlow by the
attributes that lead to them, so neither finds those of the other.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakSet

import keras
import tensorflow as tf

from kmp.backend import keras_internals
from kmp.gradients.tensor_groups import Variables

# The variables of the wrapper, before those of the inner optimizer: two that each optimizer of
# Keras has, the step counter and the loss scale.
_WRAPPER_COUNT = 4
# Inner optimizers that have state from a file without any at their own place.
_loaded: WeakSet[keras.optimizers.Optimizer] = WeakSet()


def load_own_variables_patch(original: Callable[..., None]) -> Callable[..., None]:
    """Patches `load_own_variables` to load state into a wrapper, or from one.

    Keras warns that the numbers of variables differ, and loads nothing.
    """

    @functools.wraps(original)
    def load_own_variables(self: keras.optimizers.Optimizer, store: Any) -> None:
        if isinstance(self, keras.optimizers.LossScaleOptimizer):
            if _load_plain(self.inner_optimizer, store):
                _loaded.add(self.inner_optimizer)
                return
        elif self in _loaded and not store.keys():
            _loaded.discard(self)
            return
        elif _fits(self.variables, store, _WRAPPER_COUNT):
            _assign(self.variables, store, _WRAPPER_COUNT)
            return
        original(self, store)

    return load_own_variables


def _load_plain(inner: keras.optimizers.Optimizer, store: Any) -> bool:
    """Loads the state of a plain optimizer into an inner one; returns whether it fits."""
    if _fits(inner.variables, store):
        _assign(inner.variables, store)
        return True
    state = keras_internals.optimizer_state(inner)
    if len(store.keys()) != len(state):
        return False
    # Keras lists fewer variables of an inner optimizer, in an order that only a plain one has.
    plain = type(inner).from_config(inner.get_config())
    plain.build(keras_internals.variables_to_train(inner))
    if not _fits(plain.variables, store):
        return False
    _assign(plain.variables, store)
    for variable, loaded in zip(state, keras_internals.optimizer_state(plain), strict=True):
        variable.assign(loaded)
    return True


def _fits(variables: Variables, store: Any, first: int = 0) -> bool:
    """Whether a file has values of the shapes of variables, the first ones left out."""
    if len(store.keys()) != len(variables) + first:
        return False
    numbered = enumerate(variables, start=first)
    return all(tuple(store[str(index)].shape) == tuple(each.shape) for index, each in numbered)


def _assign(variables: Variables, store: Any, first: int = 0) -> None:
    for index, variable in enumerate(variables, start=first):
        variable.assign(store[str(index)])


def checkpoint_read_patch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patches `tf.train.Checkpoint.read` to raise an error if an optimizer is wrapped otherwise.

    TensorFlow's error is about the dtype of a variable, or it loads nothing of the optimizer.
    """

    @functools.wraps(original)
    def read(self: tf.train.Checkpoint, save_path: Any, *args: Any, **kwargs: Any) -> Any:
        for place, optimizer in _optimizers_in(self):
            _check_wrapped_alike(place, optimizer, save_path)
        return original(self, save_path, *args, **kwargs)

    return read


def _optimizers_in(
    checkpoint: tf.train.Checkpoint,
) -> Iterator[tuple[str, keras.optimizers.Optimizer]]:
    """Yields the optimizers of a checkpoint with the beginning of the names of their variables."""
    for name, value in vars(checkpoint).items():
        optimizer = getattr(value, "optimizer", None) if isinstance(value, keras.Model) else value
        if isinstance(optimizer, keras.optimizers.Optimizer):
            yield (f"{name}/" if optimizer is value else f"{name}/optimizer/"), optimizer


def _check_wrapped_alike(place: str, optimizer: keras.optimizers.Optimizer, save_path: Any) -> None:
    try:
        names = [name for name, _ in tf.train.list_variables(save_path)]
    except (TypeError, ValueError, tf.errors.OpError):
        return  # no checkpoint, about which TensorFlow raises its own error
    of_optimizer = [name for name in names if name.startswith(place)]
    in_wrapper = [name for name in of_optimizer if name.startswith(f"{place}inner_optimizer/")]
    is_wrapper = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if not of_optimizer or is_wrapper == bool(in_wrapper):
        return
    if is_wrapper:
        raise ValueError(
            f"The checkpoint {save_path} has a plain optimizer at {place!r}, and not one in a"
            " LossScaleOptimizer. Read it into a plain optimizer, and wrap that afterwards:"
            " `kmp.wrap(optimizer)`. For a model, compile it with `auto_scale_loss=False` to read"
            " the checkpoint, then again with the wrapped optimizer."
        )
    raise ValueError(
        f"The checkpoint {save_path} has a LossScaleOptimizer at {place!r}, and not a plain"
        " optimizer. Read it into `kmp.LossScaleOptimizer(optimizer)`, and train with its"
        " `inner_optimizer` afterwards."
    )
