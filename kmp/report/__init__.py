"""Reports of one or more runs: a terminal summary, and a self-contained HTML file.

Imports rich, jinja2 and, for the figures, matplotlib. `import kmp` therefore does not import it.
"""

from kmp.report.page import html, load, summary, write

__all__ = ["html", "load", "summary", "write"]
