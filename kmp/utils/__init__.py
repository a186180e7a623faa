"""Argument validation, atomic files, float formats, names and messages, for all packages. Does not import Keras."""

from kmp.utils import atomic_files, user_messages, validation
from kmp.utils.backend_check import require_tensorflow
from kmp.utils.float_formats import (
    BFLOAT16,
    DTYPES_16_BIT,
    FLOAT16,
    FLOAT32,
    FORMATS_16_BIT,
    FloatFormat,
    as_power,
    is_power_of_two,
)
from kmp.utils.names import listed, matching_indices, path_and_parents, printable, unique_names
from kmp.utils.version import __version__

__all__ = [
    "BFLOAT16",
    "DTYPES_16_BIT",
    "FLOAT16",
    "FLOAT32",
    "FORMATS_16_BIT",
    "FloatFormat",
    "__version__",
    "as_power",
    "atomic_files",
    "is_power_of_two",
    "listed",
    "matching_indices",
    "path_and_parents",
    "printable",
    "require_tensorflow",
    "unique_names",
    "user_messages",
    "validation",
]
