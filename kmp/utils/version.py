"""The version of kmp."""

__version__ = "0.2.0"
