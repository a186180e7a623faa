"""What kmp uses of Keras' and TensorFlow's private names, each with its reason, and what is built directly on them."""

from kmp.backend import distribution as distribution
from kmp.backend import keras_internals as keras_internals
from kmp.backend import model_files as model_files
from kmp.backend import tensorflow_internals as tensorflow_internals
from kmp.backend import trainer_fixes as trainer_fixes
from kmp.backend import xla as xla
from kmp.backend.keras_internals import compute_dtypes as compute_dtypes
from kmp.backend.keras_internals import defining_class as defining_class
from kmp.backend.keras_internals import direct_sublayers as direct_sublayers
from kmp.backend.keras_internals import functional_outputs as functional_outputs
from kmp.backend.keras_internals import instance_attribute as instance_attribute
from kmp.backend.keras_internals import is_keras_class as is_keras_class
from kmp.backend.keras_internals import is_passthrough as is_passthrough
from kmp.backend.keras_internals import layers_by_path as layers_by_path
from kmp.backend.keras_internals import output_layers as output_layers
from kmp.backend.keras_internals import rnn_states as rnn_states
from kmp.backend.keras_internals import sublayers as sublayers
from kmp.backend.keras_internals import unconnected_copy as unconnected_copy
from kmp.backend.patching import Replacement as Replacement
from kmp.backend.patching import replace_policy_state as replace_policy_state
from kmp.backend.state_rollback import ResourceVariable as ResourceVariable
from kmp.backend.state_rollback import state_of_trace as state_of_trace
from kmp.backend.state_rollback import state_restored as state_restored
from kmp.backend.tensorflow_internals import watching_operations as watching_operations
from kmp.backend.xla import call_if as call_if
from kmp.backend.xla import outlined as outlined
