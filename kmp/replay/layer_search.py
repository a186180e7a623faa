"""Searches the fewest layers that have to compute in float32 for a sound pass."""

import contextlib
from collections.abc import Callable, Container, Iterator, Sequence

import tensorflow as tf

from kmp.backend import computing_layers, layers_in_16_bits
from kmp.records import HARMFUL_OUTPUT_ERROR
from kmp.replay.eager_pass import Passes, PassResult

_MOST_LAYERS = 12


def find_float32_layers(
    passes: Passes,
    is_sound: Callable[[PassResult], bool],
    exact: PassResult,
    factor: float,
    suspects: Sequence[str] = (),
) -> tuple[list[str] | None, PassResult | None]:
    """Returns layers with which a pass is sound if they compute in float32; and a watched pass.

    Args:
        passes: The passes.
        is_sound: Whether a pass in the precision of the model is sound.
        exact: The pass in float32, with `new_errors`.
        factor: What to multiply the loss by.
        suspects: The paths of layers to try first.

    Returns:
        The paths, none of them needless if the time was enough to try; `None` if none were found.
        And the pass in the precision of the model.
    """
    own = None
    layers = computing_layers(passes.model)
    # A model that computes outside of its layers, if it is small, when nothing else is enough.
    last_resort = [path for path, layer in layers.items() if layer is passes.model]
    parts = layers.keys() - set(last_resort)
    if len(layers_in_16_bits([passes.model])) > _MOST_LAYERS:
        last_resort = []
    failed: set[str] = set()

    def run(paths: Sequence[str]) -> PassResult:
        chosen = [layers[path] for path in paths]
        return passes.in_own_precision(chosen, factor=factor, watch=True, reference=exact)

    def with_one_more(chosen: list[str], result: PassResult) -> tuple[list[str], PassResult] | None:
        candidates = [*suspects, *_candidates(result, exact, parts)]
        parents = [
            path.rpartition("/")[0] for path in candidates if path.rpartition("/")[0] in parts
        ]
        for candidate in (*candidates, *parents, *last_resort):
            # A layer or, if that fails, one that contains it: the user's code may add its float32
            # result to float16.
            path = candidate
            while path not in chosen and (path in parts or path == candidate in last_resort):
                if path not in failed:
                    try:
                        return [*chosen, path], run([*chosen, path])
                    except (ValueError, TypeError, tf.errors.InvalidArgumentError):
                        failed.add(path)
                path = path.rpartition("/")[0]
        return None

    try:
        chosen: list[str] = []
        result = own = run(chosen)
        while not is_sound(result):
            larger = with_one_more(chosen, result) if len(chosen) < _MOST_LAYERS else None
            if larger is None:
                return None, own
            chosen, result = larger
    except TimeoutError:
        return None, own
    with contextlib.suppress(
        TimeoutError, ValueError, TypeError, tf.errors.InvalidArgumentError
    ):  # these are enough
        for path in tuple(chosen):
            rest = [other for other in chosen if other != path]
            if is_sound(run(rest)):
                chosen = rest
    return chosen, own


def _candidates(result: PassResult, exact: PassResult, layers: Container[str]) -> Iterator[str]:
    """Yields the layers that may have to compute in float32, because of NaN and Inf or the errors of their outputs.

    An operation between two layers belongs to neither. It computes in the dtype of the layer that
    was called before; but a cast in the forward pass is of the layer that is called next.
    """
    paths = [path for path in result.marks.called if path in layers]
    index_of = {path: index for index, path in enumerate(paths)}
    for found, done in zip(result.nonfinite.found, result.nonfinite.layers_done, strict=True):
        index = index_of.get(found.layer, len(paths))
        next_one = sum(path in index_of for path in list(result.marks.called)[:done])
        neighbors = [index - 1] if found.is_backward else [next_one, next_one - 1]
        if found.operation != "Cast":
            neighbors.reverse()
        yield from (paths[at] for at in (index, *neighbors) if 0 <= at < len(paths))
    # What the loss does to the outputs, in their dtype, if these agree.
    if result.marks.output_error <= HARMFUL_OUTPUT_ERROR:
        yield from paths[-1:]
    # Where a large error is born; else where it first shows, and the layer before.
    new_errors = {path: exact.marks.new_errors.get(path, 0.0) for path in paths}
    largest = max(new_errors.values(), default=0.0)
    yield from (
        path
        for path in sorted(paths, key=lambda path: -new_errors[path])
        if new_errors[path] > largest / 10
    )
    errors = result.marks.errors
    half_of_largest = 0.5 * max(errors.values(), default=0.0)
    first = next(
        (index for index, path in enumerate(paths) if errors.get(path, 0.0) > half_of_largest), 0
    )
    yield from paths[max(0, first - 1) : first + 1]
