"""Makes the header and the records of a training."""

import dataclasses
import datetime
import json
import math
import os
from collections.abc import Collection, Mapping
from itertools import islice
from typing import Any

import keras
import msgspec
import numpy as np
import tensorflow as tf
from msgspec import UNSET

from kmp.backend import keras_internals
from kmp.backend.keras_internals import (
    compute_dtypes,
    created_layers,
    is_keras_class,
    output_layers,
    sublayers,
)
from kmp.backend.layer_graph import next_layers
from kmp.gradients.gradient_sampler import paths_of
from kmp.guarding.guarded_step import guarded_step_of, has_keras_step, is_built
from kmp.guarding.model_optimizers import all_optimizers_of
from kmp.optimizer import LossScaleOptimizer
from kmp.optimizer.counters import COUNT_INDEX
from kmp.records import Header, Record, Settings, Snapshot
from kmp.records.compact_sample import compact
from kmp.records.log_types import HIGHEST_NUMBER, MOST_METRICS
from kmp.utils import validation
from kmp.utils.float_formats import FLOAT32

# What can be recorded, by the key that it adds to Keras' `logs`.
LOSS_SCALE, OVERFLOWS, GRADIENTS = RECORDED = ("loss_scale", "overflow_count", "grad_norm")

Logs = dict[str, Any] | None
PathLike = str | os.PathLike[str]


def header(
    model: keras.Model, optimizer: LossScaleOptimizer, *, replay: bool, has_trained: bool = False
) -> Header:
    """Returns the first line of a log: the time, the versions and the settings of the training.

    The paths of layers are known after the first step, or if all of them are built; which
    variables are not trained, after the first step.
    """
    return Header(
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        keras=keras.__version__,
        tensorflow=tf.__version__,
        numpy=np.__version__,
        settings=_settings(model, optimizer, replay, has_trained),
    )


def _settings(
    model: keras.Model, optimizer: LossScaleOptimizer, replay: bool, has_trained: bool
) -> Settings:
    inner = optimizer.inner_optimizer
    schedule = keras.optimizers.schedules.LearningRateSchedule
    rate_changes = isinstance(keras_internals.learning_rate_of(inner), schedule)
    clipping = ("clipnorm", "clipvalue", "global_clipnorm")
    float32_variables, own_dtype_variables = _variables_by_dtype(model, optimizer)
    settings = Settings(
        rule=type(optimizer.rule).__name__,
        **dataclasses.asdict(optimizer.rule),
        settings_call=optimizer.settings_call,
        model=model.name,
        policy=model.dtype_policy.name,
        policy_in_force=keras.config.dtype_policy().name,
        floatx=keras.config.floatx(),
        compute_dtypes=sorted(compute_dtypes(model)),
        # `fit` builds the optimizer on these.
        variable_dtypes=sorted({variable.dtype for variable in model.trainable_variables}),
        float32_variables=float32_variables,
        own_dtype_variables=own_dtype_variables,
        train_step="keras" if has_keras_step(model) else "custom",
        optimizer=type(inner).__name__,
        is_keras_optimizer=is_keras_class(type(inner)),
        clips=any(getattr(inner, name, None) for name in clipping),
        learning_rate=None if rate_changes else _finite_number(inner, "learning_rate"),
        epsilon=_finite_number(inner, "epsilon"),
        beta_2=_finite_number(inner, "beta_2"),
        replicas=model.distribute_strategy.num_replicas_in_sync,
        steps_per_execution=model.steps_per_execution,
        replay=replay,
    )
    if has_trained or is_built(model):
        settings = msgspec.structs.replace(
            settings,
            parameters=sum(math.prod(weight.shape) for weight in model.weights),
            layers=layer_classes(model),
            next_layers=next_layers(model),
            output_layers=[layer.path or layer.name for layer in output_layers(model)],
        )
    if has_trained:
        guard = guarded_step_of(model)
        settings = msgspec.structs.replace(
            settings,
            untrained_variables=_untrained_variables(model, optimizer),
            in_fit=guard is not None and guard.has_run,
            promoted=[str(place) for place in guard.promoted] if guard else [],
            step_facts=guard.facts_of(optimizer) if guard else None,
        )
    return settings


def _finite_number(optimizer: keras.Optimizer, name: str) -> float | None:
    """Returns a setting of an optimizer; `None` if it has none that is a finite number."""
    value = to_number(getattr(optimizer, name, None))
    return value if value is not None and math.isfinite(value) else None


def _variables_by_dtype(
    model: keras.Model, optimizer: LossScaleOptimizer
) -> tuple[list[str], list[str]]:
    """Returns the paths of the variables of float32 layers, and of those with a dtype of their own.

    A variable may be shared between layers: it counts as float32 if only float32 layers use it.
    """
    by_path = optimizer.variables_by_path()
    if not by_path:
        variables = model.trainable_variables
        by_path = dict(zip(paths_of(variables), variables, strict=True))
    in_float32, in_others, with_own_dtype = set[int](), set[int](), set[int]()
    for layer in sublayers(model):
        ids = in_float32 if layer.compute_dtype == FLOAT32.name else in_others
        for variable in keras_internals.declared_trainable(layer):
            ids.add(id(variable))
            if variable.dtype != layer.variable_dtype:
                with_own_dtype.add(id(variable))
    only_in_float32 = in_float32 - in_others

    def paths_in(ids: set[int]) -> list[str]:
        return [path for path, variable in by_path.items() if id(variable) in ids]

    return paths_in(only_in_float32), paths_in(with_own_dtype)


def _untrained_variables(model: keras.Model, optimizer: LossScaleOptimizer) -> list[str]:
    """Returns the paths of the trainable variables that no optimizer of the model was built with.

    Without those that the step itself assigns, such as averages of others. None if one of the
    optimizers is not built: it may train any of them.
    """
    optimizers = [optimizer, *all_optimizers_of(model)]
    if not all(each.built for each in optimizers):
        return []
    guard = guarded_step_of(model)
    trained = set(map(id, guard.assigned)) if guard else set[int]()
    for each in optimizers:
        trained.update(map(id, keras_internals.variables_to_train(each)))
    variables = model.trainable_variables
    paths = zip(paths_of(variables), variables, strict=True)
    return [path for path, variable in paths if id(variable) not in trained]


def layer_classes(model: keras.Model) -> dict[str, str]:
    """Returns the class of each layer by path, of a model that is built."""
    return {path: type(layer).__name__ for path, layer in created_layers(model).items()}


def record_of(snapshot: Snapshot, previous: Snapshot, recorded: Collection[str]) -> Record:
    """Returns the record of the steps between two snapshots, at least one.

    It has what is `recorded`: `LOSS_SCALE`, `OVERFLOWS` or both.
    """
    record = Record(step=snapshot.step)
    if LOSS_SCALE in recorded:
        record.loss_scale, record.clean_steps = snapshot.loss_scale, snapshot.clean_steps
    if OVERFLOWS not in recorded:
        return record
    skipped = snapshot.overflow_count - previous.overflow_count
    for count in COUNT_INDEX.keys() & Record.__struct_fields__:
        setattr(record, count, getattr(snapshot, count))
    record.overflow_rate = skipped / (snapshot.step - previous.step)
    if snapshot.last_loss is not None:  # a file has `null` for NaN
        record.last_loss = snapshot.last_loss
        record.highest_loss = snapshot.highest_loss
    if skipped > snapshot.nonfinite_loss_count - previous.nonfinite_loss_count:
        record.overflow_origin = snapshot.overflow_origin
    if snapshot.overflows_by_variable != previous.overflows_by_variable:
        record.overflows_by_variable = snapshot.overflows_by_variable
        record.overflow_origins_by_variable = snapshot.overflow_origins_by_variable
    if snapshot.loss_dtype != previous.loss_dtype:
        record.loss_dtype = snapshot.loss_dtype
    return record


def metrics_record(step: int, epoch: int, values: Mapping[str, Any]) -> Record:
    """Returns the record of an epoch: those of Keras' `logs` that are numbers.

    Without those that a log cannot hold, and those with the name of another key of a record.
    """
    names = values.keys() - set(Record.__struct_fields__)
    numbers = {key: to_number(value) for key, value in values.items() if key in names}
    known = ((key, value) for key, value in numbers.items() if value is not None)
    metrics: dict[str, float | None] = {
        key: value if abs(value) <= HIGHEST_NUMBER else math.nan
        for key, value in islice(known, MOST_METRICS)
    }
    return Record(step=step, epoch=epoch, metrics=metrics)


def record_size(record: Record) -> int:
    """Returns the bytes in a log of what the interval of reads limits.

    These are samples, without names, and counts by variable. A record at the end of each epoch is
    not limited by it. Were it counted, the interval would grow without end.
    """
    samples = [sample for sample in (record.sample, record.reference) if sample is not UNSET]
    parts: list[Any] = [compact(sample) | {"names": ()} for sample in samples]
    counts = (record.overflows_by_variable, record.overflow_origins_by_variable)
    parts += [by_variable for by_variable in counts if by_variable is not UNSET]
    return sum(len(json.dumps(part)) for part in parts)


def to_number(value: Any) -> float | None:
    """Returns a number, or a scalar tensor or variable, as a float; `None` for anything else."""
    scalar = validation.python_scalar(value)
    return float(scalar) if isinstance(scalar, int | float) else None
