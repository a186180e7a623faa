"""The optimizer that scales the loss.

`apply` checks its arguments and takes a step: `_step` measures and agrees, `_update_or_skip`
updates or skips, and `_adapt_and_count` adapts the loss scale and counts.
"""

import functools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from kmp import scaling
from kmp.backend import distribution, keras_internals, outlined, patches, xla
from kmp.gradients import (
    Gradients,
    GradientSampler,
    Variables,
    before_cast,
    is_overwritten,
    multiply_gradients,
    nonfinite_flags,
    paths_of,
    unscale_for_update,
    with_padded_rows,
)
from kmp.optimizer.counters import COUNT_INDEX, Counters, network_order
from kmp.optimizer.inner_optimizer import (
    InnerState,
    predicated_writes,
    resolve_optimizer,
    supports_predicated_writes,
    supports_updates_of_sums,
    without_strategy,
)
from kmp.optimizer.step_monitor import StepLosses, StepMonitor
from kmp.records import Snapshot
from kmp.utils import user_messages, validation

_DEFAULT = scaling.DynamicScale()
_NO_SCALE = scaling.FixedScale(1.0)
_SET_AT_CREATION = (
    *scaling.LossScaleSettings.__annotations__,
    *("dynamic_growth_steps", "loss_scale_factor", "rule", "jit_compile"),
)
_JIT_COMPILE_IGNORED = (
    "`jit_compile=True` does nothing here: under a distribution strategy, only the updates of"
    " Keras' own optimizers without clipping and gradient accumulation can be compiled, and only"
    " where each replica has its own variables."
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
        hysteresis: Integer, at least 1, the number of consecutive overflows after which the scale
            backs off. Defaults to 1.
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
            replica's check and update are compiled, if the optimizer neither clips nor accumulates
            gradients.
        **kwargs: Arguments that `keras.optimizers.LossScaleOptimizer` accepts for compatibility
            with old files.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If an argument is outside its range; the message names the argument, the value
            and the range.

    Example:
    >>> optimizer = LossScaleOptimizer("sgd", initial_scale=1024.0, growth_interval=500)
    >>> weight = keras.Variable([1.0, 2.0])
    >>> _ = optimizer.scale_loss(0.5)
    >>> optimizer.apply([ops.array([float("inf"), 0.0])], [weight])
    >>> optimizer.snapshot().loss_scale, optimizer.snapshot().overflow_count
    (512.0, 1)
    """

    # Of the wrapper, also if the inner optimizer has an attribute of this name. Keras' class has
    # the first five.
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
    settings_call: str = (
        "kmp.LossScaleOptimizer"  # the call that the settings come from, which advice names
    )

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
        if inner.loss_scale_factor is not None:
            if not scaling.is_dynamic(loss_scale) and loss_scale != inner.loss_scale_factor:
                raise ValueError(
                    f"A model has one loss scale. Received: loss_scale={loss_scale!r} and an"
                    f" optimizer with loss_scale_factor={inner.loss_scale_factor!r}"
                )
            loss_scale = inner.loss_scale_factor  # Keras' class resets that of the optimizer
        rule = scaling.loss_scale_rule(
            loss_scale,
            initial_scale=initial_scale,
            growth_interval=kwargs.pop(
                "dynamic_growth_steps", growth_interval
            ),  # in the config of Keras' class
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            hysteresis=hysteresis,
            min_scale=min_scale,
            max_scale=max_scale,
        )
        interval = getattr(rule, "growth_interval", _DEFAULT.growth_interval)
        jit_compile = validation.boolean_or_auto("jit_compile", jit_compile)
        super().__init__(inner, rule.initial_scale, interval, name, **kwargs)
        for setting in vars(inner).keys() & vars(self).keys() - {
            "name",
            "built",
            *LossScaleOptimizer.__annotations__,
        }:
            if not setting.startswith(
                "_"
            ):  # Keras' defaults; `__getattr__` returns the inner optimizer's instead
                del self.__dict__[setting]
        patches.use(self)
        self.rule = rule
        self.jit_compile = jit_compile
        self.counters = Counters()
        self.inner_state = InnerState(inner)
        self.step_monitor = StepMonitor(requires_scaling=rule != _NO_SCALE)
        self.sampler = GradientSampler(lambda: self.counters.read_counts().step)
        self._compiled_step = (
            tf.function(self._step, jit_compile=True, autograph=False) if jit_compile else None
        )
        # As Keras' `build` does. Here, so that a function which is traced before `build` reads the
        # variable too.
        options = {"shape": (), "aggregation": "none"}
        initial = keras.initializers.Constant(rule.initial_scale)
        self.step_counter = self.add_variable(
            dtype="int", initializer="zeros", name="step_counter", **options
        )
        self.dynamic_scale = self.add_variable(
            dtype="float32", initializer=initial, name="dynamic_scale", **options
        )
        self._order: tuple[
            int, ...
        ] = ()  # of the variables, from the input to the loss, in the last trace
        self._unscaled_order: list[int] = []

    @keras_internals.without_tracking
    def build(self, var_list: Variables) -> None:
        """Creates the counters by variable and the inner optimizer's variables."""
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
        self.step_monitor.build_for(len(var_list))
        if (
            self.jit_compile is True
            and tf.distribute.has_strategy()
            and not self._can_compile_on_replicas
        ):
            user_messages.warn(_JIT_COMPILE_IGNORED)

    @property
    def loss_scale(self) -> Any:
        """The loss scale that `scale_loss` multiplies by: scalar float32 tensor on the device."""
        return self._bounded_scale(scaling.LARGEST_APPLIED_SCALE)

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
        loss = ops.cast(loss, keras.backend.result_type(loss.dtype, "float32"))
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
        self.step_monitor.check_scaled()
        unscaled = multiply_gradients(grads, 1.0 / self.loss_scale)
        if self.built and len(grads) == len(self._trainable_variables):
            # As in the update, the values of float8 scales are not divided.
            pairs = zip(grads, unscaled, self._trainable_variables, strict=True)
            unscaled = [
                grad if is_overwritten(variable) else quotient for grad, quotient, variable in pairs
            ]
        self.step_monitor.record_unscaled(unscaled)
        self._unscaled_order = network_order(
            grads
        )  # a clip by the norm of all makes each depend on all
        return unscaled

    @tf.autograph.experimental.do_not_convert
    def apply(
        self,
        grads: Gradients,
        trainable_variables: Variables | None = None,
        *,
        unscaled: bool | None = None,
    ) -> None:
        """Applies loss-scaled gradients, or skips the step if the loss or one of them is not finite.

        Args:
            grads: Gradients: tensors, `tf.IndexedSlices` or `None`, one for each variable. They are
                divided by the loss scale, as in Keras' class, or not if `unscale` was called after
                the last `scale_loss` and `apply`.
            trainable_variables: The variables of `grads`. Optional once the optimizer is built;
                defaults to the variables that it was built on.
            unscaled: Whether the gradients went through `unscale`. Defaults to what was called
                last.

        Raises:
            ValueError: If the optimizer is not built and `trainable_variables` is `None`, if the
                number of gradients differs from that of variables, if a gradient does not have the
                shape of its variable, if the optimizer was not built on one of the variables, where
                `unscale` raises one, if the last `unscale` got fewer gradients, or if `unscaled` is
                needed because a `tf.function` called `unscale` and does not run Python again.
        """
        grads = list(grads)
        distribution.check_context("apply", self.built or not grads)
        variables = self._variables_for(grads, trainable_variables)
        if unscaled is None:
            unscaled = self.step_monitor.takes_unscaled(
                sum(gradient is not None for gradient in grads)
            )
        unscaled = validation.boolean("unscaled", unscaled)
        if not grads:
            return
        # TensorFlow traces a function whose first trace creates variables once more, which must
        # find the same stage.
        is_traced_twice = not self.built and not tf.executing_eagerly()
        if not self.built:
            self.build(variables)
        self._check_variables_are_known(
            variables
        )  # Keras has no public name for it, nor for the index
        indices = tuple(map(self._get_variable_index, variables))
        if not is_traced_twice:
            self.step_monitor.end_apply(unscaled)
        positions = self._unscaled_order
        if not unscaled or len(positions) != len(grads):
            positions = network_order(grads)
        every = range(len(self._trainable_variables))
        self._order = tuple(dict.fromkeys([*(indices[position] for position in positions), *every]))
        step: Any = self._step
        if self.compiles_step:
            step = self._step_on_replicas if tf.distribute.has_strategy() else self._compiled_step
        if self.compiles_step or xla.is_tracing():
            grads = list(map(before_cast, grads))
        # Outside of the compiled step, for which a branch would wait.
        if self.sampler.is_active:
            self._sample(grads, indices, unscaled)
        if self.compiles_step:
            grads = list(map(with_padded_rows, grads))
        step(grads, indices, self._order, unscaled)

    @property
    def compiles_step(self) -> bool:
        """Whether `apply`, called here, is compiled apart from the step around it, and needs no decision of the host.

        Not in a step that is compiled itself.
        """
        if not self.jit_compile or xla.is_tracing():
            return False
        if tf.distribute.has_strategy():
            is_possible = self._can_compile_on_replicas and not tf.executing_eagerly()
            return is_possible and (self.jit_compile is True or xla.has_gpu())
        if self.jit_compile is True:
            return True
        # Compiled code does not see later changes of Python's values. A loop that runs eagerly may
        # rely on them.
        can_wait = tf.executing_eagerly() or not xla.has_gpu()
        return not can_wait and supports_predicated_writes(
            self.inner_optimizer, self._trainable_variables
        )

    @property
    def _can_compile_on_replicas(self) -> bool:
        inner = self.inner_optimizer
        is_predicable = supports_predicated_writes(inner, self._trainable_variables)
        return is_predicable and supports_updates_of_sums(inner) and distribution.can_update_parts()

    def _sample(self, gradients: Gradients, indices: tuple[int, ...], unscaled: bool) -> None:
        """Samples the gradients if the step is due. Each replica samples its own."""
        gradient_at = dict(zip(indices, gradients, strict=True))
        in_order = [gradient_at.get(index) for index in range(len(self._trainable_variables))]

        def step() -> Any:
            return self.counters.counts.value[COUNT_INDEX["step"]] + 1

        if any(gradient is not None for gradient in in_order):
            self.sampler.sample(in_order, lambda: self.loss_scale, step, unscaled)

    def _step(
        self, gradients: Gradients, indices: tuple[int, ...], order: tuple[int, ...], unscaled: bool
    ) -> None:
        """Takes a step.

        `indices` are those of the variables among the ones that the optimizer was built on, which
        `order` sorts from the input to the loss.
        """
        variables = [self._trainable_variables[index] for index in indices]
        scale = self._bounded_scale()
        applied_scale = ops.minimum(scale, scaling.LARGEST_APPLIED_SCALE)
        divisor = tf.ones([]) if unscaled else applied_scale

        # Measure, on each replica.
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        flags = self._flags_of_all(
            nonfinite_flags(gradients, variables, divisor, replicas), indices, unscaled
        )

        # Agree, over replicas and workers.
        losses = self.step_monitor.take_losses()
        flags, losses = distribution.sum_over_replicas((flags, losses))
        distribution.in_update_context(
            functools.partial(self._update_or_skip, variables, order),
            (scale, divisor, flags, losses),
            gradients,
        )

    def _step_on_replicas(
        self, gradients: Gradients, indices: tuple[int, ...], order: tuple[int, ...], unscaled: bool
    ) -> None:
        """Takes a step as `_step` does, with a compiled check and update on each replica.

        Replicas synchronize in between, which compiled code cannot: they agree, and sum the
        unscaled gradients.
        """
        variables = [self._trainable_variables[index] for index in indices]
        scale = self._bounded_scale()
        divisor = tf.ones([]) if unscaled else ops.minimum(scale, scaling.LARGEST_APPLIED_SCALE)

        @tf.function(jit_compile=True, autograph=False)
        def measure(gradients: Gradients, divisor: tf.Tensor) -> tuple[tf.Tensor, list[Any]]:
            replicas = tf.distribute.get_strategy().num_replicas_in_sync
            flags = nonfinite_flags(gradients, variables, divisor, replicas)
            return flags, unscale_for_update(gradients, variables, divisor)

        flags, gradients = measure(gradients, divisor)
        flags = self._flags_of_all(flags, indices, unscaled)
        losses = self.step_monitor.take_losses()
        flags, losses = distribution.sum_over_replicas((flags, losses))
        present = [index for index, gradient in enumerate(gradients) if gradient is not None]
        sums = distribution.all_reduce_sum([gradients[index] for index in present])
        gradients = [
            dict(zip(present, sums, strict=True)).get(index) for index in range(len(gradients))
        ]
        count = len(tf.distribute.get_strategy().extended.worker_devices)
        state = [*self._trainable_variables, *keras_internals.optimizer_state(self.inner_optimizer)]
        state += [self.dynamic_scale, self.step_counter, *self.counters.weights]
        update = functools.partial(self._update_on_replica, variables, order)
        functions = [tf.function(update, jit_compile=True, autograph=False) for _ in range(count)]
        distribution.update_parts(functions, state, (scale, tf.ones([]), flags, losses), gradients)

    def _update_on_replica(
        self, variables: Variables, order: Sequence[int], *arguments: Any
    ) -> None:
        with without_strategy(self.inner_optimizer):
            self._update_or_skip(variables, order, *arguments)

    def _flags_of_all(
        self, flags: tf.Tensor, indices: tuple[int, ...], unscaled: bool
    ) -> tf.Tensor:
        """Returns the flags of all variables that the optimizer was built on, from those of the given gradients."""
        if unscaled:
            # A clip by value hides NaN and Inf, and a clip by the norm of all gradients makes all
            # of them NaN.
            before_clip = self.step_monitor.take_unscaled_flags(len(indices))
            flags = tf.where(tf.reduce_any(before_clip > 0), before_clip, flags)
        count = len(self._trainable_variables)
        if indices == tuple(range(count)):
            return flags
        # A variable without a gradient has the flag 0.
        return tf.maximum(tf.math.unsorted_segment_max(flags, list(indices), count), 0.0)

    def _update_or_skip(
        self,
        variables: Variables,
        order: Sequence[int],
        scale: tf.Tensor,
        divisor: tf.Tensor,
        flags: tf.Tensor,
        losses: StepLosses,
        gradients: Gradients,
    ) -> None:
        """Updates the variables unless the loss or a gradient is non-finite; then adapts the scale and counts."""
        inner = self.inner_optimizer
        count = functools.partial(
            self._adapt_and_count, scale=scale, flags=flags, losses=losses, order=order
        )
        # XLA would compute the comparison again in each loop that uses it.
        overflowed = xla.opaque(ops.max(flags) > losses.skip_threshold)

        def update_replica(divisor: tf.Tensor, gradients: Gradients) -> None:
            # Unscaled inside the branch, so that a skipped step does not pay for it.
            inner.apply(unscale_for_update(gradients, variables, divisor), list(variables))

        def update() -> None:
            distribution.on_each_replica(update_replica, divisor, gradients)
            count(False)

        # Under a strategy a variable has one component per replica, and the optimizer writes the
        # components.
        predicates = xla.is_tracing() and not tf.distribute.has_strategy()
        if predicates and supports_predicated_writes(inner, self._trainable_variables):
            with predicated_writes(inner, self._trainable_variables, overflowed):
                update_replica(divisor, gradients)
            count(overflowed)
        else:
            ops.cond(overflowed, outlined(functools.partial(count, True)), update)

    def _adapt_and_count(
        self,
        overflowed: Any,
        scale: tf.Tensor,
        flags: tf.Tensor,
        losses: StepLosses,
        order: Sequence[int],
    ) -> None:
        """Adapts the loss scale and counts the step.

        In a branch that one outcome reaches, `overflowed` is a Python bool. That is why each branch
        calls this, and not `_update_or_skip` after both: a step with callbacks then has 60
        operations more than the bare step, not 112.
        """
        before = self.counters.values()
        state = scaling.ScaleState(scale, ops.copy(self.step_counter), before.overflows_in_a_row)
        outcome = scaling.StepOutcome(overflowed, losses.were_finite)
        after = self.rule.update(state, outcome)
        self.dynamic_scale.assign(after.scale)
        self.step_counter.assign(after.clean_steps)
        is_at_min_scale = ops.logical_and(
            self.rule.backs_off(state, outcome), scale <= self.rule.min_scale
        )
        self.counters.count(before, overflowed, losses, is_at_min_scale, flags > 0, order)

    def _variables_for(self, grads: Gradients, trainable_variables: Variables | None) -> list[Any]:
        """Returns the variables of gradients, or raises an error if there is not one for each, of its shape."""
        if any(
            isinstance(gradient, tuple) and not hasattr(gradient, "dtype") for gradient in grads
        ):
            raise ValueError(
                "`apply` takes gradients and variables as two lists: apply(gradients, variables)."
                " For pairs, call apply_gradients(zip(gradients, variables))."
            )
        if not self.built and trainable_variables is None:
            raise ValueError(
                "The optimizer is not built. Pass `trainable_variables`, or call `build` first."
            )
        variables = list(
            self._trainable_variables if trainable_variables is None else trainable_variables
        )
        if len(grads) != len(variables):
            raise ValueError(
                "`grads` must have one gradient for each variable. "
                f"Received: {len(grads)} gradients, {len(variables)} variables"
            )
        for gradient, variable in zip(grads, variables, strict=True):
            expected, is_sparse = (
                tf.TensorShape(variable.shape),
                isinstance(gradient, tf.IndexedSlices),
            )
            received = tf.TensorShape(
                [None, *gradient.values.shape[1:]] if is_sparse else np.shape(gradient)
            )
            if gradient is not None and not expected.is_compatible_with(received):
                raise ValueError(
                    f"The gradient of {getattr(variable, 'path', variable.name)!r} must have the"
                    f" variable's shape {tuple(expected)}. Received: {'rows of ' * is_sparse}shape"
                    f" {received}"
                )
        return variables

    def snapshot(self) -> Snapshot:
        """Reads the loss scale, the counters and the last gradient sample from the device.

        Returns:
            A `kmp.records.Snapshot`. Before the first step it has the initial scale and zeros.
        """
        counts = self.counters.read(
            self.paths, has_recorded_loss=self.step_monitor.loss_dtype is not None
        )
        return Snapshot(
            loss_scale=float(self._bounded_scale()),
            clean_steps=int(self.step_counter.numpy()),
            sample=self.sampler.read(self._order, counts["step"]),
            loss_dtype=self.step_monitor.loss_dtype,
            **counts,
        )

    @property
    def paths(self) -> list[str]:
        """Paths of the variables that the optimizer was built on, in its order; a duplicate path gets a number."""
        return paths_of(self._trainable_variables)

    def variables_by_path(self) -> dict[str, Any]:
        """Returns the trainable variables by path, from the input to the loss; none before the optimizer is built."""
        items = list(zip(self.paths, self._trainable_variables, strict=True))
        return dict(items[index] for index in self._order)

    def get_config(self) -> dict[str, Any]:
        """Returns the keys of Keras' class, and the arguments of kmp that differ from their defaults."""
        config = super().get_config()
        if self.jit_compile != "auto":
            config["jit_compile"] = self.jit_compile
        if isinstance(self.rule, scaling.FixedScale):
            return config | {"loss_scale": self.rule.initial_scale}
        ours = ("growth_factor", "backoff_factor", "hysteresis", "min_scale", "max_scale")
        return config | {k: v for k in ours if (v := getattr(self.rule, k)) != getattr(_DEFAULT, k)}

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
        is_none = (
            name == "loss_scale_factor" and value is None
        )  # as Keras sets it inside of other optimizers
        if name in _SET_AT_CREATION and "counters" in vars(self) and not is_none:
            raise AttributeError(
                f"`{name}` cannot be changed: create a new kmp.LossScaleOptimizer, and compile"
                " again."
            )
        inner = vars(self).get("inner_optimizer")
        is_own = (
            name.startswith("_") or name in vars(self) or name in LossScaleOptimizer.__annotations__
        )
        if is_own or hasattr(type(self), name) or inner is None or not hasattr(inner, name):
            super().__setattr__(name, value)
        else:
            setattr(inner, name, value)

    def _bounded_scale(self, highest: float = scaling.LARGEST_SCALE) -> Any:
        """Returns the scale within the rule's bounds; a file or the user may have written any value to the variable."""
        return self.rule.bounded(self.dynamic_scale, highest)
