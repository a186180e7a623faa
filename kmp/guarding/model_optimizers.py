"""Finds the optimizers that train a model."""

import keras

from kmp.backend.keras_internals import objects_in, sublayers
from kmp.optimizer import LossScaleOptimizer


def named_optimizers(model: keras.Model) -> dict[str, keras.optimizers.Optimizer]:
    """Returns the optimizers of a model by the name that its `train_step` has for them.

    The one that it is compiled with, `optimizer`, comes first, if any; then those in its
    attributes, also in lists and dictionaries there.
    """
    found = objects_in(model, (keras.optimizers.Optimizer,))
    compiled_with = getattr(model, "optimizer", None)
    if compiled_with is not None:
        found = {"optimizer": compiled_with} | found
    names = {id(optimizer): name for name, optimizer in reversed(found.items())}
    return {name: found[name] for name in found if names[id(found[name])] == name}


def optimizers_of(model: keras.Model) -> dict[str, LossScaleOptimizer]:
    """Returns the `LossScaleOptimizer`s of a model and of the compiled models in it, by name."""
    found = named_optimizers(model)
    known = set(map(id, found.values()))
    for layer in sublayers(model):
        optimizer = getattr(layer, "optimizer", None) if isinstance(layer, keras.Model) else None
        if optimizer is not None and id(optimizer) not in known:
            known.add(id(optimizer))
            found[f"{layer.name}.optimizer"] = optimizer
    return {name: each for name, each in found.items() if isinstance(each, LossScaleOptimizer)}


def all_optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Returns the optimizer a model is compiled with and those in its attributes."""
    return list(named_optimizers(model).values())
