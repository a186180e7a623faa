"""Measures the training step of a user's model in each precision, in graph mode and with XLA."""

import contextlib
import gc
import itertools
import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from kmp.backend.global_state import global_state_restored
from kmp.backend.jit_support import jit_obstacle, request
from kmp.backend.keras_internals import sublayers
from kmp.backend.xla import traced_for_gpu
from kmp.conversion.step_traffic import traffic_by_class
from kmp.conversion.tensor_cores import unaligned_dimensions, uses_tensor_cores
from kmp.enabling import enable, gpus
from kmp.traffic import Traffic
from kmp.utils import user_messages, validation
from kmp.utils.float_formats import FLOAT32
from kmp_bench.fit_timer import Blocks, time_fit
from kmp_bench.limits import limit_of
from kmp_bench.measurement import (
    MODES,
    MeasurementError,
    alternate,
    memory_in_use,
    seconds_per_call,
    xla_error,
)
from kmp_bench.model_variants import POLICIES, ModelFunction, as_dataset, source_of
from kmp_bench.step_comparison import GRAPH, XLA, Device, Step, StepComparison

_TURN = 0.5  # seconds
# Of a data set: the first ones fill its buffers, and the others take at most so many seconds.
_FIRST_BATCHES, _BATCHES = 2, 50
_DATA_SECONDS = 5.0
_ON_A_CPU = "The times are those of the CPU, which emulates float16. Memory is not measured there."
_UNSUPPORTED = re.compile(r"unsupported operations.*?_JIT: (\w+)", re.DOTALL)


def compare(
    model: keras.Model | ModelFunction,
    batch: Any = None,
    *,
    batch_size: int | None = None,
    steps: int = 20,
    rounds: int = 5,
) -> StepComparison:
    """Measures the training step of a model in each precision, and says what limits it.

    Trains in float32, mixed_float16 and mixed_bfloat16, in graph mode and with XLA, as a model does
    that is built and compiled under `kmp.enable`. The variants take turns, so that other load slows
    all of them. What a step moves in graph mode on a GPU is counted, also without one. On a CPU,
    which emulates float16, the times say nothing about a GPU, and the sentence does not use them.

    A model is copied for each precision with `kmp.to_float32` and `kmp.convert`, so it does not
    train. Neither the random numbers of the program change, nor its dtype policy, nor the names of
    later layers. Three copies are in memory at once, with their optimizers.

    Args:
        model: A compiled model; or a function without arguments that returns such a model and a
            batch. The function is called once under `kmp.enable(policy)` for each policy. It is the
            way for a model that overrides `compile`, or that no config rebuilds.
        batch: A batch as `train_on_batch` takes it: `x`, `(x, y)` or `(x, y, sample_weight)`; or a
            `tf.data.Dataset`, of which the first batch is trained on, and the time that it takes
            for a batch is measured, too. `None` for random numbers with the shapes of the model's
            inputs and of the targets of its loss.
        batch_size: The number of examples of a batch that is made.
        steps: The most steps in one turn; a turn of slow steps has fewer.
        rounds: The number of turns.

    Returns:
        A `StepComparison`, which displays as tables. Its `limit` is the sentence, `to_dict()` has
        the numbers.

    Raises:
        TypeError: If `model` is neither a model nor a function without arguments.
        ValueError: If the model is not built or not compiled, computes in float64, or cannot be
            copied; if no batch can be made for it; if the function returns something else; or if
            `steps` or `rounds` is not positive.
        MeasurementError: If the model does not train in float32.

    Example:
    >>> import keras, kmp_bench
    >>> dense = [keras.layers.Dense(8), keras.layers.Dense(8)]
    >>> model = keras.Sequential([keras.Input((8,)), *dense])
    >>> model.compile("adam", "mse")
    >>> compared = kmp_bench.compare(model, steps=1, rounds=1)
    >>> [(step.policy, step.mode) for step in compared.steps if step.seconds][:3]
    [('float32', 'graph'), ('float32', 'XLA'), ('mixed_float16', 'graph')]
    """
    steps = validation.positive_integer("steps", steps)
    rounds = validation.positive_integer("rounds", rounds)
    source = source_of(model, batch, batch_size)
    with _quiet(), global_state_restored():
        comparison = _measured(_prepared_models(source.build), steps, rounds)
    gc.collect()  # Keras' models are reference cycles
    comparison = replace(comparison, notes=(*source.notes, *comparison.notes))
    return replace(comparison, limit=limit_of(comparison))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hides what is about a choice of the user: the policy here is none."""
    loggers = {logging.getLogger("kmp"): logging.ERROR, tf.get_logger(): logging.ERROR}
    levels = {logger: logger.level for logger in loggers}
    for logger, level in loggers.items():
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


class _PreparedModel(NamedTuple):
    """A model in one precision, and what it trains on."""

    policy: str
    model: keras.Model
    batch: Any
    data: tf.data.Dataset


class _Trainer:
    """Trains a model in one mode, in turns with others.

    Attributes:
        error: Why it does not train; empty if it does.
    """

    def __init__(self, prepared: _PreparedModel, mode: str, most_steps: int) -> None:
        self.prepared, self.mode, self._function = prepared, mode, None
        self._blocks = Blocks(warm_up=1, count=1, steps=1)
        self.error = ""
        if MODES[mode]:
            obstacle = jit_obstacle(prepared.model)
            self.error = f"off, {obstacle}" if obstacle else xla_error() or ""
        if self.error:
            return
        try:
            seconds, _ = self.turn()  # the step before it is traced and compiled
        except Exception as error:  # the user's code may raise anything
            self.error = f"{type(error).__name__}: {user_messages.one_line(error)}"
            unsupported = _UNSUPPORTED.search(str(error))  # an operation that XLA lacks
            if unsupported:
                self.error = f"it does not support {unsupported[1]}"
            return
        steps = min(max(int(_TURN / seconds), 1), most_steps)
        self._blocks = Blocks(warm_up=int(seconds < _TURN), count=1, steps=steps)

    def turn(self) -> tuple[float, int | None]:
        """Continues the training; returns the seconds of a step, and on a GPU its memory."""
        model = self.prepared.model
        model.train_function = self._function
        request(model, MODES[self.mode])
        before = memory_in_use()
        with enable(self.prepared.policy):
            times = time_fit(model, self.prepared.data, self._blocks)
        self._function = model.train_function
        if before is None:
            return times.seconds[0], None
        of_optimizer = getattr(model.optimizer, "variables", ())  # it may have several of its own
        variables = (*model.variables, *of_optimizer)
        own = sum(math.prod(each.shape) * tf.as_dtype(each.dtype).size for each in variables)
        return times.seconds[0], times.peak_memory - before + own


def _prepared_models(build: Callable[[str], tuple[keras.Model, Any]]) -> list[_PreparedModel]:
    """Returns the model in each precision.

    Raises:
        ValueError: If training one would change another one, or what the program has.
    """
    models: list[_PreparedModel] = []
    seen: set[int] = set()
    for policy in POLICIES:
        # Each begins with the same random numbers and names of layers.
        with enable(policy), global_state_restored():
            model, batch = build(policy)
        variables = set(map(id, model.variables))
        if seen & variables:
            raise ValueError(
                "The function returned models that share variables. It must create all layers in"
                " each call: its models are trained."
            )
        seen |= variables
        models.append(_PreparedModel(policy, model, batch, as_dataset(batch)))
    return models


def _measured(models: Sequence[_PreparedModel], most_steps: int, rounds: int) -> StepComparison:
    model, batch = models[0].model, models[0].batch
    runs_eagerly, is_compiled = bool(model.run_eagerly), bool(model.jit_compile)  # by the user
    device = _device()  # before the steps need memory
    for prepared in models:
        prepared.model.run_eagerly, prepared.model.steps_per_execution = False, 1
    trainers = []
    for prepared in models:
        trainers += [_Trainer(prepared, mode, most_steps) for mode in MODES]
        if trainers[0].error:
            raise MeasurementError(f"The model does not train in float32. {trainers[0].error}")
    trained = {each: each.turn for each in trainers if not each.error}
    steps = _steps(trainers, alternate(trained, rounds))
    matrices, unaligned = _dimensions(models[1].model)
    has_data = isinstance(batch, tf.data.Dataset)
    specs = keras.tree.flatten(models[0].data.element_spec)
    tensors = [f"{' x '.join(map(str, each.shape))} {each.dtype.name}" for each in specs]
    return StepComparison(
        model=model.name,
        batch=", ".join(tensors),
        steps=steps,
        device=device,
        xla_off=_why_without_xla(model, is_compiled, steps),
        runs_eagerly=runs_eagerly,
        tensor_core_layers=matrices,
        unaligned=unaligned,
        data_seconds=_seconds_per_batch(batch) if has_data else None,
        notes=() if gpus() else (_ON_A_CPU,),
    )


def _steps(
    trainers: Sequence[_Trainer], turns: Mapping[_Trainer, Sequence[tuple[float, int | None]]]
) -> tuple[Step, ...]:
    """Returns what was measured of each, and counted of those in graph mode."""
    steps = []
    for trainer in trainers:
        seconds, memory = [], []
        for of_step, peak in turns.get(trainer, ()):
            seconds.append(of_step)
            memory += [] if peak is None else [peak]
        step = Step(
            trainer.prepared.policy,
            trainer.mode,
            tuple(seconds),
            max(memory, default=None),
            _traffic(trainer.prepared) if trainer.mode == GRAPH and seconds else None,
            trainer.error,
        )
        steps.append(step)
    return tuple(steps)


def _traffic(prepared: _PreparedModel) -> Traffic | None:
    """Returns what a training step would cost on a GPU in graph mode; `None` if none is traced."""
    model, spec = prepared.model, prepared.data.element_spec
    request(model, False)

    def step(data: Any) -> Any:
        with traced_for_gpu():  # in the thread of a replica
            return model.train_step(data)

    try:
        with enable(prepared.policy), traced_for_gpu():
            return traffic_by_class(model, step, spec, on_replicas=True)
    except Exception:  # the user's code may raise anything, and the times are known without
        return None


def _dimensions(model: keras.Model) -> tuple[int, dict[str, tuple[str, ...]]]:
    """Returns the number of layers with matrix products, and the dimensions that slow them."""
    layers = [layer for layer in sublayers(model) if uses_tensor_cores(layer)]
    in_16_bits = [layer for layer in layers if layer.compute_dtype != FLOAT32.name]
    unaligned = {
        layer.path or layer.name: tuple(unaligned_dimensions(layer)) for layer in in_16_bits
    }
    return len(layers), {path: sizes for path, sizes in unaligned.items() if sizes}


def _why_without_xla(model: keras.Model, is_compiled: bool, steps: Sequence[Step]) -> str:
    """Returns why Keras trains a model without XLA on a GPU; empty if it compiles it.

    Args:
        model: The model.
        is_compiled: Whether its `jit_compile` was true.
        steps: What was measured.
    """
    obstacle = jit_obstacle(model)
    if obstacle:
        return obstacle
    errors = [step.error for step in steps if step.mode == XLA and step.policy == FLOAT32.name]
    if errors[0]:
        return errors[0]
    # Without a GPU, "auto" becomes False too.
    return "it is compiled with jit_compile=False" if gpus() and not is_compiled else ""


def _seconds_per_batch(data: tf.data.Dataset) -> float | None:
    """Returns the seconds that a data set takes for a batch, after the first ones."""
    batches = iter(data)
    begin, count = None, 0
    for _ in itertools.islice(batches, _FIRST_BATCHES, _BATCHES):
        now = time.perf_counter()
        begin = now if begin is None else begin
        count += 1
        if now - begin > _DATA_SECONDS:
            break
    return (time.perf_counter() - begin) / (count - 1) if begin is not None and count > 1 else None


def _device() -> Device:
    """Returns the GPU, and how long it takes to launch a kernel and to move bytes."""
    gpu = next(iter(gpus()), None)
    if gpu is None:
        return Device()
    kernels, elements = 1000, 2**26

    @tf.function(autograph=False)
    def chain(x: tf.Tensor, length: int) -> tf.Tensor:
        for _ in range(length):
            x = tf.tanh(x)
        return x

    def seconds(x: tf.Tensor, length: int) -> float:
        def run() -> None:
            chain(x, length)
            tf.test.experimental.sync_devices()  # a GPU runs asynchronously

        run()
        return min(seconds_per_call(run) for _ in range(3)) / length

    moved = 2 * 4 * elements  # reads and writes float32
    return Device(
        gpu=gpu.name,
        has_tensor_cores=gpu.tensor_cores,
        launch_seconds=seconds(tf.ones(8), kernels),
        bytes_per_second=moved / seconds(tf.ones(elements), 20),
    )
