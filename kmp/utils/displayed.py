"""Results that terminals and notebooks display as tables."""

import io

from rich.console import Console, RenderableType

_WIDTH = 120  # characters, outside a terminal


class Displayed:
    """A base of results: what `__rich__` returns is also their text and their HTML.

    A dataclass needs `repr=False`.
    """

    def __rich__(self) -> RenderableType:
        raise NotImplementedError

    def __repr__(self) -> str:
        return self._recorded().export_text().rstrip()

    def _repr_html_(self) -> str:
        return self._recorded().export_html(
            inline_styles=True, code_format="<pre style='line-height: 1.2'>{code}</pre>"
        )

    def _recorded(self) -> Console:
        """Returns a console that has recorded what is printed outside of a terminal."""
        console = Console(
            file=io.StringIO(), width=_WIDTH, record=True, force_terminal=False, force_jupyter=False
        )
        console.print(self.__rich__())
        return console
