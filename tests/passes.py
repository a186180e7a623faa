"""Passes of a training step over a batch, for tests of replays."""

import functools

import keras
import tensorflow as tf

from kmp.guarding.model_optimizers import all_optimizers_of
from kmp.replay import Passes, traced_step


def passes_of(model, data, **options):
    """Returns passes of the `train_step` of a model, which is traced once without `fit`."""
    data = keras.tree.map_structure(tf.convert_to_tensor, data)
    run = functools.partial(type(model).train_step, model)
    graph = traced_step(run, data, [model], all_optimizers_of(model))
    variables = {variable.path: variable for variable in model.trainable_variables}
    return Passes(model, data, graph, variables, **options)
