"""Searches the fewest layers that have to compute in float32 for a sound pass."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import keras

from kmp.backend.keras_internals import computing_layers, layers_in_16_bits
from kmp.backend.layer_graph import previous_layers
from kmp.records.replay import LayerSearch
from kmp.replay.passes import Passes, PassResult

_MOST_LAYERS = 12
# Of the outputs of the model, where the loss may be what fails. It orders what a search tries, and
# what is tried decides, so it is no threshold of the diagnosis.
_SMALL_OUTPUT_ERROR = 0.05

Chosen = tuple[str, ...]
NewErrors = Callable[[], Mapping[str, float]]
IsSound = Callable[[PassResult], bool]


@dataclass(frozen=True)
class Choices:
    """What a search may choose from.

    Args:
        operations: The layers and operations of a graph by path, as in the marks of a pass.
        last_resort: The paths of those to try when nothing else is enough.
        most: How many to choose at most.
    """

    operations: Mapping[str, keras.Operation]
    last_resort: Sequence[str] = ()
    most: int = _MOST_LAYERS


def computing_choices(passes: Passes) -> Choices:
    """Returns the layers of a model, and beside it, that compute something themselves."""
    model = passes.model
    layers = computing_layers(model, passes.beside)
    # A model that computes outside of its layers, if it is small.
    is_small = len(layers_in_16_bits([model])) <= _MOST_LAYERS
    models = [path for path, layer in layers.items() if layer is model]
    return Choices(layers, last_resort=models if is_small else [])


def find_float32_layers(
    passes: Passes,
    is_sound: IsSound,
    exact: PassResult,
    choices: Choices,
    *,
    factor: float = 1.0,
    suspects: Sequence[str] = (),
    new_errors: NewErrors = dict,
) -> tuple[LayerSearch, PassResult | None]:
    """Returns layers with which a pass is sound if they compute in float32; and a watched pass.

    Args:
        passes: The passes.
        is_sound: Whether a pass in the precision of the model is sound.
        exact: The pass in float32.
        choices: What to choose from.
        factor: What to multiply the loss by.
        suspects: The paths of choices to try first.
        new_errors: Returns the error that each layer adds, by path, if soundness is a matter of
            errors. It is called if it is needed.

    Returns:
        The search, and the pass in the precision of the model, or `None` if that took too long.
        None of the layers is needless if the time was enough to try.
    """
    search = _Search(passes, is_sound, exact, choices, factor, suspects, new_errors)
    try:
        result = search.run(())
    except TimeoutError:
        return LayerSearch(is_found=False), None
    chosen = search.enough(result)
    if chosen is None:
        return LayerSearch(is_found=False), result
    needed = search.without_needless(chosen)
    return LayerSearch(is_found=True, layers=list(needed)), result


@dataclass
class _Search:
    """A search for layers. Its fields are the arguments of `find_float32_layers`."""

    passes: Passes
    is_sound: IsSound
    exact: PassResult
    choices: Choices
    factor: float
    suspects: Sequence[str]
    new_errors: NewErrors

    def __post_init__(self) -> None:
        model = self.passes.model
        operations = self.choices.operations
        self._parts = {path for path, each in operations.items() if each is not model}
        self._previous = previous_layers(model)

    def run(self, chosen: Chosen, *, watch: bool = True) -> PassResult:
        """Returns a pass with these layers in float32."""
        operations = [self.choices.operations[path] for path in chosen]
        return self.passes.in_own_precision(
            operations, factor=self.factor, watch=watch, reference=self.exact
        )

    def enough(self, result: PassResult) -> Chosen | None:
        """Returns layers that are enough, found one after the other.

        Returns `None` if none are, or if the time is not enough.
        """
        chosen: Chosen = ()
        with contextlib.suppress(TimeoutError):
            while not self.is_sound(result):
                path = next(self._to_try(chosen, result), None)
                if path is None or len(chosen) >= self.choices.most:
                    return None
                chosen = (*chosen, path)
                result = self.run(chosen)
            return chosen
        return None

    def without_needless(self, chosen: Chosen) -> Chosen:
        """Returns the layers without those that turn out to be needless."""
        with contextlib.suppress(TimeoutError):  # these are enough
            for path in chosen:
                rest = tuple(other for other in chosen if other != path)
                if self.is_sound(self.run(rest, watch=False)):
                    chosen = rest
        return chosen

    def _to_try(self, chosen: Chosen, result: PassResult) -> Iterator[str]:
        """Yields the candidates that are not chosen, and of each the layers that contain it."""
        tried = []
        for path in self._candidates(result):
            tried.append(path)
            yield from self._outwards(path, chosen)
        for path in tried:
            yield from self._outwards(_parent_of(path), chosen)
        yield from (path for path in self.choices.last_resort if path not in chosen)

    def _outwards(self, path: str, chosen: Chosen) -> Iterator[str]:
        while path in self._parts and path not in chosen:
            yield path
            path = _parent_of(path)

    def _candidates(self, result: PassResult) -> Iterator[str]:
        """Yields the layers that may have to compute in float32."""
        yield from self.suspects
        paths = [path for path in result.marks.called if path in self._parts]
        yield from _near_nonfinite_operations(result, paths)
        # If the outputs agree, what the loss does to them in their dtype.
        if result.marks.output_error <= _SMALL_OUTPUT_ERROR:
            yield from paths[-1:]
        yield from _with_new_errors(self.new_errors(), paths)
        yield from _where_errors_show(result, paths, self._previous)


def _parent_of(path: str) -> str:
    return path.rpartition("/")[0]


def _near_nonfinite_operations(result: PassResult, paths: Sequence[str]) -> Iterator[str]:
    """Yields the layers of operations with NaN or Inf, and their neighbors.

    An operation between two layers belongs to neither. It computes in the dtype of the layer that
    was called before; but a cast in the forward pass is of the layer that is called next.
    """
    index_of = {path: index for index, path in enumerate(paths)}
    called = list(result.marks.called)
    nonfinite = result.nonfinite
    for found, done in zip(nonfinite.found, nonfinite.layers_done, strict=True):
        index = index_of.get(found.layer, len(paths))
        next_one = sum(path in index_of for path in called[:done])
        neighbors = [next_one - 1, next_one]
        if found.is_backward:
            neighbors = [index - 1]
        elif found.operation == "Cast":
            neighbors = [next_one, next_one - 1]
        for at in (index, *neighbors):
            if 0 <= at < len(paths):
                yield paths[at]


def _with_new_errors(new_errors: Mapping[str, float], paths: Sequence[str]) -> Iterator[str]:
    """Yields the layers where a large error is born, the largest first."""
    added = {path: new_errors.get(path, 0.0) for path in paths}
    limit = max(added.values(), default=0.0) / 10
    for path in sorted(paths, key=added.__getitem__, reverse=True):
        if added[path] > limit:
            yield path


def _where_errors_show(
    result: PassResult, paths: Sequence[str], previous: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """Yields the layer where a large error first shows, those before it, and all before these.

    A rounded number may do no harm before another layer uses it, for example as an index.

    Args:
        result: The pass.
        paths: The layers that were called, in this order.
        previous: The layers before each, in a model with a graph.
    """
    errors = result.marks.errors
    limit = 0.5 * max(errors.values(), default=0.0)
    large = (index for index, path in enumerate(paths) if errors.get(path, 0.0) > limit)
    first = next(large, 0)
    if not paths or paths[first] not in previous:
        yield from paths[max(0, first - 1) : first + 1]
        return
    nearest = previous[paths[first]]
    yield from nearest
    yield paths[first]
    seen, waiting = {paths[first], *nearest}, [*nearest]
    while waiting:
        for path in previous.get(waiting.pop(0), ()):
            if path not in seen:
                seen.add(path)
                waiting.append(path)
                yield path
