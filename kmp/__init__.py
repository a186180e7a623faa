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

from kmp import advice, callbacks, layers, records, scaling
from kmp._guard import guard
from kmp._hardware import hardware
from kmp._plan import Plan
from kmp._what_if import what_if
from kmp.advice import advise
from kmp.auditing import audit
from kmp.conversion import convert, to_float32
from kmp.optimizer import LossScaleOptimizer
from kmp.policy import disable, enable, graph_rewrite, wrap
from kmp.records import load_run

__version__ = "0.1.0"

__all__ = [
    "LossScaleOptimizer",
    "Plan",
    "advice",
    "advise",
    "audit",
    "callbacks",
    "convert",
    "disable",
    "enable",
    "graph_rewrite",
    "guard",
    "hardware",
    "layers",
    "load_run",
    "plots",
    "records",
    "report",
    "scaling",
    "to_float32",
    "what_if",
    "wrap",
]


def __getattr__(name: str) -> object:
    """Imports `kmp.plots` and `kmp.report`, and with them matplotlib and jinja2, when they are first used."""
    if name in ("plots", "report"):
        return importlib.import_module(f"kmp.{name}")
    raise AttributeError(f"module 'kmp' has no attribute {name!r}")
