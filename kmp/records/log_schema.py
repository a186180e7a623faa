"""The schema of a log: each key with its type, its range and its meaning.

This is the only place where they stand, but for the columns of `GradientSample` and for what a
record has of a `Snapshot`, which stand beside these. `python docs/generate_schema.py` writes the
lists in docs/api/records.md.
"""

import textwrap
import types
import typing
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from msgspec import UNSET, Meta, Struct, UnsetType, field

from kmp.records.gradient_sample import COLUMNS, GradientSample
from kmp.records.log_types import (
    Bins,
    Count,
    Factor,
    Fraction,
    LossScale,
    Metrics,
    Names,
    NamesByPath,
    Norm,
    Number,
    PositiveInteger,
    Text,
    TextByPath,
    Texts,
)
from kmp.records.replay import Replay
from kmp.records.snapshot import SnapshotRecord
from kmp.records.step_facts import StepFacts

SCHEMA = 1
_UNIONS = (types.UnionType, typing.Union)  # Python makes the second of an `Annotated` and `None`
_TYPES = {int: "integer", float: "float", str: "string", bool: "true or false", list: "list"}


def _is(meaning: str) -> Meta:
    return Meta(description=meaning)


_DTYPES = {"magnitude": "float64", "norm": "float64", "count": "int64"}
_COLUMNS: dict[str, Any] = {
    name: NotRequired[Annotated[str, _is(f"{_DTYPES[kind]}, `GradientSample.{name}`")]]
    for name, kind in COLUMNS.items()
}
# `kmp.records.compact_sample` checks what the texts contain.
Sample = TypedDict(
    "Sample",
    {
        "loss_scale": Annotated[LossScale, _is("the scale of that step")],
        "bins": Annotated[
            Bins,
            _is("the bins of `ExponentHistogram` that have an element, in ascending order"),
        ],
        "counts": Annotated[
            str,
            _is(
                "int64, the number of elements of the loss-scaled gradients in each of `bins`, one"
                " row per bin and one column per variable; exact"
            ),
        ],
        **_COLUMNS,  # type: ignore[misc]  # mypy knows no keys that are not written out
        "names": NotRequired[
            Annotated[
                Names,
                _is(
                    "the variables' paths, from the input to the loss; omitted if they equal those"
                    " of the `sample` or `reference` before"
                ),
            ]
        ],
    },
)
Sample.__doc__ = "The gradient statistics of one step, most with one number per variable."


class Settings(Struct, kw_only=True, omit_defaults=True, frozen=True):
    """The settings of a run.

    A key with its default, such as a number that is `None`, is omitted in the log.

    Example:
    >>> from kmp.records import Settings
    >>> settings = Settings(rule="DynamicScale", growth_interval=100)
    >>> settings.growth_interval, settings.growth_factor, settings.learning_rate
    (100, 2.0, None)
    """

    rule: Annotated[Text, _is('`"DynamicScale"` or `"FixedScale"`')] = ""
    loss_scale: Annotated[LossScale | None, _is("that of a fixed scale")] = None
    initial_scale: Annotated[LossScale | None, _is("as in `kmp.LossScaleOptimizer`")] = None
    min_scale: Annotated[LossScale | None, _is("as there")] = None
    max_scale: Annotated[LossScale | None, _is("as there")] = None
    growth_interval: Annotated[PositiveInteger | None, _is("as there")] = None
    growth_factor: Annotated[Factor, _is("as there")] = 2.0
    backoff_factor: Annotated[Fraction, _is("as there")] = 0.5
    hysteresis: Annotated[PositiveInteger, _is("as there")] = 1
    settings_call: Annotated[Text, _is("the call that has set the loss scale")] = "kmp.enable"
    model: Annotated[Text, _is("the name of the model")] = ""
    policy: Annotated[Text, _is("the name of its dtype policy")] = ""
    policy_in_force: Annotated[
        Text, _is("that of Keras' global one, which a model from a file does not follow")
    ] = ""
    floatx: Annotated[Text, _is("`keras.config.floatx()`")] = ""
    promoted: Annotated[
        Texts, _is("the lines of the program in which 16-bit operands were promoted to float32")
    ] = []
    step_facts: Annotated[
        StepFacts | None,
        _is(
            "how gradients depend on the loss scale and what the loss is computed in, as the graph"
            " of the step has it, see `StepFacts`"
        ),
    ] = None
    parameters: Annotated[Count | None, _is("the number of elements of its weights")] = None
    layers: Annotated[TextByPath, _is("the class of each of its layers, by path")] = {}
    next_layers: Annotated[
        NamesByPath,
        _is(
            "the paths of the layers that take the outputs of each layer, by path; empty for a"
            " subclassed model"
        ),
    ] = {}
    output_layers: Annotated[Names, _is("the paths of the layers that return its outputs")] = []
    compute_dtypes: Annotated[Texts, _is("the float dtypes that its layers compute in")] = []
    variable_dtypes: Annotated[Texts, _is("the dtypes of its trainable variables")] = []
    float32_variables: Annotated[Names, _is("the paths of the variables of float32 layers")] = []
    own_dtype_variables: Annotated[
        Names,
        _is("the paths of the variables with another dtype than the policy of their layer gives"),
    ] = []
    untrained_variables: Annotated[
        Names, _is("the paths of its trainable variables that its optimizers do not get")
    ] = []
    train_step: Annotated[Text, _is('`"keras"` or `"custom"`')] = ""
    in_fit: Annotated[bool, _is("whether `fit` runs that step, and not another loop")] = False
    optimizer: Annotated[Text, _is("the class of the inner optimizer")] = ""
    is_keras_optimizer: Annotated[bool, _is("whether Keras defines that class")] = True
    clips: Annotated[bool, _is("whether that clips gradients")] = False
    learning_rate: Annotated[Number | None, _is("that of the optimizer, if it is constant")] = None
    epsilon: Annotated[Number | None, _is("that of the optimizer, if it has one")] = None
    beta_2: Annotated[Number | None, _is("that of the optimizer, if it has one")] = None
    replicas: Annotated[PositiveInteger, _is("the number of replicas of all workers")] = 1
    steps_per_execution: Annotated[PositiveInteger, _is("as in `compile`")] = 1
    replay: Annotated[bool, _is("whether `Monitor` was asked to replay batches")] = False


class Header(Struct, kw_only=True, omit_defaults=True, frozen=True):
    """The first line of a log.

    Example:
    >>> from kmp.records import Header, Settings
    >>> Header(settings=Settings(model="mlp")).settings.model
    'mlp'
    """

    # A factory's result is no default that `omit_defaults` omits.
    schema: Annotated[int, Meta(ge=SCHEMA, le=SCHEMA), _is("the version of the format")] = field(
        default_factory=lambda: SCHEMA
    )
    kind: Annotated[Literal["header"], _is('`"header"`')] = field(default_factory=lambda: "header")
    started: Annotated[Text, _is("the time when the training began, UTC")] = ""
    keras: Annotated[Text, _is("the version of Keras")] = ""
    tensorflow: Annotated[Text, _is("the version of TensorFlow")] = ""
    numpy: Annotated[Text, _is("the version of NumPy")] = ""
    settings: Annotated[Settings, _is("see below")] = Settings()


class Record(SnapshotRecord, kw_only=True):
    """A line of a log after the header.

    A key that a record does not have is `msgspec.UNSET`, which is false; `None` stands for NaN, or
    for what is not known.

    Example:
    >>> from kmp.records import Record
    >>> record = Record(step=9, loss_scale=8.0)
    >>> record.loss_scale, bool(record.fallback)
    (8.0, False)
    """

    epoch: Annotated[
        Count | UnsetType, _is("at the end of an epoch: its number from 0, as in Keras")
    ] = UNSET
    metrics: Annotated[
        Metrics | UnsetType,
        _is(
            "at the end of an epoch: each number of Keras' `logs`, such as `loss` and"
            " `val_accuracy`, and `learning_rate`"
        ),
    ] = UNSET
    grad_zeros: Annotated[
        Number | UnsetType | None,
        _is("the fraction of gradient elements that are exactly zero in the sampled step, `step`"),
    ] = UNSET
    grad_norm: Annotated[
        Norm | UnsetType | None,
        _is("the L2 norm of all gradients of that step, without the loss scale"),
    ] = UNSET
    sample: Annotated[
        GradientSample | UnsetType, _is("the gradient statistics of that step, see below")
    ] = UNSET
    reference: Annotated[
        GradientSample | UnsetType, _is("the same, of the float32 pass of `replay`")
    ] = UNSET
    replay: Annotated[
        Replay | UnsetType,
        _is(
            "what two passes over a batch of the training showed, one in the precision of the model"
            " and one in float32, see `Replay`"
        ),
    ] = UNSET
    replay_error: Annotated[Text | UnsetType, _is("why such a batch could not be replayed")] = UNSET
    fallback: Annotated[
        Texts | UnsetType, _is("the paths of layers that compute in float32 since this step")
    ] = UNSET
    fallback_reason: Annotated[Text | UnsetType, _is("why")] = UNSET
    lowered_learning_rate: Annotated[
        Number | UnsetType,
        _is("what `Monitor` has lowered the learning rate to after this step, see `on_nonfinite`"),
    ] = UNSET


def listed(schema: type) -> str:
    """Returns the keys of a schema with their types and meanings, as a list in Markdown."""
    hints = typing.get_type_hints(schema, include_extras=True)
    return "\n".join(_line(name, hints[name]) for name in hints)


def _line(name: str, hint: Any) -> str:
    if typing.get_origin(hint) is NotRequired:
        hint = typing.get_args(hint)[0]
    texts = [meta.description for meta in hint.__metadata__ if meta.description]
    text = f"- `{name}`: {_type_name(hint.__origin__)}, {texts[-1]}."
    return "\n".join(textwrap.wrap(text, 100, subsequent_indent="  ", break_on_hyphens=False))


def _type_name(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin is Annotated:
        return _type_name(hint.__origin__)
    if origin in _UNIONS:
        value, *others = typing.get_args(hint)
        # A lone `None` is a default, which is omitted.
        has_null = {type(None), UnsetType} <= set(others)
        return f"{_type_name(value)} or null" if has_null else _type_name(value)
    return _TYPES.get(origin or hint, "string" if origin is Literal else "object")
