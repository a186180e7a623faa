"""The same model in each precision, and the batch that it is trained on."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kmp.backend import keras_internals
from kmp.backend.keras_internals import compute_dtypes, defining_class, is_keras_class
from kmp.conversion import Plan, convert, to_float32
from kmp.conversion.model_parts import check_built, is_quantized, parts_of
from kmp.utils.float_formats import FLOAT32, computing_format

Batch = tuple[Any, ...]
ModelFunction = Callable[[], tuple[keras.Model, Any]]

POLICIES = (FLOAT32.name, "mixed_float16", "mixed_bfloat16")
_BATCH_SIZE = 32


@dataclass(frozen=True)
class Source:
    """Where the model comes from, in any precision.

    Args:
        build: Returns a new compiled model in a policy, and the batch. Call it while that is
            enabled.
        notes: Sentences on what was assumed.
    """

    build: Callable[[str], tuple[keras.Model, Any]]
    notes: tuple[str, ...] = ()


def source_of(
    model: keras.Model | ModelFunction, batch: Any = None, batch_size: int | None = None
) -> Source:
    """Returns a source for a compiled model, which is copied, or for a function.

    Raises:
        TypeError: If `model` is neither.
        ValueError: If it cannot be trained in all precisions, or there is no batch for it.
    """
    if isinstance(model, keras.Model):
        return _source_of_model(model, batch, batch_size)
    if not callable(model):
        raise TypeError(f"`model` must be a keras.Model or a function. Received: model={model!r}")
    if batch is not None or batch_size is not None:
        raise ValueError("A function returns the batch, too: omit `batch` and `batch_size`.")
    try:
        inspect.signature(model).bind()
    except TypeError as error:
        raise TypeError(f"The function must take no arguments: {error}") from error
    return Source(lambda policy: _checked_result(model(), policy))


def _checked_result(result: Any, policy: str) -> tuple[keras.Model, Any]:
    """Returns the model and the batch that a function returned under a policy."""
    is_pair = isinstance(result, tuple) and len(result) == 2
    if not is_pair or not isinstance(result[0], keras.Model):
        returned = type(result).__name__
        if isinstance(result, tuple):
            returned = f"({', '.join(type(each).__name__ for each in result)})"
        raise ValueError(
            f"The function returned {returned}. It must return (model, batch): a compiled"
            " keras.Model, and x, (x, y), (x, y, sample_weight) or a tf.data.Dataset."
        )
    model, batch = result
    _check_compiled(model, "Compile it in the function.")
    dtypes = compute_dtypes(model)
    if computing_format(dtypes).name != keras.DTypePolicy(policy).compute_dtype:
        raise ValueError(
            f"The function is called under kmp.enable({policy!r}), but its model computes in"
            f" {' and '.join(sorted(dtypes))}: it must create its layers, without a dtype of their"
            " own and without a call of kmp.enable."
        )
    return model, batch


def _check_compiled(model: keras.Model, remedy: str) -> None:
    if not model.compiled:
        raise ValueError(f"The model {model.name!r} is not compiled. {remedy}")


def _source_of_model(model: keras.Model, batch: Any, batch_size: int | None) -> Source:
    check_built(model)
    _check_compiled(model, "Compile it first, so that it is known what a training step is.")
    if is_quantized(model):
        raise ValueError(f"{model.name!r} is quantized and has no other precisions.")
    if not is_keras_class(defining_class(type(model), "compile")):
        raise ValueError(
            f"{type(model).__name__} overrides `compile`, so a copy cannot be compiled. Pass a"
            " function that returns the compiled model and a batch."
        )
    if batch is not None and batch_size is not None:
        raise ValueError("`batch_size` is for a batch that is made: omit it, or `batch`.")
    notes: tuple[str, ...] = ()
    if batch is None:
        batch, note = made_batch(model, batch_size)
        notes = (note,)
    return Source(lambda policy: (_copy_in(model, policy), batch), notes)


def _copy_in(model: keras.Model, policy: str) -> keras.Model:
    """Returns a copy of a model in another precision, compiled as it is.

    Float32 layers of a model that computes in 16 bits are float32 in the other 16-bit format, too.
    """
    copy = to_float32(model)
    if policy != FLOAT32.name:
        plan: Plan | str = policy
        if computing_format(compute_dtypes(model)) is not FLOAT32:
            layers = [part for part in parts_of(model) if part.is_planned and part.is_layer]
            in_float32 = {
                part.path: "float32 in this model"
                for part in layers
                if getattr(part.operation, "compute_dtype", "") == FLOAT32.name
            }
            plan = Plan(policy, in_float32)
        copy = convert(copy, plan)
        if compute_dtypes(copy) == {FLOAT32.name}:
            raise ValueError(
                f"No layer of {model.name!r} would compute in 16 bits: see kmp.audit(model)."
            )
    with copy.distribute_strategy.scope():  # again, now under `enable`
        copy.compile(**keras_internals.compile_arguments(copy))
    return copy


def made_batch(model: keras.Model, batch_size: int | None = None) -> tuple[Batch, str]:
    """Returns a batch of random numbers for a model, and a sentence about it.

    Its shapes are those of the model's inputs and of the targets of its loss.

    Raises:
        ValueError: If a shape is not known, or an input has strings.
    """
    inputs = keras_internals.graph_tensors(model, "inputs")
    outputs = keras_internals.graph_tensors(model, "outputs")
    unknown = [tensor.name for tensor in inputs if None in tensor.shape[1:]]
    unknown += [tensor.name for tensor in inputs if tensor.dtype == "string"]
    unknown += [tensor.name for tensor in outputs if None in tensor.shape[1:]]
    if not inputs or unknown:
        which = ", ".join(unknown) or "its inputs"
        raise ValueError(
            f"No batch can be made for {model.name!r}: the shape or the values of {which} are not"
            " known. Pass a batch, or a function that returns the model and a batch."
        )
    size = inputs[0].shape[0] or batch_size or _BATCH_SIZE
    random = np.random.default_rng(0)

    def numbers(tensor: keras.KerasTensor) -> np.ndarray:
        shape = (size, *tensor.shape[1:])
        if keras.backend.is_float_dtype(tensor.dtype):
            return random.uniform(size=shape).astype(FLOAT32.name)
        return np.zeros(shape, tensor.dtype)  # the only index that each table has

    structure = model.inputs[0] if isinstance(model, keras.Sequential) else model.input
    x = keras.tree.map_structure(numbers, structure)
    y = _made_targets(model, outputs, numbers)
    note = (
        f"The batch was made: {size} examples of random numbers, or zeros for integers, with the"
        " shapes of the model's inputs and the targets of its loss."
    )
    return ((x,) if y is None else (x, y)), note


def _made_targets(
    model: keras.Model,
    outputs: list[keras.KerasTensor],
    numbers: Callable[[keras.KerasTensor], np.ndarray],
) -> Any:
    """Returns targets by the losses of a model's outputs; `None` if it has no loss."""
    loss = keras_internals.compile_arguments(model).get("loss")
    if loss is None:
        return None
    names = list(getattr(model, "output_names", ["output"]))  # a Sequential model has none
    if isinstance(loss, dict):
        losses = [loss.get(name) for name in names]
    elif isinstance(loss, list | tuple):
        losses = list(loss)
    else:
        losses = [loss] * len(outputs)
    targets = {}
    for name, output, each in zip(names, outputs, losses, strict=True):
        label = each if isinstance(each, str) else getattr(each, "name", None) or str(each)
        target = numbers(output)
        is_index = "sparse" in label.lower()
        targets[name] = np.zeros(target.shape[:-1], "int32") if is_index else target
    if isinstance(loss, dict):
        return targets
    return tuple(targets.values()) if len(outputs) > 1 else next(iter(targets.values()), None)


def as_dataset(batch: Any) -> tf.data.Dataset:
    """Returns a data set that repeats one batch, or the first one of a data set.

    Raises:
        ValueError: If it is no batch.
    """
    if isinstance(batch, tf.data.Dataset):
        return batch.take(1).cache().repeat()
    parts = batch if isinstance(batch, tuple) else (batch,)
    if not 1 <= len(parts) <= 3:
        raise ValueError(
            "`batch` must be x, (x, y) or (x, y, sample_weight), as `train_on_batch` takes it."
            f" Received a tuple of {len(parts)}."
        )
    while len(parts) > 1 and parts[-1] is None:  # such as `(x, y, None)`
        parts = parts[:-1]
    tensors = keras.tree.map_structure(_tensor, _with_tuples(parts))
    shapes = [tuple(each.shape) for each in keras.tree.flatten(tensors)]
    if () in shapes or len({shape[0] for shape in shapes}) != 1:
        listed = ", ".join(map(str, shapes))
        raise ValueError(f"The arrays of `batch` must have one batch size. Their shapes: {listed}")
    return tf.data.Dataset.from_tensors(tensors).cache().repeat()


def _with_tuples(value: Any) -> Any:
    """Returns a structure with its lists as tuples, as `fit` does: a data set stacks lists."""
    if isinstance(value, dict):
        return {name: _with_tuples(each) for name, each in value.items()}
    if isinstance(value, list) and any(isinstance(each, int | float) for each in value):
        return value  # numbers
    return tuple(map(_with_tuples, value)) if isinstance(value, list | tuple) else value


def _tensor(value: Any) -> tf.Tensor:
    """Returns an array as a tensor; float64 as float32, as `fit` passes it."""
    try:
        tensor = tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"`batch` must have arrays or tensors. Received: {type(value).__name__}"
        ) from error
    return tf.cast(tensor, keras.config.floatx()) if tensor.dtype == tf.float64 else tensor
