"""Argument validation, atomic files, float formats, names and messages, for all packages.

Does not import Keras.
"""

from kmp.utils import atomic_files as atomic_files
from kmp.utils import user_messages as user_messages
from kmp.utils import validation as validation
from kmp.utils.backend_check import require_tensorflow as require_tensorflow
from kmp.utils.float_formats import BFLOAT16 as BFLOAT16
from kmp.utils.float_formats import DTYPES_16_BIT as DTYPES_16_BIT
from kmp.utils.float_formats import FLOAT16 as FLOAT16
from kmp.utils.float_formats import FLOAT32 as FLOAT32
from kmp.utils.float_formats import FORMATS_16_BIT as FORMATS_16_BIT
from kmp.utils.float_formats import FloatFormat as FloatFormat
from kmp.utils.float_formats import as_power as as_power
from kmp.utils.float_formats import is_power_of_two as is_power_of_two
from kmp.utils.names import listed as listed
from kmp.utils.names import matching_indices as matching_indices
from kmp.utils.names import path_and_parents as path_and_parents
from kmp.utils.names import printable as printable
from kmp.utils.names import unique_names as unique_names
from kmp.utils.version import __version__ as __version__
