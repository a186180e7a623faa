"""The loss scale optimizer: scale, measure, agree, apply or skip, adapt, count."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from kmp import scaling, statistics
from kmp._counters import Counters, Sampler
from kmp.records import Snapshot

_DEFAULT = scaling.DynamicScale()


@keras.saving.register_keras_serializable(package="kmp")
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """An optimizer that scales the loss, skips steps that overflow, and tells what it did.

    float16 flushes gradients below 2^-24 to zero. Multiplying the loss by a large number, the loss scale, lifts all of
    them; they are divided by it again before the update. A step whose loss or gradients are not finite is skipped: it
    leaves every weight and every variable of the inner optimizer as it was.

    Used in `model.compile`, or in a custom loop with `scale_loss`, then `apply`. Sources: see
    `kmp.scaling.DynamicScale`.

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
            float32.
        loss_scale: `"dynamic"`, the default, or 0 for the same; or a float from 2^-126 to 2^127, a scale that never
            moves.
        **kwargs: What `keras.optimizers.LossScaleOptimizer` accepts for the sake of old files.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If an argument is outside its range; the message names the argument, the value and the range.

    Example:
    >>> optimizer = LossScaleOptimizer("sgd", initial_scale=1024.0, growth_interval=500)
    >>> weight = keras.Variable([1.0, 2.0])
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
        **kwargs: Any,
    ) -> None:
        settings: scaling.LossScaleSettings = {
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
        rule = scaling.make_rule(**settings)
        interval = getattr(rule, "growth_interval", _DEFAULT.growth_interval)
        super().__init__(_bare(inner_optimizer), rule.initial_scale, interval, name, **kwargs)
        self.rule = rule
        self.counters = Counters()
        # A sum over replicas of what each saw in its own forward pass since the last `apply`.
        self._bad_losses = keras.Variable(
            0.0, trainable=False, dtype="float32", name="bad_losses", aggregation="sum", synchronization="on_read"
        )
        self.sampler: Sampler | None = None

    def build(self, var_list: Sequence[Any]) -> None:
        """Creates the scale, the counters and the inner optimizer's variables."""
        super().build(var_list)
        self.counters.build_for(len(var_list))

    def scale_loss(self, loss: Any) -> Any:
        """Returns the loss times the loss scale, to differentiate in place of the loss.

        Args:
            loss: Scalar or tensor of any float dtype; taken up to float32 first.

        Returns:
            A float32 tensor of the same shape.
        """
        loss = ops.cast(loss, "float32")
        self._bad_losses.assign_add(statistics.nonfinite(loss))
        return ops.multiply(loss, self.dynamic_scale if self.built else self.initial_scale)

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Applies loss-scaled gradients, or skips the step if the loss or one of them is not finite.

        Args:
            grads: Loss-scaled gradients: tensors, `tf.IndexedSlices` or `None`, one for each variable.
            trainable_variables: The variables, unless the optimizer is built already.
        """
        grads, variables = list(grads), self._variables_for(grads, trainable_variables)
        if not grads:
            return
        flags, bad_losses = self._agree(*self._measure(grads, variables))
        if tf.distribute.in_cross_replica_context():
            raise ValueError("`apply` must be called in a replica context, as in `strategy.run(step)`.")
        if self._needs_merge_call():
            context = tf.distribute.get_replica_context()
            context.merge_call(self._finish_across_replicas, args=(grads, variables, flags, bad_losses))
        else:
            self._finish(self._update_or_skip, grads, variables, flags, bad_losses)

    def snapshot(self) -> Snapshot:
        """Reads scale, counts and the last sampled histogram from the device.

        Returns:
            A `kmp.records.Snapshot`. Before the first step it holds the initial scale and zeros.
        """
        counters = self.counters
        return Snapshot(
            step=_integer(counters.steps),
            loss_scale=float(self.dynamic_scale.numpy()) if self.built else self.initial_scale,
            clean_steps=_integer(self.step_counter) if self.built else 0,
            overflow_count=_integer(counters.overflows),
            overflows_in_a_row=_integer(counters.overflows_in_a_row),
            nonfinite_loss_count=_integer(counters.nonfinite_losses),
            overflows_by_variable=self._overflows_by_variable(),
            histogram=self.sampler.read() if self.sampler else None,
        )

    def start_sampling(self, every_n_steps: int) -> bool:
        """Has the compiled step sample gradient histograms: the next step, and each that `every_n_steps` divides.

        Returns:
            Whether this is the first time: then what was traced before has to be traced anew. (Keras:
            `model.make_train_function(force=True)`.)
        """
        is_first = self.sampler is None
        self.sampler = self.sampler or Sampler()
        self.sampler.start(every_n_steps, first=_integer(self.counters.steps) + 1)
        return is_first

    def stop_sampling(self) -> None:
        """Samples no more histograms until `start_sampling` is called again; nothing has to be traced anew."""
        if self.sampler:
            self.sampler.stop()

    def get_config(self) -> dict[str, Any]:
        """Returns Keras' four keys, and those of kmp's arguments that differ from their defaults."""
        config = super().get_config()
        if isinstance(self.rule, scaling.FixedScale):
            return config | {"loss_scale": self.rule.initial_scale}
        ours = ("growth_factor", "backoff_factor", "hysteresis", "min_scale", "max_scale")
        return config | {k: v for k in ours if (v := getattr(self.rule, k)) != getattr(_DEFAULT, k)}

    def _variables_for(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None) -> list[Any]:
        if not self.built and trainable_variables is None:
            raise ValueError("The optimizer is not built. Pass `trainable_variables`, or call `build` first.")
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        if len(grads) != len(variables):
            raise ValueError(f"There must be a gradient for each variable. Received: {len(grads)} for {len(variables)}")
        if grads and not self.built:
            self.build(variables)
        return variables

    def _measure(self, grads: list[Any], variables: list[Any]) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns float32 flags, one for each variable the optimizer was built on, and the count of bad losses."""
        flags = [tf.zeros([])] * len(self._trainable_variables)
        for grad, variable in zip(grads, variables, strict=True):
            if grad is not None:
                flags[self._index(variable)] = statistics.nonfinite(grad)
        return tf.stack(flags), tf.convert_to_tensor(self._bad_losses.value)

    def _agree(self, flags: tf.Tensor, bad_losses: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Sums the flags of all replicas and workers, so that everyone takes the same decision."""
        context = tf.distribute.get_replica_context()
        if context is None or context.num_replicas_in_sync == 1:
            return flags, bad_losses
        return tuple(context.all_reduce(tf.distribute.ReduceOp.SUM, [flags, bad_losses]))

    def _finish(self, update_or_skip: Any, grads: Any, variables: Any, flags: Any, bad_losses: Any) -> None:
        """The rest of the step, once all replicas know the same flags."""
        loss_was_finite = ops.equal(bad_losses, 0.0)
        overflowed = ops.logical_or(ops.any(flags > 0), ops.logical_not(loss_was_finite))
        if self.sampler:
            self.sampler.sample(grads, self.dynamic_scale.value, self.counters.steps + 1)
        update_or_skip(overflowed, grads, variables)
        in_a_row = self._adapt(scaling.StepOutcome(overflowed, loss_was_finite))
        self.counters.count(overflowed, loss_was_finite, in_a_row, flags > 0)
        self._bad_losses.assign(0.0)

    def _update_or_skip(self, overflowed: Any, grads: list[Any], variables: list[Any]) -> None:
        ops.cond(overflowed, lambda: None, lambda: self._update(grads, variables))

    def _update(self, grads: list[Any], variables: list[Any]) -> None:
        unscaled = [self._unscale(g, v) for g, v in zip(grads, variables, strict=True)]
        self.inner_optimizer.apply(unscaled, variables)

    def _unscale(self, grad: Any, variable: Any) -> Any:
        if grad is None or self._overwrite_variable_with_gradient(variable):
            return grad
        if isinstance(grad, tf.IndexedSlices):
            values = ops.divide(grad.values, self.dynamic_scale)
            return tf.IndexedSlices(values, grad.indices, grad.dense_shape)
        return ops.divide(grad, self.dynamic_scale)

    def _adapt(self, outcome: scaling.StepOutcome) -> Any:
        state = scaling.ScaleState(*map(ops.copy, self._scale_variables()))
        scale, clean_steps, in_a_row = self.rule.update(state, outcome)
        self.dynamic_scale.assign(scale)
        self.step_counter.assign(clean_steps)
        return in_a_row

    def _scale_variables(self) -> scaling.ScaleState:
        return scaling.ScaleState(self.dynamic_scale, self.step_counter, self.counters.overflows_in_a_row)

    def _index(self, variable: Any) -> int:
        try:
            return self._get_variable_index(variable)
        except KeyError:
            raise ValueError(
                f"Unknown variable: {variable}. The optimizer was built on other variables; "
                "a new set of variables needs a new optimizer."
            ) from None

    def _overflows_by_variable(self) -> dict[str, int]:
        counts = self.counters.overflows_by_variable
        if counts is None:
            return {}
        named = zip(self._trainable_variables, np.asarray(counts.numpy()).tolist(), strict=True)
        return {getattr(variable, "path", variable.name): count for variable, count in named if count}

    def _needs_merge_call(self) -> bool:
        # No public name: a strategy such as MirroredStrategy updates variables only from its cross-replica context.
        return not tf.__internal__.distribute.strategy_supports_no_merge_call()

    def _finish_across_replicas(self, strategy: Any, grads: Any, variables: Any, flags: Any, bad_losses: Any) -> None:
        # A branch around `merge_call` fails in a replica context, so the branch is taken here, around all replicas.
        def update_or_skip(overflowed: Any, grads: Any, variables: Any) -> None:
            def update() -> None:
                strategy.extended.call_for_each_replica(self._update, args=(grads, variables))

            ops.cond(overflowed, lambda: None, update)

        first = [strategy.experimental_local_results(value)[0] for value in (flags, bad_losses)]
        self._finish(update_or_skip, grads, variables, *first)


def _bare(optimizer: Any) -> keras.optimizers.Optimizer:
    found = keras.optimizers.get(optimizer) if isinstance(optimizer, str) else optimizer
    if isinstance(found, keras.optimizers.LossScaleOptimizer):
        raise TypeError(
            "`inner_optimizer` scales the loss already; it would be scaled twice. "
            f"Received: inner_optimizer={optimizer!r}"
        )
    if not isinstance(found, keras.optimizers.Optimizer):
        raise TypeError(
            "`inner_optimizer` must be a keras.optimizers.Optimizer or the name of one. "
            f"Received: inner_optimizer={optimizer!r} (of type {type(optimizer).__name__})"
        )
    return found


def _integer(variable: keras.Variable) -> int:
    return int(variable.numpy())
