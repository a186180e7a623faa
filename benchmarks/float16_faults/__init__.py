"""A benchmark of tools that find faults of 16-bit training. `README.md` says how to use it."""

from float16_faults.tool import Finding, Tool

__all__ = ["Finding", "Tool"]
