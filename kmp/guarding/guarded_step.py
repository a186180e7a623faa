"""A model's `train_step` under a guard, which `fit` calls in its place."""

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import keras
import tensorflow as tf

from kmp.backend import keras_internals
from kmp.backend.jit_support import compiles_passes
from kmp.backend.keras_internals import has_float8_gradients, sublayers
from kmp.backend.promotion import Place, promotions_recorded
from kmp.backend.step_graph import StepGraph, recording
from kmp.gradients.step_facts import facts_of
from kmp.guarding.compiled_passes import NotCompilable, run_compiled
from kmp.guarding.finite_metrics import FiniteMetrics
from kmp.guarding.guarded_state import GuardedState, compiles_steps
from kmp.guarding.model_optimizers import optimizers_of
from kmp.layers.layer_calls import outermost_calls
from kmp.optimizer import LossScaleOptimizer
from kmp.records.step_facts import StepFacts

if TYPE_CHECKING:
    from kmp.replay import BatchCapture, KeptBatches

logger = logging.getLogger("kmp")

_MOST_GRAPHS = 4
_WITHOUT_XLA = "XLA does not compile the passes of each replica, which run as a graph: %s."


def guard_train_step(model: keras.Model) -> bool:
    """Guards the `train_step` of a model, and returns whether it was not guarded before.

    The train function must be rebuilt then.
    """
    if guarded_step_of(model):
        return False
    model.train_step = GuardedTrainStep(model).train_step
    return True


def guarded_step_of(model: keras.Model) -> "GuardedTrainStep | None":
    """Returns a model's guarded training step; `None` if there is none, or it was replaced."""
    step = getattr(model.train_step, "__self__", None)
    return step if isinstance(step, GuardedTrainStep) else None


def has_keras_step(model: keras.Model) -> bool:
    """Whether a model trains with the training step of Keras, not with one of its own."""
    step = guarded_step_of(model)
    own_step = step.own_step if step else vars(model).get("train_step")
    module = getattr(type(model).train_step, "__module__", "")  # a `partial` has none
    return own_step is None and str(module).startswith("keras.")


def trained_optimizers(model: keras.Model) -> dict[str, LossScaleOptimizer]:
    """Returns the `LossScaleOptimizer`s that the training step of a model uses, by name.

    Keras' own step uses the one that the model is compiled with. One of the user's may use those in
    attributes; one that `compile` created because it got none is not used then.
    """
    found = optimizers_of(model)
    if has_keras_step(model):
        return {name: each for name, each in found.items() if each is model.optimizer}
    chosen = {name: each for name, each in found.items() if each.is_passed or each.built}
    return chosen or found


def is_built(model: keras.Model) -> bool:
    """Whether a model and all its layers are built."""
    return all(layer.built for layer in sublayers(model))


class Repair(NamedTuple):
    """Layers of a model that a callback has set to float32.

    Attributes:
        layers: Their paths.
        reason: What float16 does in them, as a sentence.
    """

    layers: tuple[str, ...]
    reason: str


class GuardedTrainStep:
    """The `train_step` of a model, its own or Keras', under a guard.

    A skipped step leaves the state of the model's layers unchanged. A batch whose loss is not
    finite is excluded from the model's metrics; the `logs` of that step still contain the NaN, for
    `TerminateOnNaN`. A `train_step` that does not scale its loss raises an error. While the model
    has no `kmp.LossScaleOptimizer`, the guard has no effect.

    Attributes:
        own_step: The `train_step` that was set on the model itself, not on its class, or `None`.
        captures: Each finds a batch for a callback, by optimizer; used from the next trace on.
        kept: The last batches of `fit`, if there are captures.
        has_run: Whether `fit` has called it, so that no other loop trains the model.
        repairs: The repairs of the model, which each callback of a training records.
        assigned: The weights to which the step itself assigned values, such as averages of others.
        promoted: The lines of the user's code whose operands the last trace promoted to float32.
        beside: The layers beside the model that its step calls, as in the loss; of the last trace
            of `fit` or of a loop.
        graphs: The graphs of the last traces for batches of different structures, the newest first:
            of `fit` under `None`, of a custom loop under `kmp.guard` by its optimizer.
        has_repaired_layers: Whether a repair, of this model or of another one, has set some of its
            layers to float32.
    """

    def __init__(self, model: keras.Model) -> None:
        self.own_step = vars(model).get("train_step")
        self.captures: list[BatchCapture] = []
        self.kept: KeptBatches | None = None
        self.has_run = False
        self.repairs: list[Repair] = []
        self.has_repaired_layers = False
        self.beside: list[keras.Layer] = []
        self.promoted: list[Place] = []
        self.assigned: list[keras.Variable] = []
        self.graphs: dict[LossScaleOptimizer | None, list[StepGraph]] = {None: []}
        self._model = model
        self._metrics = FiniteMetrics(model)
        self._xla_obstacle = ""

    def begin_execution(self, iterator: Any, is_first: bool) -> None:
        """Prepares a call of the train function, the first of which traces it."""
        spec = getattr(iterator, "element_spec", None)
        if is_first:
            self._xla_obstacle = ""
            self._create_variables(spec)
        if len(self.graphs) > 1:  # a loop trained the model before
            self.graphs = {None: self.graphs[None]}
            for capture in self.captures:
                capture.is_of_loop = False
        if self.kept:
            self.kept.bound_memory()
        self._metrics.begin_execution()

    def _create_variables(self, batch_spec: Any) -> None:
        """Creates the variables of a step, which TensorFlow would trace twice to create them.

        It creates none where another step than that of Keras trains, or layers are not built: what
        the step will create is not known then.
        """
        model, optimizer = self._model, self._model.optimizer
        if not isinstance(optimizer, LossScaleOptimizer) or not has_keras_step(model):
            return
        if not is_built(model) or not model.trainable_weights:
            return
        if not optimizer.built:
            with model.distribute_strategy.scope():
                optimizer.build(model.trainable_weights)
        if batch_spec is not None:
            keras_internals.build_metrics(model, batch_spec)

    def train_step(self, data: Any) -> Any:
        """Runs the model's training step on a batch, and returns its logs."""
        named = optimizers_of(self._model)
        if not named:
            return self._run(data)
        optimizers = list(named.values())
        parts = tf.nest.flatten(data, expand_composites=True)
        batch = [part for part in parts if isinstance(part, tf.Tensor)]
        metrics_before = self._metrics.begin_step(batch, compiles_steps(optimizers))
        is_empty = _has_no_rows(data, batch)
        for name, optimizer in named.items():
            optimizer.step_monitor.begin_train_step(is_empty, f"self.{name}")

        state = GuardedState([self._model], optimizers)
        with state.changes_recorded():
            logs = self._run(data)
        result = state.restore_if_skipped()
        self.assigned = state.assigned

        is_nonfinite = result.has_nonfinite_loss
        self._metrics.end_step(metrics_before, is_nonfinite, compiles_steps(optimizers))
        return self._metrics.with_loss_of_execution(logs, is_nonfinite)

    def capture_of(self, optimizer: LossScaleOptimizer) -> "BatchCapture | None":
        """Returns what keeps batches of the steps of an optimizer, if a callback has set it."""
        found = (each for each in self.captures if each.optimizer is optimizer)
        return next(found, None)

    def facts_of(self, optimizer: LossScaleOptimizer) -> StepFacts | None:
        """Returns what the graph of the step says of the loss and the gradients of an optimizer.

        Returns `None` if that is not known, as in eager mode.
        """
        graphs = self.graphs_of(optimizer)
        if not graphs or has_float8_gradients(self._model):
            return None  # gradients are scaled and clipped to float8 on purpose
        return facts_of(graphs[0], optimizer)

    def graphs_of(self, optimizer: LossScaleOptimizer) -> list[StepGraph]:
        """Returns the graphs of the steps in which an optimizer updates, the newest first.

        The list is empty if none is known, as in eager mode.
        """
        return self.graphs.get(optimizer, self.graphs[None])

    def graph_for(self, data: Any, optimizer: LossScaleOptimizer) -> StepGraph | None:
        """Returns the graph of the step for a batch; `None` if there is none."""
        return next((each for each in self.graphs_of(optimizer) if each.takes(data)), None)

    def keep_graph(self, graph: StepGraph, loop_of: LossScaleOptimizer | None = None) -> None:
        """Keeps the graph of a step that was traced, of `fit` or of the loop of an optimizer."""
        earlier = self.graphs.get(loop_of, [])
        others = [each for each in earlier if not each.takes(graph.data)]
        self.graphs[loop_of] = [graph, *others][:_MOST_GRAPHS]

    @property
    def all_graphs(self) -> list[StepGraph]:
        """All graphs that are kept."""
        return [graph for graphs in self.graphs.values() for graph in graphs]

    def forget_graphs(self) -> None:
        """Forgets the graphs, after which steps compute in other precisions."""
        self.graphs = {None: []}

    def add_capture(self, optimizer: LossScaleOptimizer) -> "BatchCapture":
        """Keeps batches for a callback, and drops what belongs to earlier optimizers."""
        # Only callbacks replay batches: a loop under `guard` alone does not load what does.
        from kmp.replay import BatchCapture, KeptBatches

        self.kept = self.kept or KeptBatches()
        is_custom = not has_keras_step(self._model)
        capture = BatchCapture(self._model, optimizer, self.kept, is_custom)
        trained = set(map(id, optimizers_of(self._model).values()))
        kept = [each for each in self.captures if id(each.optimizer) in trained]
        self.captures = [*kept, capture]
        for each in [each for each in self.graphs if each and id(each) not in trained]:
            del self.graphs[each]
        return capture

    def keeping(self, data: Any) -> contextlib.AbstractContextManager[None]:
        """Returns a context for a training step on a batch, which is kept if there are captures."""
        return self.kept.keeping(data) if self.captures and self.kept else contextlib.nullcontext()

    def _run(self, data: Any) -> Any:
        model = self._model
        step = self.own_step or functools.partial(type(model).train_step, model)
        self.has_run = True
        with (
            outermost_calls() as called,
            promotions_recorded() as promoted,
            contextlib.ExitStack() as stack,
        ):
            for capture in self.captures:
                stack.enter_context(capture.watch(data))
            logs = self._passed(functools.partial(self._recorded, step), data)
        self.promoted = list(promoted.values())
        self.note_layers(called)
        return logs

    def note_layers(self, called: Mapping[int, keras.Layer]) -> None:
        """Notes the layers that a step calls, by `id`."""
        own = set(map(id, sublayers(self._model)))
        self.beside = [layer for key, layer in called.items() if key not in own]

    def _recorded(self, step: Callable[[Any], Any], data: Any) -> Any:
        with recording(data) as graph:
            logs = step(data)
        if graph is None:
            self.graphs[None] = []
        elif found := graph.with_gradients:  # not if it calls a function that was traced before
            self.keep_graph(found)
        return logs

    def _passed(self, step: Callable[[Any], Any], data: Any) -> Any:
        """Runs a training step, as XLA compiles it on each replica if it can."""
        if self._xla_obstacle or not compiles_passes(self._model):
            return step(data)
        try:
            return run_compiled(step, data, sublayers(self._model))
        except NotCompilable as reason:
            self._xla_obstacle = str(reason)
        for name, optimizer in optimizers_of(self._model).items():
            optimizer.step_monitor.stage.begin_train_step(f"self.{name}")
        try:
            logs = step(data)
        except Exception:  # of the user's own code, raised here again: it was no obstacle
            self._xla_obstacle = ""
            raise
        logger.warning(_WITHOUT_XLA, self._xla_obstacle)
        return logs


def _has_no_rows(data: Any, tensors: list[tf.Tensor]) -> Any:
    """Returns a scalar bool, whether a batch has no rows; `None` if its shape says that it has.

    The loss of such a batch is a mean over nothing: NaN, or its gradients are.
    """
    if not tensors:
        return None
    # A sparse tensor, and rows of width 0, may have no elements in any batch.
    parts = [part for part in tf.nest.flatten(data) if isinstance(part, tf.Tensor)]
    with_rows = [part for part in parts if part.shape.rank and 0 not in part.shape[1:]]
    first = (with_rows or tensors)[0]
    if first.shape.num_elements():
        return None
    # The size is unknown, or 0 in eager mode.
    return tf.equal(tf.size(first), 0)
