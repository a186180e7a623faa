"""What every package uses: validation of arguments, atomic files, float formats, names, messages. Needs no Keras."""

from kmp.utils import atomic_files, user_messages, validation
from kmp.utils.backend_check import require_tensorflow
from kmp.utils.float_formats import BFLOAT16, FLOAT16, FLOAT32, HALF, as_power, is_power_of_two
from kmp.utils.names import matching, unique
from kmp.utils.version import __version__

__all__ = [
    "BFLOAT16",
    "FLOAT16",
    "FLOAT32",
    "HALF",
    "__version__",
    "as_power",
    "atomic_files",
    "is_power_of_two",
    "matching",
    "require_tensorflow",
    "unique",
    "user_messages",
    "validation",
]
