"""The optimizer that scales the loss: scale, measure, agree, update or skip, adapt, count."""

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import keras
import tensorflow as tf
from keras import ops

from kmp import scaling
from kmp.backend import distribution, keras_internals, register, resolve_optimizer, xla
from kmp.gradients import GradientSampler, extended_sampler, paths_of, values_of, with_values
from kmp.optimizer.apply_arguments import check_gradients, check_no_pairs
from kmp.optimizer.apply_step import Step, by_index
from kmp.optimizer.gradient_ancestry import mark_scale, mark_unscaled
from kmp.optimizer.gradient_scaling import GradientScaling, Scaling
from kmp.optimizer.inner_optimizer_state import InnerState
from kmp.optimizer.loss_monitor import LossMonitor
from kmp.optimizer.overflow_counters import OverflowCounters
from kmp.optimizer.overflow_origin import network_order
from kmp.optimizer.unscaled_flags import UnscaledFlags
from kmp.optimizer.unscaling import LARGEST_APPLIED_SCALE, multiply_gradients
from kmp.records import Snapshot
from kmp.scaling import LossScaleSettings, make_rule
from kmp.utils import matching_indices, user_messages, validation

_DEFAULT = scaling.DynamicScale()
# Those of kmp, and those of inner optimizers, for which Keras' class has its own error.
_ARGUMENTS = (
    *("inner_optimizer", "jit_compile", "dynamic", *LossScaleSettings.__annotations__),
    *inspect.signature(keras.optimizers.SGD).parameters,
)
_JIT_COMPILE_IGNORED = (
    "`jit_compile=True` does nothing under a distribution strategy. Pass it to `model.compile` instead, if the "
    "strategy supports it."
)


class ActivationProbe(Protocol):
    """Finds the first non-finite activation of a forward pass, as the probe of `kmp.callbacks.ForwardProbe` does."""

    def read(self) -> str | None:
        """Returns the name of the activation, or `None` if there was none."""


@register
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """An optimizer that scales the loss, skips steps that overflow, and counts them.

    float16 flushes gradients of 2^-25 and less to zero. Multiplying the loss by a large number, the loss scale, scales
    all gradients up; they are divided by it before the update. A step whose loss or gradients are not finite is
    skipped: all weights and all variables of the inner optimizer stay unchanged.

    Use it in `model.compile`, or in a custom training loop: call `scale_loss`, then `apply`. To clip or change
    gradients yourself, call `unscale` in between. Sources: see `kmp.scaling.DynamicScale`.

    Args:
        inner_optimizer: A `keras.optimizers.Optimizer`, or the name of one. Set clipping, weight decay, EMA and
            gradient accumulation on it; they apply to unscaled gradients.
        initial_scale: Float, the loss scale of the first step, from `min_scale` to `max_scale`. Defaults to 2^15.
        growth_interval: Integer, at least 1, the number of steps without an overflow after which the scale grows.
            Defaults to 2000. Keras' name for it, `dynamic_growth_steps`, is accepted too.
        name: Optional string, the name of the optimizer.
        growth_factor: Float above 1, multiplies the scale when it grows. Defaults to 2.
        backoff_factor: Float between 0 and 1, multiplies the scale when it backs off. Defaults to 0.5.
        hysteresis: Integer, at least 1, the number of consecutive overflows after which the scale backs off. Defaults
            to 1.
        min_scale: Float, at least 2^-126, the lowest scale. Defaults to 2^-14: below that, a scaled loss of 1 is
            subnormal in float16.
        max_scale: Float, at most 2^127, the highest scale. Defaults to 2^127, the largest power of two in float32. A
            scale above 2^126 is applied as 2^126, because the reciprocal of a larger one is subnormal.
        loss_scale: `"dynamic"` or 0 for a dynamic scale, or a float from 2^-126 to 2^127 for a fixed scale. Defaults
            to `"dynamic"`.
        jit_compile: Whether to compile `apply` with XLA if the surrounding step is not compiled: in a model compiled
            with `jit_compile=False`, or in an eager loop. As in a `tf.function`, values that are not tensors are read
            once, for example a callable learning rate, or attributes of the inner optimizer that are set later. Each
            new number of rows in a sparse gradient triggers a recompilation. Has no effect under a distribution
            strategy. Defaults to `False`.
        **kwargs: Arguments that `keras.optimizers.LossScaleOptimizer` accepts for compatibility with old files.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If an argument is outside its range; the message names the argument, the value and the range.

    Example:
    >>> optimizer = LossScaleOptimizer("sgd", initial_scale=1024.0, growth_interval=500)
    >>> weight = keras.Variable([1.0, 2.0])
    >>> _ = optimizer.scale_loss(0.5)
    >>> optimizer.apply([ops.array([float("inf"), 0.0])], [weight])
    >>> optimizer.snapshot().loss_scale, optimizer.snapshot().overflow_count
    (512.0, 1)
    """

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
        jit_compile: bool = False,
        **kwargs: Any,
    ) -> None:
        settings: LossScaleSettings = {
            "loss_scale": loss_scale,
            "initial_scale": initial_scale,
            "growth_interval": growth_interval,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "hysteresis": hysteresis,
            "min_scale": min_scale,
            "max_scale": max_scale,
        }
        misspelt = [name for name in kwargs if validation.suggestion(name, _ARGUMENTS)]  # Keras refuses others
        validation.check_argument_names(misspelt, _ARGUMENTS, "kmp.LossScaleOptimizer")
        if "dynamic_growth_steps" in kwargs:
            settings["dynamic_growth_steps"] = kwargs.pop("dynamic_growth_steps")
        rule = make_rule(**settings)
        interval = getattr(rule, "growth_interval", _DEFAULT.growth_interval)
        inner = resolve_optimizer("inner_optimizer", inner_optimizer)
        super().__init__(inner, rule.initial_scale, interval, name, **kwargs)
        self.rule = rule
        self.counters = OverflowCounters()
        self.inner_state = InnerState(inner)
        self.loss_monitor = LossMonitor()
        self.gradient_scaling = GradientScaling(self.loss_monitor, isinstance(rule, scaling.DynamicScale))
        self.sampler: GradientSampler | None = None
        self.probe: ActivationProbe | None = None
        self.jit_compile = validation.boolean("jit_compile", jit_compile)
        self._compiler = xla.Compiler()
        self._unscaled_flags = UnscaledFlags()
        self._order: list[int] = []

    def build(self, var_list: Sequence[Any]) -> None:
        """Creates the loss scale, the counters and the inner optimizer's variables."""
        if self.sampler:
            self.sampler.check_patterns(paths_of(var_list))
        super().build(var_list)
        self.gradient_scaling.build(self.scale_variable)
        self.counters.build_for(len(var_list))
        self._order = list(range(len(var_list)))
        if self.jit_compile and not self._compiles_step():
            user_messages.warn(_JIT_COMPILE_IGNORED)
        if self.sampler:
            self._build_sampler()

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
        self.loss_monitor.record(loss)
        self.gradient_scaling.record_scale_loss()
        loss = ops.cast(loss, keras.backend.result_type(loss.dtype, "float32"))
        return ops.multiply(loss, ops.cast(self._applied_scale(), loss.dtype))

    @property
    def loss_scale(self) -> Any:
        """The loss scale that `scale_loss` multiplies by: scalar float32 tensor on the device."""
        self.gradient_scaling.record_scale_read()
        return self._applied_scale()

    @property
    def initial_scale(self) -> float:
        """The loss scale of the first step."""
        self.gradient_scaling.record_scale_read()
        return self._initial_scale

    @initial_scale.setter
    def initial_scale(self, value: float) -> None:  # in Keras' `__init__`
        self._initial_scale = value

    @property
    def dynamic_scale(self) -> keras.Variable:
        """The variable that holds the loss scale, once the optimizer is built."""
        self.gradient_scaling.record_scale_read()
        return self.scale_variable

    @dynamic_scale.setter
    def dynamic_scale(self, variable: keras.Variable) -> None:  # in Keras' `build`
        self.scale_variable = variable

    @tf.autograph.experimental.do_not_convert
    def unscale(self, grads: Sequence[Any]) -> list[Any]:
        """Returns gradients divided by the loss scale, to inspect or change before `apply(..., unscaled=True)`.

        Args:
            grads: Loss-scaled gradients: tensors, `tf.IndexedSlices` or `None`.

        Returns:
            The unscaled gradients, in float64 for float64 gradients, else in float32. NaN and Inf are kept. The next
            `apply` in the same function, or eagerly, skips the step if there are any, even if they are clipped to a
            finite value. Gradients of a loss that did not go through `scale_loss` keep their values.
        """
        grads = list(grads)
        found = self.gradient_scaling.before_unscale(grads, self._trainable_variables if self.built else ())
        if found in (Scaling.NEVER_SCALED, Scaling.UNSCALED):
            unscaled = multiply_gradients(grads, 1.0)
        else:
            unscaled = multiply_gradients(grads, 1.0 / self._bounded_scale(LARGEST_APPLIED_SCALE))
            unscaled = [None if g is None else with_values(g, mark_unscaled(values_of(g))) for g in unscaled]
            self.gradient_scaling.record_unscaled(grads, unscaled)
        self._unscaled_flags.record(unscaled)
        return unscaled

    @tf.autograph.experimental.do_not_convert
    def apply(
        self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None, *, unscaled: bool | None = None
    ) -> None:
        """Applies loss-scaled gradients, or skips the step if the loss or one of them is not finite.

        Gradients of a loss that did not go through `scale_loss` are applied with the scale 1, and kmp warns once. In a
        graph this is decided by what the gradients are computed from. Eager gradients have no such record: they are
        taken as not scaled if no `scale_loss` was ever called and the loss scale was never read.

        Args:
            grads: Loss-scaled gradients: tensors, `tf.IndexedSlices` or `None`, one for each variable.
            trainable_variables: The variables of `grads`. Optional once the optimizer is built; defaults to the
                variables that it was built on.
            unscaled: Whether the gradients were divided by the loss scale with `unscale`. By default this is
                determined, also after they were clipped.

        Raises:
            ValueError: If the optimizer is not built and `trainable_variables` is `None`, if the number of gradients
                differs from that of variables, if a gradient does not have the shape of its variable, if the optimizer
                was not built on one of the variables, or if `unscaled` is needed but cannot be determined.
        """
        grads = list(grads)
        variables = self._variables_for(grads, trainable_variables)
        if not grads:
            return
        if self.built:
            indices = [self._index(variable) for variable in variables]
        else:
            distribution.check_built_before_step()
        scaling_of_grads = self._scaling_of(grads, self._trainable_variables if self.built else variables, unscaled)
        if not self.built:
            self.build(variables)
            indices = [self._index(variable) for variable in variables]
        if scaling_of_grads is Scaling.UNSCALED:
            grads = multiply_gradients(grads, self._applied_scale())
        self._order = network_order(by_index(grads, indices, len(self._trainable_variables)))
        is_scaled = scaling_of_grads is not Scaling.NEVER_SCALED
        step = Step(self, self._trainable_variables, variables, indices, self._order, is_scaled)
        unscaled_flags = self._unscaled_flags.take(len(grads))
        if self._compiles_step():
            learning_rate = keras_internals.learning_rate_of(self.inner_optimizer)
            self._compiler.call((*indices, is_scaled), learning_rate, step.take, grads, unscaled_flags)
        else:
            step.take(grads, unscaled_flags)

    def snapshot(self) -> Snapshot:
        """Reads the loss scale, the counters and the last gradient sample from the device.

        Returns:
            A `kmp.records.Snapshot`. Before the first step it has the initial scale and zeros.
        """
        counts = self.counters.read(self.paths, self.loss_monitor.has_recorded)
        return Snapshot(
            loss_scale=float(self._bounded_scale()),
            clean_steps=int(self.step_counter.numpy()) if self.built else 0,
            sample=self.sampler.read(self._order, counts["step"]) if self.sampler else None,
            nonfinite_activation=self.probe.read() if self.probe else None,
            loss_dtype=self.loss_monitor.loss_dtype,
            **counts,
        )

    def prepare_sampling(self, variables: str | Sequence[str] | None = None) -> bool:
        """Enables gradient sampling in the steps that are traced after this call.

        Args:
            variables: Path, or list of paths, of the variables to sample. Paths can be patterns with `*` and `?`, as
                in a shell. Defaults to all variables.

        Returns:
            Whether functions traced before must be retraced, because they cannot sample these variables. In Keras:
            `model.make_train_function(force=True)`.

        Raises:
            ValueError: If a pattern matches no variable. An optimizer that is not built yet raises it in `build`.
        """
        requested, previous = validation.patterns("variables", variables), self.sampler
        if self.built and requested is not None:
            matching_indices(requested, self.paths)
        # The sampler needs the replicas of the strategy that the optimizer was created under; no public name has it.
        with self._distribution_strategy.scope():
            self.sampler = extended_sampler(previous, requested)
        if self.sampler is not previous:
            self._compiler.forget()
            if self.built:
                self._build_sampler()
        return self.sampler is not previous

    def start_sampling(self, owner: Any, every_n_steps: int, next_step: bool = True) -> None:
        """Samples gradients in the next step, and in every step whose number is a multiple of `every_n_steps`.

        Sampling ends with `stop_sampling`. A second call for the same owner replaces its interval.

        Args:
            owner: The object that requests the samples. It must support weak references.
            every_n_steps: Integer, at least 1; in steps.
            next_step: Boolean, whether to sample the next step too, even if it is not a multiple.
        """
        every_n_steps = validation.positive_integer("every_n_steps", every_n_steps)
        if self.sampler is None:
            self.prepare_sampling()
        assert self.sampler is not None
        first = self.counters.read_counts()["steps"] + 1 if next_step else 0
        self.sampler.start(owner, every_n_steps, first)

    def stop_sampling(self, owner: Any) -> None:
        """Ends the sampling that `owner` requested; no function needs to be retraced."""
        if self.sampler:
            self.sampler.stop(owner)

    @property
    def paths(self) -> list[str]:
        """Paths of the variables that the optimizer was built on, in its order; a duplicate path gets a number."""
        return paths_of(self._trainable_variables) if self.built else []

    def variables_by_path(self) -> dict[str, Any]:
        """Returns the trainable variables by path, from the input to the loss; none before the optimizer is built."""
        items = list(zip(self.paths, self._trainable_variables, strict=True)) if self.built else []
        return dict(items[index] for index in self._order[: len(items)])

    def get_config(self) -> dict[str, Any]:
        """Returns the keys of Keras' class, and the arguments of kmp that differ from their defaults."""
        config = super().get_config() | {"initial_scale": self.rule.initial_scale}
        if self.jit_compile:
            config["jit_compile"] = True
        if isinstance(self.rule, scaling.FixedScale):
            return config | {"loss_scale": self.rule.initial_scale}
        config["dynamic_growth_steps"] = self.rule.growth_interval
        ours = ("growth_factor", "backoff_factor", "hysteresis", "min_scale", "max_scale")
        return config | {k: v for k in ours if (v := getattr(self.rule, k)) != getattr(_DEFAULT, k)}

    def _applied_scale(self) -> Any:
        return mark_scale(self._bounded_scale(LARGEST_APPLIED_SCALE))

    def _scaling_of(self, grads: Sequence[Any], variables: Sequence[Any], unscaled: bool | None = None) -> Scaling:
        if unscaled is not None:
            return Scaling.UNSCALED if validation.boolean("unscaled", unscaled) else Scaling.SCALED
        if self.rule == scaling.FixedScale(1.0):
            return Scaling.SCALED
        return self.gradient_scaling.in_apply(grads, variables)

    def _variables_for(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None) -> list[Any]:
        check_no_pairs(grads)
        if not self.built and trainable_variables is None:
            raise ValueError("The optimizer is not built. Pass `trainable_variables`, or call `build` first.")
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        check_gradients(grads, variables)
        return variables

    def _build_sampler(self) -> None:
        assert self.sampler is not None
        with self._distribution_strategy.scope():
            self.sampler.build(self.paths, self.rule.keeps_powers_of_two)

    def _compiles_step(self) -> bool:
        """Whether the optimizer compiles its step. Under a strategy it cannot: replicas synchronize inside the step."""
        return self.jit_compile and not tf.distribute.has_strategy()

    def _bounded_scale(self, highest: float = scaling.LARGEST_SCALE) -> Any:
        """Returns the scale within the rule's bounds; a file or the user may have written any value to the variable."""
        if not self.built:
            return ops.convert_to_tensor(min(self.rule.initial_scale, highest))
        return self.rule.bounded(self.scale_variable, highest)

    def _index(self, variable: Any) -> int:
        try:
            return self._get_variable_index(variable)  # Keras has no public method for it
        except KeyError:
            raise ValueError(
                f"Unknown variable: {variable}. The optimizer was built on other variables. "
                "Create a new optimizer for a new set of variables."
            ) from None
