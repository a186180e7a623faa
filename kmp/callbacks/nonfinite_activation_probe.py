"""Finds the first NaN or Inf of a forward pass."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from kmp.backend import distribution, sublayers
from kmp.gradients import nonfinite_flag
from kmp.optimizer import LossScaleOptimizer
from kmp.records import BATCH_PARTS, BATCH_X, LOSS_FUNCTION
from kmp.utils import FLOAT16

Named = tuple[str, tf.Tensor]


class NonfiniteActivationProbe:
    """Checks the outputs of a model's layers in each step whose loss is non-finite.

    The step keeps these outputs for its backward pass. There is no second forward pass, so random layers such as
    dropout are checked as they ran. Nothing is computed while losses are finite.

    Args:
        model: The model. The `call` of its layers is wrapped until `remove`.
        optimizers: The optimizers whose `scale_loss` gets the losses.
    """

    def __init__(self, model: keras.Model, optimizers: Sequence[LossScaleOptimizer]) -> None:
        self._model = model
        self._optimizers = list(optimizers)
        self._names: list[str] = []
        # Each layer with its wrapper and its previous `call` attribute, by the layer's id.
        self._wrapped: dict[int, tuple[keras.Layer, Any, Any]] = {}
        self._thread_state = threading.local()  # each replica traces in its own thread
        with model.distribute_strategy.scope():
            self._first_index = distribution.variable("first_nonfinite", "int64")  # in `_names`, from 1; 0 is none

    def prepare(self, batch_spec: Any, is_xla: bool) -> None:
        """Does nothing: the variable does not depend on the batch."""

    @contextlib.contextmanager
    def watch(self, data: Any) -> Iterator[None]:
        """Checks the forward pass that runs inside this context, which is part of the compiled step.

        Args:
            data: The batch, as passed to `train_step`.
        """
        self._wrap_layers()
        monitors = [optimizer.step_monitor for optimizer in self._optimizers]
        before = [monitor.losses() for monitor in monitors]
        outputs: list[Named] = []
        self._thread_state.outputs = outputs
        try:
            yield
        finally:
            self._thread_state.outputs = None
        increases = [monitor.nonfinite_loss_since(then) for monitor, then in zip(monitors, before, strict=True)]
        readable = [(name, tensor) for name, tensor in outputs if _is_readable(tensor)]
        self._find_first(_float_tensors(data), readable, ops.any(ops.stack(increases)))

    def read(self) -> str | None:
        """Returns the name of the first non-finite tensor of the last such step, or `None` before the first one."""
        indices = [int(index) for index in distribution.local_values(self._first_index) if index]
        return self._names[min(indices) - 1] if indices else None

    def remove(self) -> None:
        """Unwraps the layers."""
        for layer, wrapper, previous in self._wrapped.values():
            if vars(layer).get("call") is wrapper:
                del vars(layer)["call"]
                if previous is not None:
                    vars(layer)["call"] = previous
        self._wrapped.clear()

    def _find_first(self, batch: list[Named], outputs: list[Named], is_loss_nonfinite: Any) -> None:
        self._names = [*(name for name, _ in [*batch, *outputs]), LOSS_FUNCTION]

        def assign_first() -> None:
            flags = ops.stack([*(_flag(*named) for named in (*batch, *outputs)), ops.ones([])])
            self._first_index.assign(tf.argmax(flags) + 1)  # int64, because TensorFlow keeps int32 off the GPU

        ops.cond(is_loss_nonfinite, assign_first, lambda: None)

    def _wrap_layers(self) -> None:
        for layer in sublayers(self._model):
            is_new = id(layer) not in self._wrapped and layer is not self._model
            if is_new and not isinstance(layer, keras.layers.InputLayer):
                wrapper = self._recording_call(layer, layer.call)
                self._wrapped[id(layer)] = layer, wrapper, vars(layer).get("call")
                vars(layer)["call"] = wrapper

    def _recording_call(self, layer: keras.Layer, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            outputs = call(*args, **kwargs)
            if getattr(self._thread_state, "outputs", None) is not None:
                name = layer.path or layer.name
                self._thread_state.outputs += [(name, tensor) for _, tensor in _float_tensors(outputs)]
            return outputs

        return wrapper


def _float_tensors(data: Any) -> list[Named]:
    """Returns the float tensors of a batch or of a layer's outputs, each with the name of its part of the batch."""
    parts = data if isinstance(data, tuple) and len(data) <= len(BATCH_PARTS) else (data,)
    named = [(name, leaf) for name, part in zip(BATCH_PARTS, parts, strict=False) for leaf in keras.tree.flatten(part)]
    return [(name, leaf) for name, leaf in named if isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating]


def _flag(name: str, tensor: tf.Tensor) -> tf.Tensor:
    """Returns 1.0 if a tensor has a NaN or Inf, or is an `x` that overflows float16, else 0.0."""
    if name != BATCH_X:  # layer outputs; and targets and weights, which only the float32 loss uses
        return nonfinite_flag(tensor)
    overflows = ops.any(ops.abs(ops.cast(tensor, "float32")) > FLOAT16.max)
    return ops.maximum(nonfinite_flag(tensor), ops.cast(overflows, "float32"))


def _is_readable(tensor: tf.Tensor) -> bool:
    """Whether the step can read a tensor: one from inside a loop, such as the output of an RNN's cell, it cannot."""
    return not tf.is_symbolic_tensor(tensor) or tensor.graph is tf.compat.v1.get_default_graph()
