"""What kmp replaces of Keras and TensorFlow, and which of their private names it uses."""

import enum
from dataclasses import dataclass


class Reason(enum.Enum):
    """Why a patch is applied."""

    ENABLED = "while `kmp.enable` or `kmp.graph_rewrite` is on"
    IN_USE = "while an optimizer of kmp or a model compiled under `kmp.enable` is in use"
    CONVERSION = "while `kmp.convert` builds layers"
    STEP = "while a guarded training step is traced or runs eagerly"
    REPLAY = "while a batch is replayed; acts in that thread only"


@dataclass(frozen=True)
class Patch:
    """A function or attribute of Keras or TensorFlow that kmp replaces.

    Args:
        owner: The module, or the class, as `"module:Class"`. A base class may define the name.
        name: Its name there.
        make: The function of kmp that returns the replacement of the original, as
            `"module:function"`.
        when: The reasons to apply it; one is enough.
        promise: What the user loses without it.
        since: The oldest version that it was tested with.
        until: The version that makes it needless; `None` if there is none yet.
        link: The heading in docs/upstream.md, or the issue, that would end it.
        is_new: Whether the owner has no attribute of this name without the patch.
    """

    owner: str
    name: str
    make: str
    when: tuple[Reason, ...]
    promise: str
    since: str = "Keras 3.12"
    until: str | None = None
    link: str = ""
    is_new: bool = False


_OVERRIDES = "kmp.backend.thread_overrides"
_RANDOM = "kmp.backend.tensorflow_internals"

PATCHES = (
    Patch(
        owner="keras:Layer",
        name="_dtype_policy",
        make=f"{_OVERRIDES}:policy_attribute",
        when=(Reason.REPLAY,),
        promise="a replay computes in another precision than the training",
        link="Names that a replay needs",
        is_new=True,
    ),
    Patch(
        owner="keras:Variable",
        name="_dtype",
        make=f"{_OVERRIDES}:variable_dtype_attribute",
        when=(Reason.REPLAY,),
        promise="a replay in float32 does not round the state that it computes",
        link="Names that a replay needs",
        is_new=True,
    ),
    Patch(
        owner="tensorflow:GradientTape",
        name="gradient",
        make=f"{_RANDOM}:gradient_patch",
        when=(Reason.REPLAY,),
        promise="a replay knows where the backward pass of a tape ends",
        since="TensorFlow 2.18",
        link="Names that a replay needs",
    ),
    Patch(
        owner="tensorflow.python.eager.context:Context",
        name="_internal_operation_seed",
        make=f"{_RANDOM}:operation_seed_patch",
        when=(Reason.REPLAY,),
        promise="a replay does not change which random numbers the training draws",
        since="TensorFlow 2.18",
        link="Names that a replay needs",
    ),
    Patch(
        owner="tensorflow.python.eager.polymorphic_function.polymorphic_function:Function",
        name="_run_functions_eagerly",
        make=f"{_RANDOM}:run_eagerly_patch",
        when=(Reason.REPLAY,),
        promise="a replay runs the `tf.function`s of its thread eagerly, and those of no other",
        since="TensorFlow 2.18",
        link="Names that a replay needs",
    ),
    *(
        Patch(
            owner="tensorflow.python.ops.gen_random_ops",
            name=name,
            make=f"{_RANDOM}:{name}_patch",
            when=(Reason.REPLAY,),
            promise="the passes of a replay draw the same random numbers",
            since="TensorFlow 2.18",
            link="Names that a replay needs",
        )
        for name in (
            "random_standard_normal",
            "random_uniform",
            "random_uniform_int",
            "truncated_normal",
        )
    ),
)
