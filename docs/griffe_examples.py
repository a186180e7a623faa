"""Shows the example of a docstring, which is not indented, as a block of code."""

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^Example:\n((?:>>> .*(?:\n(?!\n).*)*\n?)+)", re.MULTILINE)


class Examples(griffe.Extension):
    """Rewrites docstrings before they are parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Puts an example into a fenced block."""
        if obj.docstring:
            obj.docstring.value = _EXAMPLE.sub(
                r"**Example**\n\n```pycon\n\1\n```\n", obj.docstring.value
            )
