"""`kmp demo`: compares a network in float32, in float16 with Keras, and in float16 with kmp."""

from kmp_cli.demo.presentation import run

__all__ = ["run"]
