"""Reports of one or more runs: a terminal summary, and a self-contained HTML file.

Imports rich, jinja2 and, for the page, matplotlib. `import kmp` does not; `kmp.report` is imported
on first use.
"""

from kmp.report.loading import load
from kmp.report.page import html, write
from kmp.report.terminal import summary

__all__ = ["html", "load", "summary", "write"]
