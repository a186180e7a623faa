"""The replacements of Keras' functions that the inventory in `kmp.backend` lists for this package.

Each passes calls on unchanged where it does not apply: to models without kmp's optimizer that were
not compiled under `enable`, and after `disable`.
"""

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import keras

from kmp.backend import jit_support, keras_internals, marked_policy
from kmp.backend.compiled_parts import in_step
from kmp.backend.keras_internals import compute_dtypes
from kmp.backend.patching import patches
from kmp.enabling import exact_indices, misuse_warnings
from kmp.enabling.active_settings import (
    FLOAT16_POLICIES,
    active,
    current_settings,
    is_float16_enabled,
    rewrite_dtypes,
)
from kmp.enabling.optimizers import follow_model, wrap_for_compile
from kmp.guarding.guarded_step import guard_train_step, guarded_step_of, is_built
from kmp.guarding.model_optimizers import optimizers_of
from kmp.layers.float32_classes import keep_in_float32, selected_classes
from kmp.layers.fused_calls import use_fused_call
from kmp.layers.layer_calls import build_in_own_dtype
from kmp.optimizer import LossScaleOptimizer
from kmp.utils import user_messages
from kmp.utils.context_values import context_value
from kmp.utils.float_formats import DTYPES_16_BIT, FLOAT16

_policy_at_compile: WeakKeyDictionary[keras.Model, str] = WeakKeyDictionary()
# The models that kmp managed when they were compiled, trained or evaluated.
_managed_models: WeakSet[keras.Model] = WeakSet()


def _is_managed(model: keras.Layer) -> bool:
    """Whether kmp is or was enabled when the model was compiled, or it has kmp's optimizer."""
    if active or isinstance(getattr(model, "optimizer", None), LossScaleOptimizer):
        return True
    return isinstance(model, keras.Model) and model in _policy_at_compile


# The names of the arguments of Keras' `compile`, by position. Another library may have wrapped
# `original`, so that they are not read from that.
_COMPILE_ARGUMENTS = (
    "optimizer",
    "loss",
    "loss_weights",
    "metrics",
    "weighted_metrics",
    "run_eagerly",
    "steps_per_execution",
    "jit_compile",
    "auto_scale_loss",
)


_CALLBACKS_INDEX = 5  # among the positional arguments of `fit`


def compile_patch(original: Callable[..., None]) -> Callable[..., None]:
    """Patches `compile` to wrap the optimizer, and to train as the settings of kmp say."""

    @functools.wraps(original)
    def compile(self: keras.Model, *args: Any, **kwargs: Any) -> None:
        arguments = dict(zip(_COMPILE_ARGUMENTS[: len(args)], args, strict=True))
        twice = arguments.keys() & kwargs.keys()
        if twice:
            raise TypeError(f"compile() got multiple values for argument {min(twice)!r}")
        arguments.update(kwargs)
        is_wrapped = isinstance(arguments.get("optimizer"), LossScaleOptimizer)
        if not (active or rewrite_dtypes or is_wrapped):
            original(self, *args, **kwargs)
            return
        # Metrics that are created outside of the scope of the strategy are on one device only.
        with self.distribute_strategy.scope():
            _compile(self, functools.partial(original, self), arguments)

    return compile


def _compile(model: keras.Model, original: Callable[..., None], arguments: dict[str, Any]) -> None:
    """Compiles a model with the `compile` of Keras, as the settings of kmp say."""
    if rewrite_dtypes:
        _check_rewrite(arguments)
        arguments["jit_compile"] = False
    jit_compile = arguments.get("jit_compile", "auto")

    # The optimizer, and who scales the loss: kmp, Keras or nobody.
    is_passed = "optimizer" in arguments
    optimizer = arguments.pop("optimizer", "rmsprop")
    scales = arguments.pop("auto_scale_loss", True)
    wraps = scales and bool(active or FLOAT16.name in rewrite_dtypes)
    if wraps or isinstance(optimizer, LossScaleOptimizer):
        held = _wrapper_in(model, optimizer, is_compiled=False) or optimizer
        optimizer, scales = wrap_for_compile(held, _computes_in_float16(model)), False
    if isinstance(optimizer, LossScaleOptimizer):
        optimizer.is_passed = is_passed
        arguments["jit_compile"] = jit_support.passed_to_keras(model, jit_compile)

    # Keras gets the optimizer that it is to save with the model.
    saved = _saved_optimizer(optimizer)
    with context_value(_wraps_assigned, False):
        original(optimizer=saved, auto_scale_loss=scales and not active, **arguments)
        if saved is not optimizer:
            model.optimizer = optimizer
    jit_support.note_requested(model, jit_compile)
    if active or rewrite_dtypes:
        _note_compiled(model)


# Whether the optimizers that code assigns to attributes of models are wrapped.
_wraps_assigned: ContextVar[bool] = ContextVar("_wraps_assigned", default=True)


def model_attribute_patch(original: Callable[..., None] | None) -> Callable[..., None]:
    """Patches the attributes of models to wrap optimizers, as those of a GAN, as `compile` does."""

    def __setattr__(self: keras.Model, name: str, value: Any) -> None:  # noqa: N807
        if active and _wraps_assigned.get():
            value = _with_wrapped_optimizers(self, value)
        if original is not None:
            original(self, name, value)
        else:
            super(keras.Model, self).__setattr__(name, value)

    return __setattr__


def _with_wrapped_optimizers(model: keras.Model, value: Any) -> Any:
    """Returns an optimizer, or a structure with some, as `compile` would get it."""

    def wrapped(each: Any) -> Any:
        if not isinstance(each, keras.optimizers.Optimizer):
            return each
        return _wrapper_in(model, each) or wrap_for_compile(each, _computes_in_float16(model))

    if not isinstance(value, list | tuple | dict):
        return wrapped(value)
    # A structure without an optimizer stays the object that the user holds.
    has_any = any(
        isinstance(each, keras.optimizers.Optimizer) for each in keras.tree.flatten(value)
    )
    return keras.tree.map_structure(wrapped, value) if has_any else value


def _wrapper_in(
    model: keras.Model, optimizer: Any, is_compiled: bool = True
) -> LossScaleOptimizer | None:
    """Returns the wrapper that a model has for an optimizer, which is passed to it again.

    `compile` makes another one for the optimizer that the model was compiled with before.
    """
    for name, each in optimizers_of(model).items():
        if each.inner_optimizer is optimizer and (is_compiled or name != "optimizer"):
            return each
    return None


def _saved_optimizer(optimizer: Any) -> Any:
    """Returns the optimizer that Keras saves with a model: what its `compile` gets.

    Where kmp has chosen that nothing is scaled, this is the plain one: such a file loads without
    kmp, and under `enable` the optimizer is wrapped again.
    """
    if not isinstance(optimizer, LossScaleOptimizer):
        return optimizer
    is_plain = optimizer.follows_model and not optimizer.rule.scales_loss
    return optimizer.inner_optimizer if is_plain else optimizer


def checkpoint_patch(original: Callable[..., None]) -> Callable[..., None]:
    """Patches `tf.train.Checkpoint` to take the optimizer that the user's `compile` got.

    TensorFlow refuses it beside a root that has its wrapper under the same name.
    """

    @functools.wraps(original)
    def init(self: Any, root: Any = None, **kwargs: Any) -> None:
        # TensorFlow takes a weak reference to a root too.
        owner = root() if isinstance(root, weakref.ref) else root
        for name, given in kwargs.items():
            own = getattr(owner, name, None)
            if isinstance(own, LossScaleOptimizer) and own.inner_optimizer is given:
                kwargs[name] = own
        original(self, root, **kwargs)

    return init


def save_h5_patch(original: Callable[..., None]) -> Callable[..., None]:
    """Patches the writer of old `.h5` files, which takes the optimizer from the model itself."""

    @functools.wraps(original)
    def save_model_to_hdf5(model: keras.Model, *args: Any, **kwargs: Any) -> None:
        optimizer = getattr(model, "optimizer", None)
        saved = _saved_optimizer(optimizer)
        if saved is optimizer:
            original(model, *args, **kwargs)
            return
        with keras_internals.instance_attribute(model, "optimizer", saved):
            original(model, *args, **kwargs)

    return save_model_to_hdf5


def _check_rewrite(arguments: dict[str, Any]) -> None:
    """Raises an error or warns if there is no graph to rewrite."""
    if arguments.get("jit_compile") is True:
        raise ValueError(
            "kmp.graph_rewrite cannot work under XLA, which compiles the graph before it is"
            " rewritten. Leave out `jit_compile=True`, or call kmp.graph_rewrite(False) and"
            " use kmp.convert(model)."
        )
    if arguments.get("run_eagerly"):
        user_messages.warn(
            "With `run_eagerly=True` there is no graph to rewrite: the model trains in float32."
        )


def _computes_in_float16(model: keras.Model) -> bool:
    """Whether a layer of the model computes in float16, or its graph will."""
    if FLOAT16.name in rewrite_dtypes:
        return True
    # Keras checks only the model's own policy, not those of its layers.
    return FLOAT16.name in (compute_dtypes(model) or {model.compute_dtype})


def _note_compiled(model: keras.Model) -> None:
    """Does what follows `compile` under `enable`."""
    _managed_models.add(model)
    if isinstance(model.optimizer, LossScaleOptimizer):
        guard_train_step(model)
    settings = current_settings()
    _policy_at_compile.pop(model, None)
    if settings:
        _policy_at_compile[model] = settings.policy
        patches.use(model)
    if is_float16_enabled():
        misuse_warnings.warn_after_compile(model)


def make_train_function_patch(original: Callable[..., None]) -> Callable[..., None]:
    """Patches `make_train_function` to guard the training step of models with kmp's optimizer."""

    @functools.wraps(original)
    def make_train_function(self: keras.Model, force: bool = False) -> None:
        if not _is_managed(self):
            original(self, force)
            return
        _managed_models.add(self)
        is_new = False
        # `train_on_batch` calls this in each step: optimizers are searched only in a model that has
        # no guard.
        if guarded_step_of(self) is None and optimizers_of(self):
            is_new = guard_train_step(self)
            exact_indices.keep_all_exact(self)  # the model may have been loaded without `enable`
        if self.train_function is None or force or is_new:
            computes_in_float16 = _computes_in_float16(self)
            for optimizer in optimizers_of(self).values():
                # An optimizer may have been assigned before the model had its layers.
                if optimizer.rule.scales_loss != computes_in_float16:
                    follow_model(optimizer, computes_in_float16)
        previous = self.train_function
        guard = guarded_step_of(self)
        around = guard.keeping if guard else contextlib.nullcontext
        with keras_internals.around_steps(self, around):
            original(self, force or is_new)
        if self.train_function is not previous:
            self.train_function = _prepared(self, self.train_function)

    return make_train_function


def make_test_function_patch(original: Callable[..., None]) -> Callable[..., None]:
    """Patches `make_test_function` to trace the step with the parts that XLA compiles.

    It also makes models known that were loaded without `enable`.
    """

    @functools.wraps(original)
    def make_test_function(self: keras.Model, force: bool = False) -> Any:
        if _is_managed(self):
            _managed_models.add(self)
            _mark_step(self, "test_step")
        return original(self, force)

    return make_test_function


def make_predict_function_patch(original: Callable[..., None]) -> Callable[..., None]:
    """Patches `make_predict_function` to trace the step with the parts that XLA compiles."""

    @functools.wraps(original)
    def make_predict_function(self: keras.Model, force: bool = False) -> Any:
        if _is_managed(self):
            _mark_step(self, "predict_step")
        return original(self, force)

    return make_predict_function


def _mark_step(model: keras.Model, name: str) -> None:
    """Makes a model's `test_step` or `predict_step` one whose parts are compiled.

    The method is set on the model itself, because each replica calls it in a thread of its own. No
    export calls it.
    """
    own_step = vars(model).get(name)
    if hasattr(own_step, "is_marked"):
        return

    def step(data: Any) -> Any:
        run = own_step or functools.partial(getattr(type(model), name), model)
        optimizers = optimizers_of(model).values()
        compiles = not optimizers or any(each.jit_compile for each in optimizers)
        with in_step(compiles and _is_managed(model)):
            return run(data)

    step.is_marked = True  # type: ignore[attr-defined]
    vars(model)[name] = step  # not tracked by Keras' `__setattr__`


def _prepared(model: keras.Model, train_function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns the train function with what has to happen before its first call.

    The warnings come as soon as the model is built, if that is later.
    """
    is_first = True
    is_unchecked = is_float16_enabled() and _policy_at_compile.get(model) in (
        None,
        *FLOAT16_POLICIES,
    )
    if is_unchecked and is_built(model):
        misuse_warnings.warn_before_training(model)
        is_unchecked = False

    def run(iterator: Any) -> Any:
        nonlocal is_first, is_unchecked
        guard = guarded_step_of(model)
        if guard:
            guard.begin_execution(iterator, is_first)
        is_first = False
        logs = train_function(iterator)
        if is_unchecked:  # the first call has built the model
            is_unchecked = False
            misuse_warnings.warn_before_training(model)
        return logs

    return run


def losses_patch(original: property) -> property:
    """Patches `losses` to cast those that layers add in 16 bits.

    `fit` fails if it adds them to a float32 loss, and so does a loop.
    """
    read: Any = original.fget

    @functools.wraps(read)
    def losses(self: keras.Layer) -> list[Any]:
        found = read(self)
        return keras_internals.in_float32(found) if _is_managed(self) else found

    return property(losses, doc=original.__doc__)


def metric_attribute_patch(original: Callable[..., Any] | None) -> Callable[..., Any]:
    """Patches the attributes of metrics to update and compute them in float32.

    In float16 a squared error overflows, and top-k metrics have no kernel. Each class of metrics
    has its own methods, which `compute_metrics`, a `train_step`, a layer or a loop may call.
    """
    read: Any = original or object.__getattribute__

    def __getattribute__(self: keras.Metric, name: str) -> Any:  # noqa: N807
        value = read(self, name)
        if name not in ("update_state", "result") or not _is_managed_metric(self):
            return value
        return _computing_in_float32(value)

    return __getattribute__


def _is_managed_metric(metric: keras.Metric) -> bool:
    """Whether kmp is enabled, or a model that kmp manages has the metric.

    A metric with a 16-bit dtype computes in it.
    """
    # A metric has no dtype before its `__init__`.
    if getattr(metric, "dtype", None) in DTYPES_16_BIT:
        return False
    if active:
        return True
    for model in filter(_is_managed, list(_managed_models)):
        # A property of the user may fail before the user's own `compile` has ended.
        if any(metric is each for each in getattr(model, "metrics", ())):
            return True
    return False


def _computing_in_float32(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method of a metric with 16-bit arguments cast to float32.

    In the `call` of a layer, Keras would also cast the sums of the metric to 16 bits.
    """

    @functools.wraps(method)
    def compute(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = keras_internals.in_float32((args, kwargs))
        with keras_internals.variables_uncast():
            return method(*args, **kwargs)

    return compute


def fit_patch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patches `fit` to call callbacks that add keys to `logs` before those that may use them."""

    @functools.wraps(original)
    def fit(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        arguments = list(args)
        if len(arguments) > _CALLBACKS_INDEX:
            arguments[_CALLBACKS_INDEX] = _adding_first(arguments[_CALLBACKS_INDEX])
        elif "callbacks" in kwargs:
            kwargs["callbacks"] = _adding_first(kwargs["callbacks"])
        return original(self, *arguments, **kwargs)

    return fit


def _adding_first(callbacks: Any) -> Any:
    if not isinstance(callbacks, list | tuple):
        return callbacks
    return sorted(callbacks, key=lambda each: not getattr(each, "adds_to_logs", False))


def layer_init_patch(original: Callable[..., None]) -> Callable[..., None]:
    """Patches `__init__` of layers, for those that need another policy or `call` in 16 bits.

    Layers that are loaded with a policy of kmp get back what they had when they were saved.
    """

    @functools.wraps(original)
    def init(self: keras.Layer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if active:
            build_in_own_dtype(self)
        is_of_kmp = marked_policy.is_marked(self)
        is_converted = selected_classes() is not None
        if active or is_of_kmp:
            use_fused_call(self)
        if active or is_of_kmp or is_converted:
            exact_indices.keep_exact(self)
        if active or is_converted:
            keep_in_float32(self)
        if is_of_kmp or (active and _is_of_16_bits(self)):
            marked_policy.mark(self)

    # Keras reads it to store the arguments of a layer.
    vars(init)["__signature__"] = inspect.signature(original)
    return init


def _is_of_16_bits(layer: keras.Layer) -> bool:
    """Whether a layer is one of a program in 16 bits.

    A look-up in float32 is one too, because a layer around it may round its indices.
    """
    policies = layer.dtype_policy, keras.config.dtype_policy()
    return any(policy.compute_dtype in DTYPES_16_BIT for policy in policies)


def policy_read_patch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patches the state of Keras to have the policy of `enable` in all threads.

    Keras 3.15 stores its global policy by thread, and `keras.backend.clear_session` deletes it:
    layers are float32 again. No public name reaches that state.
    """

    @functools.wraps(original)
    def get_global_attribute(name: str, *args: Any, **kwargs: Any) -> Any:
        settings = current_settings() if name == "dtype_policy" else None
        if settings is None:
            return original(name, *args, **kwargs)
        return original(settings.state_name) or settings.dtype_policy

    return get_global_attribute


def policy_write_patch(original: Callable[..., None]) -> Callable[..., None]:
    """Patches the state of Keras to keep a policy that a thread sets under `enable`."""

    @functools.wraps(original)
    def set_global_attribute(name: str, value: Any) -> None:
        settings = current_settings() if name == "dtype_policy" else None
        original(name if settings is None else settings.state_name, value)

    return set_global_attribute
