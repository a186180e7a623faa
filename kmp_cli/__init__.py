"""The `kmp` command.

Outside the package `kmp`, because it works where Keras and TensorFlow cannot be imported.
"""

from kmp_cli.arguments import main

__all__ = ["main"]
