"""Gradients on the device: unscaling, flags, exponents, norms, and the effects of updates."""

from kmp.gradients.gradient_sampler import GradientSampler as GradientSampler
from kmp.gradients.gradient_sampler import copies_of as copies_of
from kmp.gradients.gradient_sampler import paths_of as paths_of
from kmp.gradients.gradient_sampler import with_updates as with_updates
from kmp.gradients.sampling_clock import NEVER as NEVER
from kmp.gradients.tensor_groups import Gradients as Gradients
from kmp.gradients.tensor_groups import Variables as Variables
from kmp.gradients.tensor_groups import values_of as values_of
from kmp.gradients.tensor_statistics import gradient_statistics as gradient_statistics
from kmp.gradients.tensor_statistics import update_statistics as update_statistics
from kmp.gradients.unscaling import before_cast as before_cast
from kmp.gradients.unscaling import is_overwritten as is_overwritten
from kmp.gradients.unscaling import multiply_gradients as multiply_gradients
from kmp.gradients.unscaling import nonfinite_flag as nonfinite_flag
from kmp.gradients.unscaling import nonfinite_flags as nonfinite_flags
from kmp.gradients.unscaling import unscale_for_update as unscale_for_update
from kmp.gradients.unscaling import with_padded_rows as with_padded_rows
