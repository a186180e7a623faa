"""Marks the layers of a model in an eager pass: where its operations belong, and the gradients of activations."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kmp.backend import instance_attribute, keras_internals, layers_by_path
from kmp.records import LOSS_FUNCTION


class LayerMarks:
    """Follows an eager forward and backward pass through the layers of a model.

    Each layer's outputs pass through an identity whose gradient function notes that the backward pass has reached the
    layer.

    Attributes:
        layer: The path of the layer whose operations run now, or `LOSS_FUNCTION` after the forward pass of the model.
        called: The paths of the layers that returned, in this order, each once.
        nonfinite: The paths of the layers with NaN or Inf in an output, in the order of `called`.
        activation_gradients: The largest magnitude of the gradient of each layer's outputs; inf or NaN if one is not
            finite. In the order of the backward pass.
    """

    def __init__(self) -> None:
        self.layer = LOSS_FUNCTION
        self.called: dict[str, None] = {}
        self.nonfinite: dict[str, None] = {}
        self.activation_gradients: dict[str, float] = {}

    @contextlib.contextmanager
    def on(self, model: keras.Model) -> Iterator[None]:
        """Marks the layers of a model while the context is open."""
        with contextlib.ExitStack() as stack:
            for path, layer in {model.name: model, **layers_by_path(model)}.items():
                stack.enter_context(instance_attribute(layer, "call", self._marking(path, layer.call)))
            yield

    def _marking(self, path: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def marked_call(*args: Any, **kwargs: Any) -> Any:
            outer, self.layer = self.layer, path
            try:
                outputs = call(*args, **kwargs)
                return keras.tree.map_structure(lambda output: self._marked(output, path), outputs)
            finally:
                self.layer = outer
                self.called[path] = None

        return marked_call

    def _marked(self, output: Any, path: str) -> Any:
        is_eager = isinstance(output, tf.Tensor) and not tf.is_symbolic_tensor(output)
        if not is_eager or not output.dtype.is_floating:
            return output  # a layer may have a `tf.function` of its own

        @tf.custom_gradient
        def identity(tensor: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
            return tf.identity(tensor), functools.partial(self._reached, path)

        if not np.isfinite(output.numpy()).all():
            self.nonfinite[path] = None
        marked = identity(output)
        for name, value in keras_internals.attached_to(output).items():
            setattr(marked, name, self._marked(value, path))
        return marked

    def _reached(self, path: str, gradient: tf.Tensor) -> tf.Tensor:
        self.layer = path
        magnitudes = np.abs(gradient.numpy().astype(np.float32))
        self.activation_gradients[path] = float(np.max(magnitudes, initial=self.activation_gradients.get(path, 0.0)))
        return gradient
