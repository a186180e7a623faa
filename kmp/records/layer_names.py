"""Names of layers that do not depend on how many models a process has built."""

import re
from collections import Counter
from collections.abc import Mapping

_NUMBER = re.compile(r"_\d+$")


def stable_names(layers: Mapping[str, str]) -> dict[str, str]:
    """Returns a name for each layer that is the same in every model of an architecture.

    Keras numbers the layers that are built without a name over all models of a process: `dense_14`.
    Here these numbers begin with the model, in the order of its layers.

    Args:
        layers: The class of each layer by path, in the order of the model, as in the settings of a
            run.

    Example:
    >>> from kmp.records.layer_names import stable_names
    >>> stable_names({"dense_13": "Dense", "dense_14": "Dense", "head_2": "Dense"})
    {'dense_13': 'dense', 'dense_14': 'dense_1', 'head_2': 'head_2'}
    """
    names: dict[str, str] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for path, class_name in layers.items():
        parent, _, name = path.rpartition("/")
        words = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", class_name))
        # As Keras names the first layer of a class.
        base = re.sub(r"([a-z])([A-Z])", r"\1_\2", words).lower()
        if _NUMBER.sub("", name) == base:
            count = counts[parent, base]
            counts[parent, base] += 1
            name = f"{base}_{count}" if count else base
        stable_parent = names.get(parent, _NUMBER.sub("", parent))  # the model itself has no entry
        names[path] = f"{stable_parent}/{name}" if parent else name
    return names


def stable_name(path: str, names: Mapping[str, str]) -> str:
    """Returns the stable name of a layer, or of a part of one.

    From the result of `stable_names`.
    """
    parent, rest = path, ""
    while parent and parent not in names:
        parent, _, part = parent.rpartition("/")
        rest = f"/{part}{rest}"
    return names[parent] + rest if parent else path
