"""Reports of one or more runs: a terminal summary, and a self-contained HTML file.

Imports rich, jinja2 and, for the figures, matplotlib. `import kmp` therefore does not import it.
"""

from kmp.report.loading import load
from kmp.report.page import html, write
from kmp.report.terminal import summary

__all__ = ["html", "load", "summary", "write"]
