"""kmp: mixed-precision training for Keras 3 on TensorFlow, with loss scaling and monitoring.

Example:
>>> import kmp
>>> handle = kmp.enable()  # layers created from now on use mixed_float16
>>> handle.policy
'mixed_float16'
>>> kmp.disable()
"""

import importlib
from typing import TYPE_CHECKING

from kmp import advice, records, scaling
from kmp.advice import advise, what_if
from kmp.records import load_run
from kmp.utils.backend_check import has_tensorflow, require_tensorflow
from kmp.utils.version import __version__ as __version__

if has_tensorflow():  # else what reads logs works, and the other names are errors
    require_tensorflow()

    from kmp import layers, optimizer
    from kmp.enabling import disable, enable, gpus, graph_rewrite, wrap
    from kmp.guarding import guard
    from kmp.optimizer import LossScaleOptimizer

if TYPE_CHECKING:  # else imported on first access
    from kmp import callbacks, plots, report
    from kmp.conversion import Plan, audit, convert, to_float32

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
    "gpus",
    "graph_rewrite",
    "guard",
    "layers",
    "load_run",
    "optimizer",
    "plots",
    "records",
    "report",
    "scaling",
    "to_float32",
    "what_if",
    "wrap",
]


def __getattr__(name: str) -> object:
    """Imports on first access what a training may not need.

    `kmp.callbacks` replays batches, and `kmp.plots` and `kmp.report` need matplotlib and jinja2.
    """
    if name not in __all__:
        raise AttributeError(f"module 'kmp' has no attribute {name!r}")
    if name not in ("plots", "report"):
        try:
            require_tensorflow()
        except ImportError as error:  # `hasattr` and tools that inspect modules expect the other
            raise AttributeError(f"`kmp.{name}` needs TensorFlow. {error}") from error
    if name in ("Plan", "audit", "convert", "to_float32"):
        from kmp import conversion

        return getattr(conversion, name)
    return importlib.import_module(f"kmp.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
