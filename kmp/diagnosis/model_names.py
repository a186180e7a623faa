"""The names of a model's layers, and what texts call them."""

from collections.abc import Mapping, Sequence

from kmp.records import Settings
from kmp.records.gradient_sample import layer_of
from kmp.records.replay import LOSS_FUNCTION
from kmp.utils.names import path_and_parents


class ModelNames:
    """The layers of a model, as a program creates them.

    Args:
        settings: The settings of a run.

    Attributes:
        name: The name of the model.
        layers: The class of each layer, by path.
    """

    def __init__(self, settings: Settings) -> None:
        self.name: str = settings.model
        self.layers: Mapping[str, str] = settings.layers

    def layer_of(self, variable: str) -> str:
        """Returns the path of the layer that a program creates and that has this variable.

        That is an RNN, not its cell.
        """
        return self.created_layer(layer_of(variable))

    def created_layer(self, layer: str) -> str:
        """Returns the path of the layer that a program creates and that is or contains this.

        For a cell of an RNN, that is the RNN.
        """
        return next((each for each in path_and_parents(layer) if each in self.layers), layer)

    def describe(self, layer: str) -> str:
        """Returns what a text calls a layer: its name, or its path if several have this name."""
        if layer == LOSS_FUNCTION:
            return layer
        if layer and layer == self.name:
            return f"model {layer!r} outside its layers"
        name = name_of(layer)
        namesakes = [path for path in self.layers if name_of(path) == name]
        is_inside_another = self.created_layer(layer) != layer
        shown = layer if len(namesakes) > 1 or is_inside_another else name
        return f"layer {shown!r}"

    def describe_repaired(self, layers: Sequence[str]) -> str:
        """Returns what texts call layers that were set to float32, one of which may be a model."""
        names = []
        for path in layers:
            is_model = bool(path) and path == self.name
            names.append(f"model {path!r}" if is_model else self.describe(path))
        return ", ".join(names)


def name_of(path: str) -> str:
    """Returns the name of a layer, the last component of its path."""
    return path.rpartition("/")[2]
