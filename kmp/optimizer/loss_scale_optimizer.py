"""The optimizer that scales the loss. `kmp.optimizer.step` has the steps that `apply` takes."""

import functools
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from kmp import scaling
from kmp.backend import checkpoint_binding, distribution, keras_internals, xla
from kmp.backend.patching import patches
from kmp.backend.step_graph import AppliedGradients, recorded_graph
from kmp.gradients.gradient_sampler import GradientSampler, paths_of
from kmp.gradients.tensor_groups import Gradients, Variables
from kmp.gradients.unscaling import (
    before_cast,
    is_overwritten,
    multiply_gradients,
    with_padded_rows,
)
from kmp.optimizer.counters import COUNT_INDEX, Counters
from kmp.optimizer.deferred_updates import deferring
from kmp.optimizer.gradient_checks import checked_variables
from kmp.optimizer.inner_optimizer import resolve_optimizer
from kmp.optimizer.named_state import InnerState
from kmp.optimizer.network_order import network_order
from kmp.optimizer.predicated_writes import supports_predicated_writes
from kmp.optimizer.replicated_step import can_compile_on_replicas, take_step_on_replicas
from kmp.optimizer.step import StepArguments, StepState, bounded_scale, take_step
from kmp.optimizer.step_monitor import StepMonitor
from kmp.records import Snapshot
from kmp.scaling.rules import LARGEST_APPLIED_SCALE, LARGEST_SCALE
from kmp.scaling.settings import LossScaleSettings, is_dynamic, loss_scale_rule
from kmp.utils import user_messages, validation

_DEFAULT = scaling.DynamicScale()
_SET_AT_CREATION = (
    *LossScaleSettings.__annotations__,
    *("dynamic_growth_steps", "loss_scale_factor", "rule", "jit_compile"),
)
_JIT_COMPILE_IGNORED = (
    "`jit_compile=True` does nothing here: under a distribution strategy, only the updates of"
    " Keras' own optimizers can be compiled, and only where each replica has its own variables."
)


@keras.saving.register_keras_serializable("kmp")
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """An optimizer that scales the loss, skips steps that overflow, and counts them.

    float16 flushes gradients of 2^-25 and less to zero. Multiplying the loss by a large number, the
    loss scale, scales all gradients up; they are divided by it before the update. A step whose loss
    or gradients are not finite is skipped: all weights and all variables of the inner optimizer
    stay unchanged.

    Use it in `model.compile`, or in a custom training loop: call `scale_loss`, then `apply`. To
    clip or change gradients yourself, call `unscale` in between. Settings of the inner optimizer,
    such as `clipnorm`, are read and set on the wrapper too. Sources: see
    `kmp.scaling.DynamicScale`.

    Args:
        inner_optimizer: A `keras.optimizers.Optimizer`, or the name of one. Set clipping, weight
            decay, EMA and gradient accumulation on it; they apply to unscaled gradients. Its
            `loss_scale_factor` becomes the fixed `loss_scale`.
        initial_scale: Float, the loss scale of the first step, from `min_scale` to `max_scale`.
            Defaults to 2^15.
        growth_interval: Integer, at least 1, the number of steps without an overflow after which
            the scale grows. Defaults to 2000. Keras' name for it, `dynamic_growth_steps`, is
            accepted too.
        name: Optional string, the name of the optimizer.
        growth_factor: Float above 1, multiplies the scale when it grows. Defaults to 2.
        backoff_factor: Float between 0 and 1, multiplies the scale when it backs off. Defaults to
            0.5.
        hysteresis: Integer, at least 1, the number of consecutive skipped steps after which the
            scale backs off. Defaults to 1.
        min_scale: Float, at least 2^-126, the lowest scale. Defaults to 2^-14: below that, a scaled
            loss of 1 is subnormal in float16.
        max_scale: Float, at most 2^127, the highest scale. Defaults to 2^127, the largest power of
            two in float32. A scale above 2^126 is applied as 2^126, because the reciprocal of a
            larger one is subnormal.
        loss_scale: `"dynamic"` (default), or a float from 2^-126 to 2^127 for a fixed scale.
        jit_compile: Whether to compile `apply` with XLA if the surrounding step is not compiled: in
            a model compiled with `jit_compile=False`, or in an eager loop. `"auto"` (default) does
            so in graphs where TensorFlow sees a GPU, if the inner optimizer is one of Keras' own;
            the step then waits for no decision of the host. As in a `tf.function`, values that are
            not tensors are read once, for example a callable learning rate, or attributes of the
            inner optimizer that are set later. Under a strategy that mirrors variables, each
            replica's check and update are compiled. With `False`, XLA compiles no part of the step,
            also not the normalizations, activations and softmaxes of layers in 16 bits.
        **kwargs: Arguments that `keras.optimizers.LossScaleOptimizer` accepts for compatibility
            with old files.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If an argument is outside its range; the message names the argument, the value
            and the range.

    Example:
    >>> import keras, kmp
    >>> optimizer = kmp.LossScaleOptimizer("sgd", initial_scale=1024.0, growth_interval=500)
    >>> weight = keras.Variable([1.0, 2.0])
    >>> _ = optimizer.scale_loss(0.5)
    >>> optimizer.apply([keras.ops.array([float("inf"), 0.0])], [weight])
    >>> optimizer.snapshot().loss_scale, optimizer.snapshot().overflow_count
    (512.0, 1)
    """

    # These are attributes of the wrapper, also if the inner optimizer has one of this name. Keras'
    # class has the first five.
    inner_optimizer: keras.optimizers.Optimizer
    initial_scale: float
    dynamic_growth_steps: int
    step_counter: keras.Variable
    dynamic_scale: keras.Variable
    rule: scaling.Rule
    jit_compile: bool | str
    counters: Counters
    inner_state: InnerState
    step_monitor: StepMonitor
    sampler: GradientSampler
    # The call that the settings come from, which advice names.
    settings_call: str = "kmp.LossScaleOptimizer"
    # Whether `compile` chooses the rule by the dtypes of the model.
    follows_model: bool = False
    # Whether a program chose it: `compile` creates one if it is called without an optimizer.
    is_passed: bool = True

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer | str,
        initial_scale: float = 2.0**15,
        growth_interval: int = 2000,
        name: str | None = None,
        *,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        hysteresis: int = 1,
        min_scale: float = 2.0**-14,
        max_scale: float = 2.0**127,
        loss_scale: float | str = "dynamic",
        jit_compile: bool | str = "auto",
        **kwargs: Any,
    ) -> None:
        inner = resolve_optimizer("inner_optimizer", inner_optimizer)
        rule = loss_scale_rule(
            _loss_scale_of(inner, loss_scale),
            initial_scale=initial_scale,
            # In the config of Keras' class it has another name.
            growth_interval=kwargs.pop("dynamic_growth_steps", growth_interval),
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            hysteresis=hysteresis,
            min_scale=min_scale,
            max_scale=max_scale,
        )
        interval = getattr(rule, "growth_interval", _DEFAULT.growth_interval)
        jit_compile = validation.boolean_or_auto("jit_compile", jit_compile)
        super().__init__(inner, rule.initial_scale, interval, name, **kwargs)
        # Keras' defaults: `__getattr__` returns the settings of the inner optimizer instead.
        own = {"name", "built", *LossScaleOptimizer.__annotations__}
        for setting in (vars(inner).keys() & vars(self).keys()) - own:
            if not setting.startswith("_"):
                del self.__dict__[setting]
        patches.use(self)
        self.rule = rule
        self.jit_compile = jit_compile
        self.counters = Counters()
        self.inner_state = InnerState(inner)
        self.step_monitor = StepMonitor(requires_scaling=rule.scales_loss)
        self.sampler = GradientSampler(lambda: self.counters.read_counts().step)
        self._update_method = "apply"  # what the user called
        self._compiled_step: Any = None
        if jit_compile:
            self._compiled_step = tf.function(self._step, jit_compile=True, autograph=False)
        # Keras creates these in `build`. A function that is traced before `build` reads them too.
        options = {"shape": (), "aggregation": "none"}
        initial = keras.initializers.Constant(rule.initial_scale)
        self.step_counter = self.add_variable(
            dtype="int", initializer="zeros", name="step_counter", **options
        )
        self.dynamic_scale = self.add_variable(
            dtype="float32", initializer=initial, name="dynamic_scale", **options
        )
        # The indices of the variables, from the input to the loss, in the last trace.
        self._order: tuple[int, ...] = ()
        self._unscaled_order: list[int] = []

    def use_rule(self, rule: scaling.Rule) -> None:
        """Replaces the rule of the loss scale, before `build` and before the first step."""
        interval = getattr(rule, "growth_interval", _DEFAULT.growth_interval)
        initial = rule.initial_scale
        self.__dict__.update(rule=rule, initial_scale=initial, dynamic_growth_steps=interval)
        self.step_monitor = StepMonitor(requires_scaling=rule.scales_loss)
        self.dynamic_scale.assign(initial)

    def _step(self, gradients: Gradients, arguments: StepArguments) -> None:
        take_step(self._step_state, gradients, arguments)

    def build(self, var_list: Variables) -> None:
        """Creates the counters by variable and the inner optimizer's variables."""
        if self.inner_optimizer.built:  # by another model, or by an earlier `compile`
            keras_internals.check_variables_are_known(self.inner_optimizer, var_list)
        if not self.rule.scales_loss:
            # Its variables have the order of a plain optimizer, because that is what is saved.
            self.inner_optimizer.build(var_list)
        self._build(var_list)

    @keras_internals.without_tracking
    def _build(self, var_list: Variables) -> None:
        # Keras' `build` would also create the variables of these options for the wrapper.
        self.__dict__.update(use_ema=False, gradient_accumulation_steps=None)
        try:
            self.inner_optimizer.build(var_list)
            keras.optimizers.Optimizer.build(self, var_list)
        finally:
            del self.__dict__["use_ema"], self.__dict__["gradient_accumulation_steps"]
        self.counters.build_for(len(var_list))
        self.sampler.build(var_list)
        self._order = tuple(range(len(var_list)))
        self.step_monitor.unscaled_flags.build_for(len(var_list))
        must_compile = self.jit_compile is True and tf.distribute.has_strategy()
        if must_compile and not can_compile_on_replicas(self.inner_optimizer, var_list):
            user_messages.warn(_JIT_COMPILE_IGNORED)

    @property
    def loss_scale(self) -> Any:
        """The loss scale that `scale_loss` multiplies by: scalar float32 tensor on the device."""
        return self._bounded_scale(LARGEST_APPLIED_SCALE)

    @tf.autograph.experimental.do_not_convert
    def scale_loss(self, loss: Any) -> Any:
        """Returns the loss times the loss scale. Differentiate it in place of the loss.

        Args:
            loss: Scalar or tensor of any float dtype.

        Returns:
            A tensor of the same shape, in float64 for a float64 loss, else in float32.
        """
        if loss is None:
            raise TypeError(validation.message("loss", loss, "a tensor or number"))
        loss = ops.convert_to_tensor(loss)
        self.step_monitor.record_loss(loss)
        # The user may have overridden this method: that of Keras returns the loss.
        loss = ops.convert_to_tensor(self.inner_optimizer.scale_loss(loss))
        loss = ops.cast(loss, keras.backend.result_type(loss.dtype, "float32"))
        if step := recorded_graph():
            step.add_loss(self, loss)
        if not self.rule.scales_loss:
            return loss
        return ops.multiply(loss, ops.cast(self.loss_scale, loss.dtype))

    @tf.autograph.experimental.do_not_convert
    def unscale(self, grads: Gradients) -> list[Any]:
        """Returns gradients divided by the loss scale, to inspect, clip or change before `apply`.

        The next `apply` takes its gradients as unscaled, once. To apply the scaled ones
        nevertheless, pass it `unscaled=False`. To discard the batch, do not call `apply`.

        Args:
            grads: Loss-scaled gradients: tensors, `tf.IndexedSlices` or `None`.

        Returns:
            The unscaled gradients, in float64 for float64 gradients, else in float32; those of
            float8 scales as they are. NaN and Inf are kept. The next `apply` skips the step if
            there are any, even if they are clipped to a finite value.

        Raises:
            ValueError: In a `train_step` that did not call `scale_loss`, outside of a replica
                context, or in a graph with several replicas if the optimizer is not built.
        """
        grads = list(grads)
        distribution.check_context("unscale", self.built)
        self.step_monitor.stage.check_scaled()
        unscaled = multiply_gradients(grads, 1.0 / self.loss_scale)
        if self.built and len(grads) == len(self._trainable_variables):
            # As in the update, the values of float8 scales are not divided.
            for index, variable in enumerate(self._trainable_variables):
                if is_overwritten(variable):
                    unscaled[index] = grads[index]
        self.step_monitor.record_unscaled(unscaled)
        # It is found here: after a clip by the norm of all, each gradient depends on all.
        self._unscaled_order = network_order(grads)
        return unscaled

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> Any:
        """Does what `apply` does, through the `apply_gradients` of the inner optimizer.

        Args:
            grads_and_vars: Pairs of a gradient and its variable, as for `apply`.

        Returns:
            The variable `iterations`.
        """
        grads, variables = zip(*grads_and_vars, strict=True)
        self._update_method = "apply_gradients"
        try:
            self.apply(grads, variables)
        finally:
            self._update_method = "apply"
        return self.iterations

    @tf.autograph.experimental.do_not_convert
    def apply(
        self,
        grads: Gradients,
        trainable_variables: Variables | None = None,
        *,
        unscaled: bool | None = None,
    ) -> None:
        """Applies loss-scaled gradients, or skips the step if the loss or one is not finite.

        Args:
            grads: Gradients: tensors, `tf.IndexedSlices` or `None`, one for each variable. They are
                divided by the loss scale, as in Keras' class, or not if `unscale` was called after
                the last `scale_loss` and `apply`.
            trainable_variables: The variables of `grads`. Optional once the optimizer is built;
                defaults to the variables that it was built on.
            unscaled: Whether the gradients went through `unscale`. Defaults to what was called
                last.

        Raises:
            ValueError: If the optimizer is not built and `trainable_variables` is `None`; if it was
                not built on one of the variables; if all gradients are `None`; if the number of
                gradients differs from that of the variables, or a gradient has another shape than
                its variable; if the last `unscale` got fewer gradients; in the cases in which
                `unscale` raises one; or if `unscaled` is needed, because a `tf.function` called
                `unscale` and does not run Python again.
        """
        grads = list(grads)
        distribution.check_context("apply", self.built or not grads)
        built_on = self._trainable_variables if self.built else None
        variables = checked_variables(grads, trainable_variables, built_on)
        if unscaled is None:  # what the order of the calls says
            self.step_monitor.follow_functions()
            stage = self.step_monitor.stage
            stage.check_apply(sum(gradient is not None for gradient in grads))
            unscaled = stage.is_unscaled
        else:
            unscaled = validation.boolean("unscaled", unscaled)
        if step := recorded_graph():
            step.add_gradients(AppliedGradients(self, grads, variables, unscaled))
            if step.only_gradients:
                return
        if not grads:
            return
        if all(gradient is None for gradient in grads):
            # Keras would raise this inside of the branch of the update, with a message about that.
            raise ValueError("No gradients provided for any variable.")
        # TensorFlow traces a function whose first trace creates variables once more, which must
        # find the same stage.
        is_traced_twice = not self.built and not tf.executing_eagerly()
        if not self.built:
            self.build(variables)
        # Keras has no public names for these two methods.
        self._check_variables_are_known(variables)
        indices = tuple(map(self._get_variable_index, variables))
        if not is_traced_twice:
            self.step_monitor.end_apply(unscaled)

        # The order of all variables, from the input to the loss.
        positions = self._unscaled_order
        if not unscaled or len(positions) != len(grads):
            positions = network_order(grads)
        given = [indices[position] for position in positions]
        every = range(len(self._trainable_variables))
        self._order = tuple(dict.fromkeys([*given, *every]))
        arguments = StepArguments(indices, self._order, unscaled, self._update_method)
        self._take_step(arguments, grads)

    def _take_step(
        self, arguments: StepArguments, grads: Gradients, follows_compiled: bool = False
    ) -> None:
        """Takes a step, compiled if it has to be or if it follows a part that is, and can be."""
        inner, variables = self.inner_optimizer, self._trainable_variables
        compiles = self.compiles_step
        if follows_compiled and tf.distribute.has_strategy():
            compiles = can_compile_on_replicas(inner, variables)
        if compiles or xla.is_tracing():
            grads = list(map(before_cast, grads))
        updates = deferring()
        if updates:
            take = functools.partial(self._take_step, arguments, follows_compiled=True)
            state = self._step_state
            updates.add(grads, take, state.written, state.read)
            return
        # This is outside of the compiled step, in which a branch would have to wait.
        if self.sampler.is_active:
            self._sample(grads, arguments)
        if not compiles:
            take_step(self._step_state, grads, arguments)
            return
        grads = list(map(with_padded_rows, grads))
        if tf.distribute.has_strategy():
            take_step_on_replicas(self._step_state, grads, arguments)
        else:
            self._compiled_step(grads, arguments)

    @property
    def _step_state(self) -> StepState:
        return StepState(
            inner=self.inner_optimizer,
            rule=self.rule,
            scale=self.dynamic_scale,
            clean_steps=self.step_counter,
            counters=self.counters,
            monitor=self.step_monitor,
            variables=self._trainable_variables,
        )

    def _sample(self, gradients: Gradients, arguments: StepArguments) -> None:
        """Samples the gradients if the step is due. Each replica samples its own."""
        gradient_at = dict(zip(arguments.indices, gradients, strict=True))
        every = range(len(self._trainable_variables))
        in_order = [gradient_at.get(index) for index in every]
        if all(gradient is None for gradient in in_order):
            return

        def step() -> Any:
            return self.counters.counts.value[COUNT_INDEX["step"]] + 1

        def scale() -> Any:
            return self.loss_scale

        self.sampler.sample(in_order, scale, step, arguments.unscaled)

    @property
    def compiles_step(self) -> bool:
        """Whether `apply`, called here, is compiled apart from the step around it.

        Such a step needs no decision of the host. A step that is compiled itself contains it.
        """
        inner, variables = self.inner_optimizer, self._trainable_variables
        if not self.jit_compile or xla.is_tracing():
            return False
        is_eager = tf.executing_eagerly()
        if tf.distribute.has_strategy():
            # Keras synchronizes replicas in the branches of these options, which fails.
            has_branch = inner.gradient_accumulation_steps or inner.ema_overwrite_frequency
            is_wanted = self.jit_compile is True or xla.has_gpu() or bool(has_branch)
            return is_wanted and not is_eager and can_compile_on_replicas(inner, variables)
        if self.jit_compile is True:
            return True
        # Compiled code does not see later changes of Python's values. A loop that runs eagerly may
        # rely on them.
        if is_eager or not xla.has_gpu():
            return False
        return supports_predicated_writes(inner, variables)

    def snapshot(self) -> Snapshot:
        """Reads the loss scale, the counters and the last gradient sample from the device.

        Returns:
            A `kmp.records.Snapshot`. Before the first step it has the initial scale and zeros.
        """
        counts = self.counters.read_counts()
        paths = self.paths
        overflows, origins = self.counters.read_by_variable(paths)
        last_loss, highest_loss = self.counters.read_losses()
        has_loss = self.step_monitor.loss_dtype is not None and counts.step > 0
        # Numbers start with 1; 0 is no variable.
        number = counts.origin_number
        origin = paths[number - 1] if 0 < number <= len(paths) else None
        known = Snapshot.__annotations__
        return Snapshot(
            **{name: count for name, count in counts._asdict().items() if name in known},
            loss_scale=float(self._bounded_scale()),
            clean_steps=int(self.step_counter.numpy()),
            overflow_origin=origin,
            last_loss=last_loss if has_loss else None,
            highest_loss=highest_loss if has_loss else None,
            overflows_by_variable=overflows,
            overflow_origins_by_variable=origins,
            loss_dtype=self.step_monitor.loss_dtype,
            sample=self.sampler.read(self._order, counts.step),
        )

    @property
    def paths(self) -> list[str]:
        """Paths of the variables that the optimizer was built on, in its order.

        A duplicate path gets a number.
        """
        return paths_of(self._trainable_variables)

    def variables_by_path(self) -> dict[str, Any]:
        """Returns the trainable variables by path, from the input to the loss.

        The dictionary is empty before the optimizer is built.
        """
        items = list(zip(self.paths, self._trainable_variables, strict=True))
        return dict(items[index] for index in self._order)

    def get_config(self) -> dict[str, Any]:
        """Returns the keys of Keras' class, and the arguments of kmp that are not the defaults."""
        config = super().get_config()
        if self.jit_compile != "auto":
            config["jit_compile"] = self.jit_compile
        if isinstance(self.rule, scaling.FixedScale):
            config["loss_scale"] = self.rule.initial_scale
            return config
        for name in ("growth_factor", "backoff_factor", "hysteresis", "min_scale", "max_scale"):
            value = getattr(self.rule, name)
            if value != getattr(_DEFAULT, name):
                config[name] = value
        return config

    def save_own_variables(self, store: Any) -> None:
        """Saves the variables of Keras' class; without a loss scale, those of a plain optimizer."""
        if self._is_saved_as_plain:
            self.inner_optimizer.save_own_variables(store)
        else:
            super().save_own_variables(store)

    def __dir__(self) -> Iterable[str]:
        """Lists the attributes, in which Keras finds what else to save."""
        names = super().__dir__()
        if not self._is_saved_as_plain:
            return names
        # `save_own_variables` has saved it.
        return [name for name in names if name != "inner_optimizer"]

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        """Returns what `tf.train.Checkpoint` saves; without a loss scale, as a plain optimizer.

        Such a checkpoint loads without kmp, and sets no loss scale of a run in float16.
        """
        children = super()._trackable_children(save_type, **kwargs)
        # TensorFlow would save the function too, which reads variables that it does not save.
        children.pop("_compiled_step", None)
        if not self._is_saved_as_plain or save_type != "checkpoint":
            return children
        also = ("counters", "inner_state")
        return checkpoint_binding.children_as_plain(self.inner_optimizer, children, also)

    @property
    def _deferred_dependencies(self) -> Any:
        """What a checkpoint has for variables that `build` will create."""
        if self._is_saved_as_plain:
            return checkpoint_binding.deferred_of(self.inner_optimizer)
        return super()._deferred_dependencies

    @property
    def _is_saved_as_plain(self) -> bool:
        rule = vars(self).get("rule")
        return rule is not None and not rule.scales_loss

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Excludes variables from the weight decay of the inner optimizer, as there."""
        self.inner_optimizer.exclude_from_weight_decay(var_list, var_names)

    def __getattr__(self, name: str) -> Any:
        """Returns a setting of the inner optimizer, such as `clipnorm` or `beta_1`."""
        inner = vars(self).get("inner_optimizer")
        if inner is None or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        is_fixed = "counters" in vars(self) and name in _SET_AT_CREATION
        # Keras sets it in other optimizers.
        is_reset = name == "loss_scale_factor" and value is None
        if is_fixed and not is_reset:
            raise AttributeError(
                f"`{name}` cannot be changed: create a new kmp.LossScaleOptimizer, and compile"
                " again."
            )
        inner = vars(self).get("inner_optimizer")
        is_of_class = name in LossScaleOptimizer.__annotations__ or hasattr(type(self), name)
        is_own = is_of_class or name in vars(self) or name.startswith("_")
        if is_own or not hasattr(inner, name):
            super().__setattr__(name, value)
        else:
            setattr(inner, name, value)

    def _bounded_scale(self, highest: float = LARGEST_SCALE) -> Any:
        scale = bounded_scale(self.rule, self.dynamic_scale, highest)
        if step := recorded_graph():
            step.add_scale(self, scale)
        return scale


def _loss_scale_of(inner: keras.optimizers.Optimizer, loss_scale: float | str) -> float | str:
    """Returns the argument `loss_scale`, or that of the optimizer, which Keras' class resets."""
    factor = inner.loss_scale_factor
    if factor is None:
        return loss_scale
    if not is_dynamic(loss_scale) and loss_scale != factor:
        raise ValueError(
            f"A model has one loss scale. Received: loss_scale={loss_scale!r} and an optimizer with"
            f" loss_scale_factor={factor!r}"
        )
    return factor
