"""The global state of Python, NumPy, TensorFlow and Keras that building a model changes."""

import contextlib
import copy
import random
from collections.abc import Iterator

import numpy as np

from kmp.backend.private_names import find
from kmp.backend.undo import Undos

_RANDOM_OF_TENSORFLOW = ("_seed", "_rng")


@contextlib.contextmanager
def global_state_restored() -> Iterator[None]:
    """Restores the random numbers, and Keras' dtype policy and names, at the end.

    What is built and trained in the context changes nothing of the program around it: the numbers
    that it draws later, and the names of its later layers, are as without the context. Keras has
    its state by thread, and only that of this thread is restored.
    """
    with Undos() as undos, undos.first_attempt():
        _restore_random_numbers(undos)
        _restore_keras(undos)
        yield


def _restore_random_numbers(undos: Undos) -> None:
    python, numpy = random.getstate(), np.random.get_state()
    undos.add(lambda: random.setstate(python))
    undos.add(lambda: np.random.set_state(numpy))
    current = find("tensorflow.python.eager.context:context")
    if current is not None:
        state = vars(current())
        names = [name for name in _RANDOM_OF_TENSORFLOW if name in state]
        saved = {name: copy.deepcopy(state[name]) for name in names}
        undos.add(lambda: state.update(saved))


def _restore_keras(undos: Undos) -> None:
    where = "keras.src.backend.common.global_state:GLOBAL_STATE_TRACKER"
    tracker = find(where)
    if tracker is None:
        return
    saved = dict(vars(tracker))
    counts = copy.copy(saved.get("object_name_uids"))
    generator = saved.get("global_seed_generator")
    position = None if generator is None else np.array(generator.state)

    def restore() -> None:
        state = vars(find(where))  # another one, if the session was cleared
        state.clear()
        state.update(saved)
        if counts is not None:
            state["object_name_uids"] = counts
        if generator is not None:
            generator.state.assign(position)

    undos.add(restore)
