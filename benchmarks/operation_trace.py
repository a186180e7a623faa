"""The operations that TensorFlow runs in a call, and those of its optimized graph.

The events of the profiler have no public reader, and no public function returns an optimized graph.
"""

import contextlib
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

# Its name and type; other events have no type, or a space before it.
_EVENT_OF_OPERATION = re.compile(r"[^:]+:(\w+)")
_ALL_EVENTS = 3  # by default, the profiler leaves out operations that take little time
_CALL = "kmp_call"


def executed_operations(function: Callable[[], Any], calls: int) -> list[Counter[str]]:
    """Returns the number of operations of each type that each of several calls ran on the CPU.

    The profiler sometimes loses events. `Identity`, `Const` and the operations of control flow have
    no events.

    Args:
        function: The function to call. It returns when its operations have run.
        calls: The number of calls.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = tf.profiler.experimental.ProfilerOptions(
            host_tracer_level=_ALL_EVENTS, python_tracer_level=0
        )
        with tf.profiler.experimental.Profile(folder, options):
            for number in range(calls):
                with tf.profiler.experimental.Trace(_CALL, step_num=number):
                    function()
        events = [event for file in Path(folder).rglob("*.xplane.pb") for event in _events(file)]
    spans = sorted((begin, end) for name, begin, end in events if name == _CALL)
    operations = [
        (match[1], begin)
        for name, begin, _ in events
        if (match := _EVENT_OF_OPERATION.fullmatch(name))
    ]
    return [Counter(kind for kind, at in operations if begin <= at < end) for begin, end in spans]


@contextlib.contextmanager
def optimized_graphs() -> Iterator[list[Any]]:
    """Yields a list that gets the graphs, as `GraphDef`, when the context is left.

    They are those of the functions that are called for the first time in the context, as TensorFlow
    runs them: with branches as `Switch` and `Merge`, and with operations of branches that are not
    taken.
    """
    from tensorflow.python.eager import context

    graphs: list[Any] = []
    context.enable_graph_collection()
    try:
        yield graphs
        metadata = context.export_run_metadata()
    finally:
        context.disable_graph_collection()
    graphs += [function.post_optimization_graph for function in metadata.function_graphs]


def _events(file: Path) -> Iterator[tuple[str, int, int]]:
    """Yields name, begin and end of the events in a file of the profiler; times in picoseconds."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    space.ParseFromString(file.read_bytes())
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                begin = line.timestamp_ns * 1000 + event.offset_ps
                yield plane.event_metadata[event.metadata_id].name, begin, begin + event.duration_ps
