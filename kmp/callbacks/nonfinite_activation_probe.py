"""Where a forward pass went wrong: what was the first to be inf or nan in it."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from kmp.backend import distribution, sublayers
from kmp.gradients import tensor_statistics
from kmp.optimizer import LossScaleOptimizer
from kmp.records import BATCH_PARTS, BATCH_X, LOSS_FUNCTION
from kmp.utils import FLOAT16

Named = tuple[str, tf.Tensor]


class NonfiniteActivationProbe:
    """Looks at the outputs of a model's layers in each step whose loss is not finite.

    They are those of the step itself, kept for its backward pass anyway, so there is no second forward pass and dropout
    is as it was; while losses are finite, nothing is computed.

    Args:
        model: The model; its layers' `call` is wrapped until `remove`.
        optimizers: Those whose `scale_loss` sees the losses.
    """

    def __init__(self, model: keras.Model, optimizers: Sequence[LossScaleOptimizer]) -> None:
        self._model = model
        self._optimizers = list(optimizers)
        self._names: list[str] = []
        self._wrapped: dict[int, tuple[keras.Layer, Any, Any]] = {}  # a layer, our `call`, and the one it had before
        self._of_thread = threading.local()  # each replica traces in a thread of its own
        with model.distribute_strategy.scope():
            self._first = distribution.variable("first_nonfinite", "int64")  # its place among the names, from 1

    @contextlib.contextmanager
    def watching(self, data: Any) -> Iterator[None]:
        """Looks at the forward pass inside; part of the compiled step.

        Args:
            data: The batch, as `train_step` gets it.
        """
        self._wrap_layers()
        calls = [optimizer.loss_monitor.nonfinite_calls for optimizer in self._optimizers]
        before = [ops.copy(count) for count in calls]
        outputs: list[Named] = []
        self._of_thread.outputs = outputs
        try:
            yield
        finally:
            self._of_thread.outputs = None
        was_nonfinite = ops.any(ops.stack([now.value > then for now, then in zip(calls, before, strict=True)]))
        self._look_at(_floats(data), [named for named in outputs if _is_here(named[1])], was_nonfinite)

    def read(self) -> str | None:
        """Returns what was the first to be inf or nan in the last such step, or `None` before one."""
        places = [int(place) for place in distribution.local_values(self._first) if place]
        return self._names[min(places) - 1] if places else None

    def remove(self) -> None:
        """Unwraps the layers."""
        for layer, ours, before in self._wrapped.values():
            if vars(layer).get("call") is ours:
                del vars(layer)["call"]
                if before is not None:
                    vars(layer)["call"] = before
        self._wrapped.clear()

    def _look_at(self, batch: list[Named], outputs: list[Named], where: Any) -> None:
        self._names = [*(name for name, _ in [*batch, *outputs]), LOSS_FUNCTION]

        def look() -> None:
            flags = ops.stack([*(_flag(*named) for named in (*batch, *outputs)), ops.ones([])])
            self._first.assign(tf.argmax(flags) + 1)  # int64, which stays on a GPU

        ops.cond(where, look, lambda: None)

    def _wrap_layers(self) -> None:
        for layer in sublayers(self._model):
            is_new = id(layer) not in self._wrapped and layer is not self._model
            if is_new and not isinstance(layer, keras.layers.InputLayer):
                ours = self._noting(layer, layer.call)
                self._wrapped[id(layer)] = layer, ours, vars(layer).get("call")
                vars(layer)["call"] = ours

    def _noting(self, layer: keras.Layer, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def noted(*args: Any, **kwargs: Any) -> Any:
            outputs = call(*args, **kwargs)
            if getattr(self._of_thread, "outputs", None) is not None:
                self._of_thread.outputs += [(layer.path or layer.name, tensor) for _, tensor in _floats(outputs)]
            return outputs

        return noted


def _floats(data: Any) -> list[Named]:
    """Returns the float tensors in a batch, or in a layer's outputs, with the name of their part."""
    parts = data if isinstance(data, tuple) and len(data) <= len(BATCH_PARTS) else (data,)
    named = [(name, leaf) for name, part in zip(BATCH_PARTS, parts, strict=False) for leaf in keras.tree.flatten(part)]
    return [(name, leaf) for name, leaf in named if isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating]


def _flag(name: str, tensor: tf.Tensor) -> tf.Tensor:
    """Returns 1.0 if a tensor is to blame, else 0.0."""
    if name != BATCH_X:  # the rest of a batch goes to the loss, which is computed in float32
        return tensor_statistics.nonfinite(tensor)
    beyond = ops.any(ops.abs(ops.cast(tensor, "float32")) > FLOAT16.max)
    return ops.maximum(tensor_statistics.nonfinite(tensor), ops.cast(beyond, "float32"))


def _is_here(tensor: tf.Tensor) -> bool:
    """Whether a tensor can be read in the step: what a layer made inside a loop, as an RNN's cell does, cannot."""
    return not tf.is_symbolic_tensor(tensor) or tensor.graph is tf.compat.v1.get_default_graph()
