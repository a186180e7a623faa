"""The sentences about a cause: `text_of`, to which the modules of this package add each cause."""

import functools
from typing import NamedTuple

from kmp.diagnosis import Cause, RunMetrics


class Text(NamedTuple):
    """The sentences of a finding, see `kmp.advice.Finding`."""

    title: str
    evidence: str
    note: str = ""


@functools.singledispatch
def text_of(cause: Cause, run: RunMetrics) -> Text:
    """Returns the sentences about a cause of a run."""
    raise NotImplementedError(f"no sentences about {type(cause).__name__}")
