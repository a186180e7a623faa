"""What kmp uses of Keras' and TensorFlow's private names, each with its reason, and what is built directly on them."""

from kmp.backend import (
    distribution,
    keras_internals,
    model_files,
    tensorflow_internals,
    trainer_fixes,
    xla,
)
from kmp.backend.eager_operations import after_each_gradient, watching_operations, without_tapes
from kmp.backend.keras_internals import defining_class, functional_outputs, is_keras_class, unconnected_copy
from kmp.backend.layer_traversal import (
    compute_dtypes,
    direct_sublayers,
    is_passthrough,
    layers_by_path,
    output_layers,
    rnn_states,
    sublayers,
)
from kmp.backend.patching import Replacement, instance_attribute, replace_policy_state
from kmp.backend.state_rollback import ResourceVariable, state_of_trace, state_restored
from kmp.backend.xla import call_if, outlined

__all__ = [
    "Replacement",
    "ResourceVariable",
    "after_each_gradient",
    "call_if",
    "compute_dtypes",
    "defining_class",
    "direct_sublayers",
    "distribution",
    "functional_outputs",
    "instance_attribute",
    "is_keras_class",
    "is_passthrough",
    "keras_internals",
    "layers_by_path",
    "model_files",
    "outlined",
    "output_layers",
    "replace_policy_state",
    "rnn_states",
    "state_of_trace",
    "state_restored",
    "sublayers",
    "tensorflow_internals",
    "trainer_fixes",
    "unconnected_copy",
    "watching_operations",
    "without_tapes",
    "xla",
]
