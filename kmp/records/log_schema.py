"""The schema of a log: each key with its type, its range and its meaning.

This is the only place where they stand: `python docs/generate_schema.py` writes the lists in
docs/api/records.md.
"""

import textwrap
import types
import typing
from typing import Annotated, Any, Literal, NotRequired, Required, TypedDict

from msgspec import Meta

from kmp.records.gradient_sample import COLUMNS
from kmp.records.log_types import (
    Bins,
    Count,
    CountByVariable,
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


class Settings(TypedDict, total=False):
    """The settings of a run."""

    rule: Annotated[Text, _is('`"DynamicScale"` or `"FixedScale"`')]
    loss_scale: Annotated[LossScale, _is("that of a fixed scale")]
    initial_scale: Annotated[LossScale, _is("as in `kmp.LossScaleOptimizer`")]
    min_scale: Annotated[LossScale, _is("as there")]
    max_scale: Annotated[LossScale, _is("as there")]
    growth_interval: Annotated[PositiveInteger, _is("as there")]
    growth_factor: Annotated[Factor, _is("as there")]
    backoff_factor: Annotated[Fraction, _is("as there")]
    hysteresis: Annotated[PositiveInteger, _is("as there")]
    settings_call: Annotated[Text, _is("the call that has set the loss scale")]
    model: Annotated[Text, _is("the name of the model")]
    policy: Annotated[Text, _is("the name of its dtype policy")]
    policy_in_force: Annotated[
        Text, _is("that of Keras' global one, which a model from a file does not follow")
    ]
    floatx: Annotated[Text, _is("`keras.config.floatx()`")]
    promoted: Annotated[
        Texts, _is("the lines of the program in which 16-bit operands were promoted to float32")
    ]
    step_facts: Annotated[
        StepFacts,
        _is(
            "how gradients depend on the loss scale and what the loss is computed in, as the graph"
            " of the step has it, see `StepFacts`"
        ),
    ]
    parameters: Annotated[Count, _is("the number of elements of its weights")]
    layers: Annotated[TextByPath, _is("the class of each of its layers, by path")]
    next_layers: Annotated[
        NamesByPath,
        _is(
            "the paths of the layers that take the outputs of each layer, by path; empty for a"
            " subclassed model"
        ),
    ]
    output_layers: Annotated[Names, _is("the paths of the layers that return its outputs")]
    compute_dtypes: Annotated[Texts, _is("the float dtypes that its layers compute in")]
    variable_dtypes: Annotated[Texts, _is("the dtypes of its trainable variables")]
    float32_variables: Annotated[Names, _is("the paths of the variables of float32 layers")]
    own_dtype_variables: Annotated[
        Names,
        _is("the paths of the variables with another dtype than the policy of their layer gives"),
    ]
    untrained_variables: Annotated[
        Names, _is("the paths of its trainable variables that its optimizers do not get")
    ]
    train_step: Annotated[Text, _is('`"keras"` or `"custom"`')]
    in_fit: Annotated[bool, _is("whether `fit` runs that step, and not another loop")]
    optimizer: Annotated[Text, _is("the class of the inner optimizer")]
    is_keras_optimizer: Annotated[bool, _is("whether Keras defines that class")]
    clips: Annotated[bool, _is("whether that clips gradients")]
    learning_rate: Annotated[Number, _is("that of the optimizer, if it is constant")]
    epsilon: Annotated[Number, _is("that of the optimizer, if it has one")]
    beta_2: Annotated[Number, _is("that of the optimizer, if it has one")]
    replicas: Annotated[PositiveInteger, _is("the number of replicas of all workers")]
    steps_per_execution: Annotated[PositiveInteger, _is("as in `compile`")]
    replay: Annotated[bool, _is("whether `Monitor` was asked to replay batches")]


class Header(TypedDict):
    """The first line of a log."""

    schema: Annotated[int, Meta(ge=SCHEMA, le=SCHEMA), _is("the version of the format")]
    kind: Annotated[Literal["header"], _is('`"header"`')]
    started: NotRequired[Annotated[Text, _is("the time when the training began, UTC")]]
    keras: NotRequired[Annotated[Text, _is("the version of Keras")]]
    tensorflow: NotRequired[Annotated[Text, _is("the version of TensorFlow")]]
    numpy: NotRequired[Annotated[Text, _is("the version of NumPy")]]
    settings: NotRequired[Annotated[Settings, _is("see below")]]


class Record(TypedDict, total=False):
    """A line of a log after the header."""

    step: Required[Annotated[Count, _is("training steps done, including skipped ones")]]
    loss_scale: Annotated[LossScale | None, _is("the scale of the next step")]
    clean_steps: Annotated[
        Count,
        _is(
            "steps without an overflow since the scale last grew (or would have grown, if it is at"
            " its maximum) or the gradients of a finite loss last overflowed"
        ),
    ]
    overflow_count: Annotated[
        Count,
        _is("steps skipped since training began because the loss or a gradient was non-finite"),
    ]
    overflow_rate: Annotated[
        Number | None, _is("the fraction of steps skipped since the previous record")
    ]
    overflows_in_a_row: Annotated[Count, _is("steps skipped since the last applied step")]
    nonfinite_loss_count: Annotated[
        Count, _is("the steps in `overflow_count` whose loss was non-finite before scaling")
    ]
    nonfinite_losses_in_a_row: Annotated[
        Count, _is("the steps in `overflows_in_a_row` whose loss was non-finite before scaling")
    ]
    overflows_by_variable: Annotated[
        CountByVariable,
        _is(
            "the number of steps in which the gradient of a variable was non-finite, by path; zeros"
            " are omitted. In records in which this or the next key has changed, in a long run in"
            " some of them"
        ),
    ]
    overflow_origins_by_variable: Annotated[
        CountByVariable,
        _is(
            "the number of skipped steps with a finite loss in which a variable was the overflow"
            " origin, by path; zeros are omitted"
        ),
    ]
    overflow_origin: Annotated[
        Text | None,
        _is(
            "in records after new such steps: the path of the last step's overflow origin, see"
            " `Snapshot`"
        ),
    ]
    last_loss: Annotated[
        Number | None, _is("the loss of the last step before scaling, summed over replicas")
    ]
    highest_loss: Annotated[
        Number | None,
        _is("the largest magnitude of a finite loss so far, before scaling, summed over replicas"),
    ]
    loss_dtype: Annotated[
        Text | None,
        _is(
            "the dtype of the loss that `scale_loss` got, in the first record and where it changed"
        ),
    ]
    epoch: Annotated[Count, _is("at the end of an epoch: its number from 0, as in Keras")]
    metrics: Annotated[
        Metrics,
        _is(
            "at the end of an epoch: each number of Keras' `logs`, such as `loss` and"
            " `val_accuracy`, and `learning_rate`"
        ),
    ]
    grad_zeros: Annotated[
        Number | None,
        _is("the fraction of gradient elements that are exactly zero in the sampled step, `step`"),
    ]
    grad_norm: Annotated[
        Norm | None, _is("the L2 norm of all gradients of that step, without the loss scale")
    ]
    sample: Annotated[Sample, _is("the gradient statistics of that step, see below")]
    reference: Annotated[Sample, _is("the same, of the float32 pass of `replay`")]
    replay: Annotated[
        Replay,
        _is(
            "what two passes over a batch of the training showed, one in the precision of the model"
            " and one in float32, see `Replay`"
        ),
    ]
    replay_error: Annotated[Text, _is("why such a batch could not be replayed")]
    fallback: Annotated[Texts, _is("the paths of layers that compute in float32 since this step")]
    fallback_reason: Annotated[Text, _is("why")]
    lowered_learning_rate: Annotated[
        Number,
        _is("what `Monitor` has lowered the learning rate to after this step, see `on_nonfinite`"),
    ]


def listed(schema: type) -> str:
    """Returns the keys of a schema with their types and meanings, as a list in Markdown."""
    hints = typing.get_type_hints(schema, include_extras=True)
    return "\n".join(_line(name, hints[name]) for name in hints)


def _line(name: str, hint: Any) -> str:
    while typing.get_origin(hint) in (NotRequired, Required):
        hint = typing.get_args(hint)[0]
    texts = [meta.description for meta in hint.__metadata__ if meta.description]
    text = f"- `{name}`: {_type_name(hint.__origin__)}, {texts[-1]}."
    return "\n".join(textwrap.wrap(text, 100, subsequent_indent="  ", break_on_hyphens=False))


def _type_name(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin is Annotated:
        return _type_name(hint.__origin__)
    if origin in _UNIONS:
        return f"{_type_name(typing.get_args(hint)[0])} or null"
    return _TYPES.get(origin or hint, "string" if origin is Literal else "object")
