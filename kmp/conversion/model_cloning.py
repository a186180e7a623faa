"""Building a model anew from its config, each layer and operation made by a function, with the same weights."""

import contextlib
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
from keras import ops

from kmp import layers
from kmp.backend import global_policy, instance_attribute, rnn_states
from kmp.conversion.model_parts import parts_of

Config = dict[str, Any]
Pair = tuple[keras.Layer, keras.Layer]
Renew = Callable[[keras.Operation, Config], keras.Operation]

_MARK = "kmp_rebuild"


def clone_model(model: keras.Model, renew: Renew, policy: str) -> keras.Model:
    """Returns a new model of the same structure and weights; the one given is left as it is.

    Keras' own way through a file is taken, save that what makes each part is `renew`, which has the old one at hand: no
    class has to be registered, and a part that stands in several places is made once.

    Args:
        model: A model that is built.
        renew: Gets an old layer or operation and its config, and returns the new one.
        policy: The global dtype policy meanwhile: what layers take that a layer makes without telling them a dtype.

    Raises:
        ValueError: If the model, or a layer in it, cannot be made from its config; the message names it.
    """
    stand_ins = {f"{_MARK}_{place}": _StandIn(old, renew) for place, old in enumerate(_all_of(model))}
    with _marked({name: stand_in.old for name, stand_in in stand_ins.items()}):
        config = _of(model)
    with global_policy(policy), model.distribute_strategy.scope():
        new = keras.saving.deserialize_keras_object(
            _with_stand_ins(config, stand_ins), custom_objects=stand_ins, safe_mode=False
        )
    _take_over(model, new, [(one.old, one.new) for one in stand_ins.values() if one.new is not None])
    return new


class _StandIn:
    """What Keras finds in the place of a class: it makes one operation, once."""

    def __init__(self, old: keras.Operation, renew: Renew) -> None:
        self.old = old
        self.new: keras.Operation | None = None
        self._renew = renew

    def from_config(self, config: Config) -> keras.Operation:
        """Returns the new operation."""
        if self.new is None:
            try:
                self.new = self._renew(self.old, config)
            except _CannotBeMadeError:
                raise
            except Exception as error:
                raise _CannotBeMadeError(_cannot(self.old, error)) from error
        return self.new


class _CannotBeMadeError(ValueError):
    """Says which layer cannot be made from its config, and not again what holds it."""


def _cannot(operation: keras.Operation, error: Exception) -> str:
    said, _, _ = str(error).partition("\nExample:")  # code of Keras' own
    *_, said = said.rpartition("Exception encountered:")  # Keras quotes first
    reason = " ".join(said.split()) or type(error).__name__
    return (
        f"{type(operation).__name__} {operation.name!r} cannot be made anew from its config: {reason.rstrip('.')}. "
        "It needs a `get_config` that returns what its `__init__` takes."
    )


def _all_of(model: keras.Model) -> list[keras.Operation]:
    return [model, *(part.operation for part in parts_of(model))]


def _of(model: keras.Model) -> Config:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what a file could not hold: this goes into none
        return keras.saving.serialize_keras_object(model)


@contextlib.contextmanager
def _marked(named: dict[str, keras.Operation]) -> Iterator[None]:
    """Has the config of each operation say its name here, wherever that config goes: into a wrapper's, say."""
    with contextlib.ExitStack() as stack:
        for name, operation in named.items():
            stack.enter_context(instance_attribute(operation, "get_config", _marking(operation, name)))
            if isinstance(operation, keras.Model):  # nothing is compiled
                stack.enter_context(instance_attribute(operation, "get_compile_config", dict))
        yield


def _marking(operation: keras.Operation, name: str) -> Callable[[], Config]:
    theirs = vars(operation).get("get_config")

    def get_config() -> Config:
        with instance_attribute(operation, "get_config", theirs):  # Keras looks whether it is its own
            return marked()

    def marked() -> Config:
        try:
            # Functions go over as they are: a lambda in a config loses the names that it uses.
            config = keras.Layer.get_config(operation) if _runs_a_function(operation) else operation.get_config()
            return config | {_MARK: name}
        except _CannotBeMadeError:
            raise
        except Exception as error:
            raise _CannotBeMadeError(_cannot(operation, error)) from error

    return get_config


def _runs_a_function(operation: keras.Operation) -> bool:
    is_wrapped = isinstance(operation, layers.Float32) and not isinstance(operation.layer, keras.Layer)
    return is_wrapped or isinstance(operation, keras.layers.Lambda)


def _with_stand_ins(config: Any, stand_ins: Mapping[str, _StandIn]) -> Any:
    """Returns a config in which each marked part is made by its stand-in."""
    if isinstance(config, list | tuple):
        return type(config)(_unmarked(_with_stand_ins(one, stand_ins))[0] for one in config)
    if not isinstance(config, dict):
        return config
    pairs = {key: _unmarked(_with_stand_ins(value, stand_ins)) for key, value in config.items()}
    result = {key: value for key, (value, _) in pairs.items()}
    _, name = pairs.get("config", (None, None))
    if name and "class_name" in config:
        result |= {"module": None, "class_name": name, "registered_name": name}
        if not isinstance(stand_ins[name].old, keras.Model):
            result.pop("build_config", None)  # it is built where it is called
    return result


def _unmarked(config: Any) -> tuple[Any, str | None]:
    return config, config.pop(_MARK, None) if isinstance(config, dict) else None


def _take_over(old: keras.Model, new: keras.Model, made: list[Pair]) -> None:
    """Gives a new model what its config does not hold: what each part may learn, and its state."""
    pairs = _with_what_they_made(made)
    for before, after in pairs:
        if before.trainable != after.trainable:
            after.trainable = before.trainable
    if [variable.shape for variable in old.variables] != [variable.shape for variable in new.variables]:
        raise ValueError(
            f"Made anew, {type(old).__name__} {old.name!r} has other variables: its config, or that of a layer in it, "
            "does not say all that it was made with."
        )
    for before, after in pairs:
        _take_over_the_rest(before, after)
    # Last, because what Keras writes of a layer may be weights that LoRA's were merged into.
    for source, target in zip(old.variables, new.variables, strict=True):
        target.assign(source)
        if target.trainable != source.trainable:
            target.trainable = source.trainable


def _with_what_they_made(made: list[Pair]) -> list[Pair]:
    """Adds the layers that layers made themselves, whose names Keras counts on; holders come first."""
    pairs = {id(old): (old, new) for old, new in made if isinstance(old, keras.Layer)}
    for old, new in list(pairs.values()):
        inside = [[part.operation for part in parts_of(holder)] for holder in (old, new)]
        if len(inside[0]) == len(inside[1]):
            pairs |= {
                id(before): (before, after)
                for before, after in zip(*inside, strict=True)
                if isinstance(before, keras.Layer) and id(before) not in pairs
            }
    return list(pairs.values())


def _take_over_the_rest(old: keras.Layer, new: keras.Layer) -> None:
    """Takes over what a layer keeps beside its variables: RNN states, and a vocabulary as Keras writes it to a file."""
    for source, target in zip(rnn_states(old), rnn_states(new), strict=True):
        target.assign(source)
    if type(old).load_own_variables is not keras.Layer.load_own_variables:
        store: dict[str, Any] = {}
        old.save_own_variables(store)
        new.load_own_variables({key: ops.convert_to_numpy(value) for key, value in store.items()})
    if hasattr(old, "load_assets"):
        with tempfile.TemporaryDirectory() as folder:
            old.save_assets(folder)
            new.load_assets(folder)
