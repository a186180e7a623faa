"""Restores what the code of a user sets in Python objects while it is traced."""

import contextlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any


@contextlib.contextmanager
def attributes_restored(objects: Iterable[Any]) -> Iterator[None]:
    """Restores the attributes of objects, and the lists, dictionaries and sets among them.

    A trace may set one to a tensor of a graph that never runs, such as a loss.
    """
    before = [(each, dict(vars(each))) for each in objects]
    values = [value for _, attributes in before for value in attributes.values()]
    # By their base classes: Keras tracks what is added to its own.
    lists = [(each, list(each)) for each in values if isinstance(each, list)]
    mappings = [(each, dict(each)) for each in values if isinstance(each, dict)]
    sets = [(each, set(each)) for each in values if isinstance(each, set)]
    try:
        yield
    finally:
        for instance, attributes in before:
            own = vars(instance)
            for name in own.keys() - attributes.keys():
                del own[name]
            own.update(attributes)
        for value, content in lists:
            if list(map(id, value)) != list(map(id, content)):
                list.clear(value)
                list.extend(value, content)
        for mapping, items in mappings:
            if _identities(mapping) != _identities(items):
                base = OrderedDict if isinstance(mapping, OrderedDict) else dict
                base.clear(mapping)
                base.update(mapping, items)
        for members, known in sets:
            if members != known:
                set.clear(members)
                set.update(members, known)


def _identities(mapping: dict[Any, Any]) -> list[tuple[Any, int]]:
    return [(key, id(value)) for key, value in mapping.items()]
