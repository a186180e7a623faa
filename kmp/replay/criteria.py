"""What the searches of a replay look for. It is decided elsewhere."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kmp.records.replay import Comparison, StateError
from kmp.utils.float_formats import FloatFormat

Shares = Mapping[str, float]  # of a gradient that is flushed to zero, by the path of its variable
LayerOf = Callable[[str], str]  # of a variable
# Whether a comparison in a format, over so many examples, shows that 16 bits hurt.
IsHarmful = Callable[[Comparison, FloatFormat, int], bool]


class Criteria(NamedTuple):
    """What a replay has to decide while it runs, because it looks further then.

    Attributes:
        is_harmful: Whether to search for layers to compute in float32, and whether they are enough.
        lost_states: Returns the states that are harmed, among those compared.
        flushed_layers: Returns the layers whose gradients are flushed for the most part.
        flushed_branch: Returns those of them that are a branch of the model. It gets the layers
            that follow each, too.
    """

    is_harmful: IsHarmful
    lost_states: Callable[[Comparison], list[StateError]]
    flushed_layers: Callable[[Shares, LayerOf], list[str]]
    flushed_branch: Callable[[Shares, LayerOf, Mapping[str, Sequence[str]]], list[str]]
