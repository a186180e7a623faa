"""A run, or several side by side, as a summary for the terminal and as one self-contained HTML file.

Imports rich and jinja2, and matplotlib for the figures, so `import kmp` leaves it out.
"""

from kmp.report.page import html, load, summary, write

__all__ = ["html", "load", "summary", "write"]
