"""Everything kmp uses of Keras' and TensorFlow's private APIs, each once and with its reason."""

from kmp.backend import (
    distribution,
    index_uses,
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
from kmp.backend.gpu_info import Gpu, Hardware, compute_capabilities, cuda_build, gpu_error, hardware, log_once
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
from kmp.backend.optimizer_resolution import resolve_optimizer
from kmp.backend.packed_variable import PackedElement, PackedVariable
from kmp.backend.process_policy import replace_policy_state
from kmp.backend.serialization import register
from kmp.backend.state_rollback import SavedState, saved_layer_state, state_restored

__all__ = [
    "Gpu",
    "Hardware",
    "PackedElement",
    "PackedVariable",
    "Replacement",
    "SavedState",
    "call_if",
    "compute_capabilities",
    "compute_dtypes",
    "computes_in_16_bits",
    "cuda_build",
    "defining_class",
    "direct_sublayers",
    "distribution",
    "float32_variables",
    "functions_by_reference",
    "global_policy",
    "gpu_error",
    "hardware",
    "index_uses",
    "instance_attribute",
    "is_keras_class",
    "is_passthrough",
    "keras_internals",
    "layers_by_path",
    "log_once",
    "model_files",
    "operation_trace",
    "outlined",
    "output_layers",
    "own_dtype_variables",
    "register",
    "replace_policy_state",
    "resolve_optimizer",
    "rnn_states",
    "saved_layer_state",
    "state_restored",
    "sublayers",
    "tensor_float_32",
    "tensorflow_internals",
    "trainer_fixes",
    "watching_operations",
    "with_named_lambda",
    "xla",
]
