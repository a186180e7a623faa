"""Everything kmp uses of Keras' and TensorFlow's private APIs, each once and with its reason."""

from kmp.backend import (
    distribution,
    keras_internals,
    model_files,
    operation_trace,
    tensorflow_internals,
    trainer_fixes,
    xla,
)
from kmp.backend.branches import call_if, outlined
from kmp.backend.eager_operations import watching_operations
from kmp.backend.function_references import functions_by_reference, with_named_lambda
from kmp.backend.layer_traversal import (
    compute_dtypes,
    computes_in_16_bits,
    direct_sublayers,
    float32_variables,
    is_passthrough,
    layers_by_path,
    output_layers,
    own_dtype_variables,
    rnn_states,
    sublayers,
)
from kmp.backend.monkeypatch import (
    Replacement,
    defining_class,
    global_policy,
    instance_attribute,
    is_keras_class,
    tensor_float_32,
)
from kmp.backend.process_policy import replace_policy_state
from kmp.backend.state_rollback import state_restored

__all__ = [
    "Replacement",
    "call_if",
    "compute_dtypes",
    "computes_in_16_bits",
    "defining_class",
    "direct_sublayers",
    "distribution",
    "float32_variables",
    "functions_by_reference",
    "global_policy",
    "instance_attribute",
    "is_keras_class",
    "is_passthrough",
    "keras_internals",
    "layers_by_path",
    "model_files",
    "operation_trace",
    "outlined",
    "output_layers",
    "own_dtype_variables",
    "replace_policy_state",
    "rnn_states",
    "state_restored",
    "sublayers",
    "tensor_float_32",
    "tensorflow_internals",
    "trainer_fixes",
    "watching_operations",
    "with_named_lambda",
    "xla",
]
