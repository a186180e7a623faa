"""The loss scale optimizer: scale, measure, agree, apply or skip, adapt, count."""

from collections.abc import Sequence
from typing import Any, Protocol

import keras
import tensorflow as tf
from keras import ops

from kmp import scaling
from kmp.backend import distribution, keras_internals, register, xla
from kmp.backend import inner_optimizer as valid_inner_optimizer
from kmp.gradients import GradientSampler, extended_sampler, paths_of
from kmp.optimizer.apply_step import Step, by_index
from kmp.optimizer.inner_optimizer_state import InnerState
from kmp.optimizer.loss_monitor import LossMonitor
from kmp.optimizer.overflow_counters import OverflowCounters
from kmp.optimizer.overflow_origin import network_order
from kmp.optimizer.unscaling import divisor, multiplied
from kmp.records import Snapshot
from kmp.scaling import LossScaleSettings, make_rule
from kmp.utils import matching, user_messages, validation

_DEFAULT = scaling.DynamicScale()
_NO_ROOM_TO_COMPILE = (
    "`jit_compile=True` does nothing under a distribution strategy. Compile the model with `jit_compile=True` instead, "
    "where the strategy allows it."
)


class ActivationProbe(Protocol):
    """What finds the first non-finite activation of a forward pass, such as that of `kmp.callbacks.ForwardProbe`."""

    def read(self) -> str | None:
        """Returns its name, or `None` before the first one."""


@register
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """An optimizer that scales the loss, skips steps that overflow, and tells what it did.

    float16 flushes gradients of 2^-25 and less to zero. Multiplying the loss by a large number, the loss scale, lifts
    all of them; they are divided by it again before the update. A step whose loss or gradients are not finite is
    skipped: it leaves every weight and every variable of the inner optimizer as it was.

    Used in `model.compile`, or in a custom loop with `scale_loss`, then `apply`; in between `unscale`, where gradients
    are clipped by hand, or changed otherwise. Sources: see `kmp.scaling.DynamicScale`.

    Args:
        inner_optimizer: A `keras.optimizers.Optimizer`, or the name of one. Clipping, weight decay, EMA and gradient
            accumulation are set on it, and see unscaled gradients.
        initial_scale: Float, the loss scale of the first step, from `min_scale` to `max_scale`. Defaults to 2^15.
        growth_interval: Integer, at least 1: after so many steps without an overflow the scale grows. Defaults to 2000.
            Keras' `dynamic_growth_steps` is accepted as the same thing.
        name: Optional string.
        growth_factor: Float above 1, what the scale is multiplied by when it grows. Defaults to 2.
        backoff_factor: Float between 0 and 1, what it is multiplied by when it backs off. Defaults to 0.5.
        hysteresis: Integer, at least 1: overflows in a row before the scale backs off. Defaults to 1.
        min_scale: Float, the scale never falls below it. At least 2^-126. Defaults to 2^-14: below that, a loss of 1
            leaves float16's normal range.
        max_scale: Float, the scale never grows above it. At most 2^127, the default: the largest power of two in
            float32. A scale above 2^126 is applied as 2^126: the reciprocal of a larger one is subnormal.
        loss_scale: `"dynamic"`, the default, or 0 for the same; or a float from 2^-126 to 2^127, a scale that never
            moves.
        jit_compile: Whether `apply` is compiled with XLA where the step around it is not, as in a model compiled with
            `jit_compile=False`, or a loop run eagerly. As in a `tf.function`, what is no tensor is read once, such as a
            learning rate that is a callable, or what is set on the inner optimizer later; each new number of rows in a
            sparse gradient is compiled anew. A distribution strategy leaves no room for it. Defaults to `False`.
        **kwargs: What `keras.optimizers.LossScaleOptimizer` accepts for the sake of old files.

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
        initial_scale: float = _DEFAULT.initial_scale,
        growth_interval: int = _DEFAULT.growth_interval,
        name: str | None = None,
        *,
        growth_factor: float = _DEFAULT.growth_factor,
        backoff_factor: float = _DEFAULT.backoff_factor,
        hysteresis: int = _DEFAULT.hysteresis,
        min_scale: float = _DEFAULT.min_scale,
        max_scale: float = _DEFAULT.max_scale,
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
        if "dynamic_growth_steps" in kwargs:
            settings["dynamic_growth_steps"] = kwargs.pop("dynamic_growth_steps")
        rule = make_rule(**settings)
        interval = getattr(rule, "growth_interval", _DEFAULT.growth_interval)
        inner = valid_inner_optimizer("inner_optimizer", inner_optimizer)
        super().__init__(inner, rule.initial_scale, interval, name, **kwargs)
        self.rule = rule
        self.counters = OverflowCounters()
        self.inner_state = InnerState(inner)
        self.loss_monitor = LossMonitor()
        self.sampler: GradientSampler | None = None
        self.probe: ActivationProbe | None = None
        self.jit_compile = validation.boolean("jit_compile", jit_compile)
        self._compiler = xla.Compiler()
        self._order: list[int] = []

    def build(self, var_list: Sequence[Any]) -> None:
        """Creates the scale, the counters and the inner optimizer's variables."""
        if self.sampler:
            self.sampler.check(paths_of(var_list))
        super().build(var_list)
        self.counters.build_for(len(var_list))
        self._order = list(range(len(var_list)))
        if self.jit_compile and not self._compiles():
            user_messages.warn(_NO_ROOM_TO_COMPILE)
        if self.sampler:
            self._build_sampler()

    @tf.autograph.experimental.do_not_convert
    def scale_loss(self, loss: Any) -> Any:
        """Returns the loss times the loss scale, to differentiate in place of the loss.

        Args:
            loss: Scalar or tensor of any float dtype; taken up to float32 at least.

        Returns:
            A tensor of the same shape, in float32; in float64 for a float64 loss.
        """
        loss = ops.convert_to_tensor(loss)
        self.loss_monitor.note(loss)
        loss = ops.cast(loss, keras.backend.result_type(loss.dtype, "float32"))
        return ops.multiply(loss, ops.cast(self.loss_scale, loss.dtype))

    @property
    def loss_scale(self) -> Any:
        """What `scale_loss` multiplies by: scalar float32 tensor on the device."""
        return divisor(self._bounded_scale())

    @tf.autograph.experimental.do_not_convert
    def unscale(self, grads: Sequence[Any]) -> list[Any]:
        """Returns gradients without the loss scale, to look at or to change before `apply(..., unscaled=True)`.

        Args:
            grads: Loss-scaled gradients: tensors, `tf.IndexedSlices` or `None`.

        Returns:
            The same in float32 at least; inf and nan stay, for `apply` to see.
        """
        return multiplied(grads, 1.0 / self.loss_scale)

    @tf.autograph.experimental.do_not_convert
    def apply(
        self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None, *, unscaled: bool = False
    ) -> None:
        """Applies loss-scaled gradients, or skips the step if the loss or one of them is not finite.

        Args:
            grads: Loss-scaled gradients: tensors, `tf.IndexedSlices` or `None`, one for each variable.
            trainable_variables: The variables, unless the optimizer is built already.
            unscaled: Whether the gradients come from `unscale`.
        """
        grads, variables = list(grads), self._variables_for(grads, trainable_variables)
        if not grads:
            return
        if unscaled:
            grads = multiplied(grads, self.loss_scale)
        if not self.built:
            distribution.refuse_to_build_in_a_step()
            self.build(variables)
        if self.rule.initial_scale != 1.0:
            self.loss_monitor.warn_without_scale_loss()
        places = [self._index(variable) for variable in variables]
        self._order = network_order(by_index(grads, places, len(self._trainable_variables)))
        step = Step(self, self._trainable_variables, variables, places, self._order)
        if self._compiles():
            self._compiler.call((*places, id(keras_internals.learning_rate_of(self.inner_optimizer))), step.take, grads)
        else:
            step.take(grads)

    def snapshot(self) -> Snapshot:
        """Reads scale, counts and the last sample of gradients from the device.

        Returns:
            A `kmp.records.Snapshot`. Before the first step it holds the initial scale and zeros.
        """
        counts = self.counters.read(self.paths, self.loss_monitor.has_recorded)
        return Snapshot(
            loss_scale=float(self._bounded_scale()),
            clean_steps=int(self.step_counter.numpy()) if self.built else 0,
            sample=self.sampler.read(self._order, counts["step"]) if self.sampler else None,
            nonfinite_activation=self.probe.read() if self.probe else None,
            **counts,
        )

    def prepare_sampling(self, variables: str | Sequence[str] | None = None) -> bool:
        """Makes the steps that are traced from now on able to sample gradients.

        Args:
            variables: Paths of the variables to measure, or patterns (`*` and `?` as in a shell); all by default.

        Returns:
            Whether what was traced before has to be traced anew, because it cannot sample these. (Keras:
            `model.make_train_function(force=True)`.)

        Raises:
            ValueError: If a pattern matches no variable; from an optimizer that is not built yet, in its first step.
        """
        wanted, before = validation.patterns("variables", variables), self.sampler
        if self.built and wanted is not None:
            matching(wanted, self.paths)
        # Keras keeps the strategy that the optimizer was made under for itself; a sampler belongs to the same replicas.
        with self._distribution_strategy.scope():
            self.sampler = extended_sampler(before, wanted)
        if self.sampler is not before:
            self._compiler.forget()
            if self.built:
                self._build_sampler()
        return self.sampler is not before

    def start_sampling(self, owner: Any, every_n_steps: int) -> None:
        """Samples gradients in the next step, and in each that `every_n_steps` divides, until `stop_sampling`.

        Args:
            owner: Who asks, any object that can be referenced weakly.
            every_n_steps: Integer, at least 1.
        """
        every_n_steps = validation.positive_integer("every_n_steps", every_n_steps)
        if self.sampler is None:
            self.prepare_sampling()
        assert self.sampler is not None
        self.sampler.start(owner, every_n_steps, first=self.counters.read_steps() + 1)

    def stop_sampling(self, owner: Any) -> None:
        """Samples no more for `owner`; nothing has to be traced anew."""
        if self.sampler:
            self.sampler.stop(owner)

    @property
    def paths(self) -> list[str]:
        """Paths of the variables that the optimizer was built on, in its order; a second one of a path has a number."""
        return paths_of(self._trainable_variables) if self.built else []

    def variables_by_path(self) -> dict[str, Any]:
        """Returns the trained variables, from the input to the loss; none before the optimizer is built."""
        found = list(zip(self.paths, self._trainable_variables, strict=True)) if self.built else []
        return dict(found[place] for place in self._order[: len(found)])

    def get_config(self) -> dict[str, Any]:
        """Returns Keras' four keys, and those of kmp's arguments that differ from their defaults."""
        config = super().get_config() | {"initial_scale": self.rule.initial_scale}
        if self.jit_compile:
            config["jit_compile"] = True
        if isinstance(self.rule, scaling.FixedScale):
            return config | {"loss_scale": self.rule.initial_scale}
        config["dynamic_growth_steps"] = self.rule.growth_interval
        ours = ("growth_factor", "backoff_factor", "hysteresis", "min_scale", "max_scale")
        return config | {k: v for k in ours if (v := getattr(self.rule, k)) != getattr(_DEFAULT, k)}

    def _variables_for(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None) -> list[Any]:
        if not self.built and trainable_variables is None:
            raise ValueError("The optimizer is not built. Pass `trainable_variables`, or call `build` first.")
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        if len(grads) != len(variables):
            raise ValueError(f"There must be a gradient for each variable. Received: {len(grads)} for {len(variables)}")
        return variables

    def _build_sampler(self) -> None:
        assert self.sampler is not None
        with self._distribution_strategy.scope():
            self.sampler.build(self.paths, self.rule.keeps_powers_of_two)

    def _compiles(self) -> bool:
        """Whether it compiles its own step: replicas have to meet in the middle of one."""
        return self.jit_compile and not tf.distribute.has_strategy()

    def _bounded_scale(self) -> Any:
        """The scale in use: what a file or a user wrote into the variable, brought within the rule's bounds."""
        if not self.built:
            return ops.convert_to_tensor(self.rule.initial_scale)
        return self.rule.bounded(self.dynamic_scale)

    def _index(self, variable: Any) -> int:
        try:
            return self._get_variable_index(variable)  # Keras gives subclasses no other way to it
        except KeyError:
            raise ValueError(
                f"Unknown variable: {variable}. The optimizer was built on other variables; "
                "a new set of variables needs a new optimizer."
            ) from None
