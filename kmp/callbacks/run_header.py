"""The first line of a log: versions, and the settings of the training."""

import dataclasses
import datetime
import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kmp.backend import compute_dtypes, is_keras_class, keras_internals, layers_by_path, output_layers, sublayers
from kmp.callbacks.training_records import to_number
from kmp.gradients import paths_of
from kmp.optimizer import LossScaleOptimizer
from kmp.policy import guarding, settings_call
from kmp.records import SCHEMA
from kmp.utils import FLOAT32


def header(model: keras.Model, optimizer: LossScaleOptimizer) -> dict[str, Any]:
    """Returns the first line of a log: the start time, the versions and the settings; see `kmp.records`."""
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    versions = {"keras": keras.__version__, "tensorflow": tf.__version__, "numpy": np.__version__}
    settings = {"rule": type(optimizer.rule).__name__} | dataclasses.asdict(optimizer.rule)
    settings |= {
        "model": model.name,
        "policy": model.dtype_policy.name,
        "compute_dtypes": sorted(compute_dtypes(model)),
        "optimizer": type(optimizer.inner_optimizer).__name__,
        "is_keras_optimizer": is_keras_class(type(optimizer.inner_optimizer)),
        "settings_call": settings_call(optimizer),
        "train_step": "keras" if guarding.has_keras_step(model) else "custom",
        "replicas": model.distribute_strategy.num_replicas_in_sync,
    }
    inner, numbers = optimizer.inner_optimizer, ["learning_rate", "epsilon", "beta_2"]
    if isinstance(keras_internals.learning_rate_of(inner), keras.optimizers.schedules.LearningRateSchedule):
        numbers.remove("learning_rate")  # it changes
    values = {name: to_number(getattr(inner, name, None)) for name in numbers}
    settings |= {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
    variables = model.trainable_variables  # `fit` builds the optimizer on these
    by_path = optimizer.variables_by_path() or dict(zip(paths_of(variables), variables, strict=True))
    settings["variable_dtypes"] = sorted({variable.dtype for variable in variables})
    # A variable may be shared between layers: it counts as float32 if only float32 layers use it.
    uses = [(layer, variable) for layer in sublayers(model) for variable in keras_internals.declared_trainable(layer)]
    other_ids = {id(variable) for layer, variable in uses if layer.compute_dtype != FLOAT32.name}
    float32_ids = {id(variable) for layer, variable in uses if layer.compute_dtype == FLOAT32.name} - other_ids
    own_dtype_ids = {id(variable) for layer, variable in uses if variable.dtype != layer.variable_dtype}
    settings["float32_variables"] = [path for path, variable in by_path.items() if id(variable) in float32_ids]
    settings["own_dtype_variables"] = [path for path, variable in by_path.items() if id(variable) in own_dtype_ids]
    if model.built:
        settings["parameters"] = model.count_params()
        settings["layers"] = {path: type(layer).__name__ for path, layer in layers_by_path(model).items()}
        settings["output_layers"] = [layer.path or layer.name for layer in output_layers(model)]
    return {"schema": SCHEMA, "kind": "header", "started": started, **versions, "settings": settings}
