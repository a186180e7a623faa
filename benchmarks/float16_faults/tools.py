"""The tools that come with the benchmark, by name, and those of users, by module."""

import functools
import importlib
import re
from types import TracebackType

import keras
import tensorflow as tf

import kmp
from float16_faults.editing import edited
from float16_faults.tool import Finding, Tool
from float16_faults.truth import CAUSES


class NoTool(Tool):
    """The training alone: what Keras and TensorFlow report without help."""


class TerminateOnNaN(Tool):
    """`keras.callbacks.TerminateOnNaN`, which ends a training whose loss is NaN or Inf."""

    def callbacks(self) -> list[keras.callbacks.Callback]:
        self.callback = keras.callbacks.TerminateOnNaN()
        return [self.callback]

    def findings(self) -> list[Finding]:
        model = self.callback.model
        if getattr(model, "stop_training", False):
            return [Finding("Invalid loss, terminating training")]
        return []


class CheckNumerics(Tool):
    """`tf.debugging.enable_check_numerics`, which raises where a tensor is NaN or Inf."""

    def __enter__(self) -> "CheckNumerics":
        tf.debugging.enable_check_numerics()
        self.found: list[Finding] = []
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        tf.debugging.disable_check_numerics()
        message = str(error)
        report = re.search(r"!!! Detected.*?(?=\n\s*Stack trace)", message, re.DOTALL)
        if report is None:
            # Other errors are its own, and say nothing about the program: XLA does not know its
            # operation, and NumPy fails on some constants in bfloat16.
            return isinstance(error, Exception)
        # The list of frames between the report and the node has the lines of the whole program.
        node = re.search(r"\{\{node [^}]*\}\}", message)
        self.found = [Finding(f"{report[0]} {node[0] if node else ''}")]
        return True

    def findings(self) -> list[Finding]:
        return self.found


class Kmp(Tool):
    """`kmp.callbacks.defaults` and `kmp.advise`."""

    uses_kmp = True
    repairs = True

    def callbacks(self) -> list[keras.callbacks.Callback]:
        return kmp.callbacks.defaults(str(self.folder / "run"), repair=self.repair)

    @functools.cached_property
    def run(self) -> kmp.records.Run:
        return kmp.load_run(self.folder / "run")

    @functools.cached_property
    def advice(self) -> kmp.advice.Advice:
        return kmp.advise(self.run)

    def findings(self) -> list[Finding]:
        found = [
            Finding(
                f"{problem.title}\n{problem.change}",
                cause=problem.cause if problem.cause in CAUSES else None,
                change=edited(self.source, problem.edits) if problem.edits else None,
            )
            for problem in self.advice.problems[:1]
        ]
        layers = self.run.last("fallback")
        if layers is not None:
            found.append(Finding(f"Set to float32: {', '.join(layers)}"))
        return found

    def verdict(self) -> str:
        return self.advice.verdict


TOOLS: dict[str, type[Tool]] = {
    "none": NoTool,
    "terminate_on_nan": TerminateOnNaN,
    "check_numerics": CheckNumerics,
    "kmp": Kmp,
}


def tool_of(name: str) -> type[Tool]:
    """Returns a tool of `TOOLS`, or a class by `MODULE:NAME`.

    Raises:
        ValueError: If there is no such tool, with what to write.
    """
    if name in TOOLS:
        return TOOLS[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(
            f"A tool is {', '.join(TOOLS)}, or MODULE:NAME for a class of your own that Python can"
            f" import from here. Received: {name}"
        )
    try:
        tool = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"Cannot import the tool {name}: {error}") from error
    if not (isinstance(tool, type) and issubclass(tool, Tool)):
        raise ValueError(f"A tool is a subclass of float16_faults.Tool. Received: {name}, {tool!r}")
    return tool
