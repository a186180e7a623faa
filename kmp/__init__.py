"""kmp: mixed-precision training for Keras 3 on TensorFlow that is safe and visible.

Example:
>>> import kmp
>>> handle = kmp.enable()          # mixed_float16 for every layer built from here on
>>> handle.policy
'mixed_float16'
>>> kmp.disable()
"""

import importlib

from kmp import _backend

_backend.require_tensorflow()

from kmp import callbacks as callbacks  # noqa: E402  # only a check can come before TensorFlow is imported
from kmp import layers as layers  # noqa: E402
from kmp import records as records  # noqa: E402
from kmp._guard import guard as guard  # noqa: E402
from kmp._hardware import hardware as hardware  # noqa: E402
from kmp._plan import Plan as Plan  # noqa: E402
from kmp._what_if import what_if as what_if  # noqa: E402
from kmp.advice import advise as advise  # noqa: E402
from kmp.auditing import audit as audit  # noqa: E402
from kmp.conversion import convert as convert  # noqa: E402
from kmp.conversion import to_float32 as to_float32  # noqa: E402
from kmp.optimizer import LossScaleOptimizer as LossScaleOptimizer  # noqa: E402
from kmp.policy import disable as disable  # noqa: E402
from kmp.policy import enable as enable  # noqa: E402
from kmp.policy import graph_rewrite as graph_rewrite  # noqa: E402
from kmp.policy import wrap as wrap  # noqa: E402
from kmp.records import load_run as load_run  # noqa: E402

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Imports `kmp.plots` and `kmp.report`, and with them matplotlib and jinja2, when they are first used."""
    if name in ("plots", "report"):
        return importlib.import_module(f"kmp.{name}")
    raise AttributeError(f"module 'kmp' has no attribute {name!r}")
