"""The version of kmp."""

__version__ = "0.1.0"
